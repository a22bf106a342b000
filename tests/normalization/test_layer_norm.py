"""layer_norm and add_layer_norm."""

import pytest
import torch
import torch.nn.functional as F
from opinfo import check_samples
from references import (
    DTYPES,
    assert_near,
    assert_same_error,
    check_operator,
    layouts,
    leaf,
    second_derivatives,
    tensor,
    wide,
)
from rows import FAMILIES, lengths, tuned

import metalcore

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
each_family = pytest.mark.parametrize("family", FAMILIES)


def check(x, weight, bias, dims=1):
    """Compares the result and the gradients with the reference."""
    leaves = [leaf(t) for t in (x, weight, bias)]
    wide_leaves = [None if t is None else leaf(wide(t)) for t in (x, weight, bias)]
    shape = x.shape[-dims:]
    y, expected = (
        metalcore.layer_norm(leaves[0], shape, *leaves[1:]),
        F.layer_norm(wide_leaves[0], shape, *wide_leaves[1:]),
    )
    assert y.dtype == x.dtype and y.shape == x.shape
    assert_near(y, expected.detach(), terms=8)
    assert torch.equal(metalcore.layer_norm(x, shape, weight, bias), y)  # no gradient is asked of x
    grad = tensor(*x.shape, dtype=x.dtype, device=x.device)
    found = torch.autograd.grad(y, [t for t in leaves if t is not None], grad)
    wanted = torch.autograd.grad(expected, [t for t in wide_leaves if t is not None], wide(grad))
    # The gradient of x is a difference of terms as large as scale * grad * weight.
    scale = torch.rsqrt(wide(x).var(tuple(range(-dims, 0)), correction=0, keepdim=True) + 1e-5)
    parts = (scale * wide(grad) * (1 if weight is None else wide(weight))).abs()
    length = shape.numel()
    assert_near(found[0], wanted[0], terms=4 + length**0.5, magnitude=parts.max().item())
    for actual, reference in zip(found[1:], wanted[1:]):
        assert actual.shape == reference.shape
        assert_near(actual, reference, terms=4 + (x.numel() / length) ** 0.5)


@each_dtype
@each_family
def test_lengths(device, dtype, family):
    with tuned(family):
        for length in lengths("layer_norm", dtype):
            if length == 1:
                continue  # the result is the bias, and rounding errors of the gradient have no scale
            x = tensor(9 if length < 2000 else 2, length, dtype=dtype, device=device)
            weight, bias = tensor(2, length, dtype=dtype, device=device)
            check(x, weight, bias)
            check(x, None, None)
            check(x, None, bias)


@pytest.mark.parametrize("length, wide", [(2048, False), (2049, True), (4096, True), (4097, False)])
def test_teams_of_the_derivative(device, length, wide):
    """Rows of 16-bit elements have wide teams where nothing else is added."""
    if device == "cpu":
        pytest.skip("the CPU has no teams")
    with tuned("baseline"):
        plan = metalcore.explain("layer_norm", (3, length), (length,), dtype=torch.float16, backward=True)
        assert plan.variant == ("block1" if wide else "block2")
        added = metalcore.explain(
            "add_layer_norm", (3, length), (3, length), (length,), dtype=torch.float16, backward=True
        )
        assert added.variant == "block2"
        x, weight, bias = (tensor(*shape, length, dtype=torch.float16, device=device) for shape in ((3,), (), ()))
        check(x, weight, bias)


@each_family
def test_rows_of_equal_elements_and_gradients(device, family):
    """The gradient is 0. Their reciprocal deviation is 316, which would show what rounding leaves of grad * weight: the
    square of 1 + 2^-13 is rounded to 1 + 2^-12, whose sums and means over powers of two are exact."""
    with tuned(family):
        for length in (1, 2, 16, 128, 512, 2048, 8192):
            x = leaf(torch.full((3, length), 3.0, device=device))
            weight = torch.full((length,), 1 + 2**-13, device=device)
            y = metalcore.layer_norm(x, (length,), weight, weight)
            assert torch.equal(y, weight.expand_as(y))
            assert not torch.autograd.grad(y, x, weight.expand_as(y))[0].any(), length


@each_family
def test_a_mean_far_from_zero(device, family):
    """The variance is no difference of large sums: numbers of 8 fractional bits around 4096 are exact in float32."""
    with tuned(family):
        for length in lengths("layer_norm", torch.float32):
            if length > 1:
                x = (tensor(2, length) * 256).round() / 256 + 4096
                y = metalcore.layer_norm(x.to(device), (length,))
                # The mean is off by some roundings of 4096, each of 2^-12 of it.
                torch.testing.assert_close(wide(y), F.layer_norm(wide(x), (length,)), rtol=2e-3, atol=4e-3)


@each_family
def test_parts_of_different_means(device, family):
    """What the simdgroups of a row have seen differs in mean and, at the row's end, in count."""
    with tuned(family):
        for length in (513, 640, 1300, 2048, 2049, 3072, 3076, 5000):
            x = tensor(3, length, device=device)
            x[:, : length // 3] += 1000
            x[1, -1] = -5e4
            check(x, *tensor(2, length, device=device))


@each_family
def test_more_rows_than_teams_of_threads(device, family):
    with tuned(family):
        for rows, length in ((2049, 24), (4230, 150), (1500, 600)):
            check(tensor(rows, length, device=device), *tensor(2, length, device=device))


@each_dtype
@each_family
def test_layouts(device, dtype, family):
    with tuned(family):
        for x in layouts(lambda *shape: tensor(*shape, dtype=dtype, device=device)).values():
            if x.stride(-1) == 0:
                continue  # rows of equal elements: the result is the bias
            check(x, *tensor(2, 8, dtype=dtype, device=device))
            check(x, *tensor(2, 17, dtype=dtype, device=device)[:, 1::2])
            check(x, *tensor(2, 6, 8, dtype=dtype, device=device), dims=2)


@each_family
def test_heads(device, family):
    """Rows that lie in three strides, as the heads of a transposed projection do."""
    with tuned(family):
        x = tensor(2, 5, 3 * 4 * 64, device=device).view(2, 5, 12, 64)[:, :, :4].transpose(1, 2)
        check(x, *tensor(2, 64, device=device))
        assert metalcore.layer_norm(x, (64,)).is_contiguous()


@each_dtype
@each_family
def test_add_layer_norm(device, dtype, family):
    with tuned(family):
        for length in lengths("add_layer_norm", dtype):
            x, residual = (leaf(tensor(3, length, dtype=dtype, device=device)) for _ in "xr")
            weight, bias = (leaf(tensor(length, dtype=dtype, device=device)) for _ in "wb")
            y, total = metalcore.add_layer_norm(x, residual, weight, bias)
            assert torch.equal(total, x + residual)
            again = leaf(total)
            expected = metalcore.layer_norm(again, (length,), weight, bias)
            assert torch.equal(y, expected)
            with torch.no_grad():
                assert all(map(torch.equal, metalcore.add_layer_norm(x, residual, weight, bias), (y, total)))
            gy, gt = (tensor(3, length, dtype=dtype, device=device) for _ in "yt")
            found = torch.autograd.grad((y, total), (x, residual, weight, bias), (gy, gt))
            g_again, gw, gb = torch.autograd.grad(expected, (again, weight, bias), gy)
            assert torch.equal(found[0], found[1])
            assert_near(found[2], wide(gw), terms=6)  # other teams may add the rows up in another order
            assert_near(found[3], wide(gb), terms=6)
            bound = 2 * torch.finfo(dtype).eps * (wide(g_again).abs() + wide(gt).abs() + 1e-30)
            assert ((wide(found[0]) - wide(g_again) - wide(gt)).abs() <= bound).all()


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (2, 0, 3), (0,)])
def test_empty(device, shape):
    x, weight, bias = (leaf(tensor(*size, device=device)) for size in (shape, shape[-1:], shape[-1:]))
    y = metalcore.layer_norm(x, shape[-1:], weight, bias)
    assert y.shape == shape == metalcore.layer_norm(x.detach(), shape[-1:]).shape
    gx, gw, gb = torch.autograd.grad(y.sum(), (x, weight, bias))
    assert gx.shape == shape and not gw.any() and not gb.any()


def test_parameters_of_another_dtype(device):
    """PyTorch's op takes them, or refuses them."""
    x, weight = tensor(3, 8, device=device), tensor(8, device=device)
    total = metalcore.add_layer_norm(x, x, weight, None)[1]
    assert torch.equal(total, 2 * x)
    assert_same_error(
        lambda: metalcore.layer_norm(x, (8,), weight.half(), None), lambda: F.layer_norm(x, (8,), weight.half(), None)
    )


def test_double_backward(device):
    *leaves, grad = (tensor(*shape, device=device) for shape in ((5, 7), (7,), (7,), (5, 7)))
    found = second_derivatives(lambda x, w, b: metalcore.layer_norm(x, (7,), w, b), leaves, grad)
    expected = second_derivatives(lambda x, w, b: F.layer_norm(x, (7,), w, b), map(wide, leaves), wide(grad))
    for actual, wanted in zip(found, expected):
        assert_near(actual, wanted, terms=16 * 7)


@each_dtype
def test_pytorch_samples(device, dtype):
    check_samples(metalcore.layer_norm, "nn.functional.layer_norm", device, dtype)


@pytest.mark.only_on("simulator", "mps", "cuda")
@each_dtype
def test_in_pytorchs_place(device, dtype):
    def gradients(x, weight, bias):
        y = F.layer_norm(x, (40,), weight, bias)
        return [y, *torch.autograd.grad(y.square().sum(), [x, weight, bias])]

    tensors = [leaf(tensor(*shape, dtype=dtype, device=device)) for shape in ((6, 5, 40), (40,), (40,))]
    expected = gradients(*[leaf(wide(t)) for t in tensors])
    with metalcore.enable_pytorch_overrides("layer_norm"):
        found = gradients(*tensors)
        (x, *_), only_bias = tensors, leaf(tensor(40, dtype=dtype, device=device))
        torch.autograd.grad(F.layer_norm(x, (40,), None, only_bias).sum(), only_bias)
        rows = {row.what: row.ran for row in metalcore.report().rows}
    assert rows == {f"aten::native_layer_norm on {device}": 2, f"aten::native_layer_norm_backward on {device}": 2}
    for actual, wanted in zip(found, expected):
        bound = 16 * torch.finfo(dtype).eps * wanted.abs().max()
        assert ((wide(actual) - wanted.detach()).abs() <= bound).all()


@pytest.mark.parametrize("place", ["cpu", "device"])
def test_opcheck(device, place):
    device = "cpu" if place == "cpu" else device
    x, weight, bias = (leaf(tensor(*shape, device=device)) for shape in ((3, 5), (5,), (5,)))
    check_operator(torch.ops.metalcore.plain_layer_norm, x, 1, weight, bias, 1e-5)
    check_operator(torch.ops.metalcore.plain_add_layer_norm, x, x.detach(), 1, weight, bias, 1e-5)
    other, means, scales = tensor(3, 5, device=device), *tensor(2, 3, 1, device=device)
    ops = torch.ops.metalcore
    check_operator(ops.layer_norm, x, 1, weight, bias, 1e-3)
    check_operator(ops.add_layer_norm, x, other, 1, weight, None, 1e-3)
    check_operator(ops.layer_norm_backward, other, x, means, scales, other, 1, weight, True)


def test_bad_input(device):
    x = tensor(3, 4, device=device)
    for arguments in [((5,),), ((4,), tensor(3, device=device)), ((),)]:
        on_cpu = [a.cpu() if isinstance(a, torch.Tensor) else a for a in arguments]
        assert_same_error(lambda: metalcore.layer_norm(x, *arguments), lambda: F.layer_norm(x.cpu(), *on_cpu))
    op = torch.ops.metalcore.layer_norm
    with pytest.raises(RuntimeError, match="cannot normalize the last 3 of 2 dimensions"):
        op(x, 3, None, None, 1e-5)
    with pytest.raises(RuntimeError, match="bias must have 4 elements, not 3"):
        op(x, 1, None, tensor(3, device=device), 1e-5)
