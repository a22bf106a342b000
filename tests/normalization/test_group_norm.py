"""group_norm."""

import pytest
import torch
import torch.nn.functional as F
from opinfo import check_samples
from references import DTYPES, assert_near, assert_same_error, check_operator, leaf, second_derivatives, tensor, wide
from rows import FAMILIES, tuned

import metalcore

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
each_family = pytest.mark.parametrize("family", FAMILIES)


def check(x, groups, weight, bias):
    """Compares the result and the gradients with the reference."""
    leaves = [leaf(t) for t in (x, weight, bias)]
    wide_leaves = [None if t is None else leaf(wide(t)) for t in (x, weight, bias)]
    y = metalcore.group_norm(leaves[0], groups, *leaves[1:])
    wide_x, wide_weight, wide_bias = wide_leaves
    if wide_weight is None:  # PyTorch's derivative fails where there is a bias alone
        wide_weight = torch.ones(x.shape[1], dtype=torch.float64)
    expected = F.group_norm(wide_x, groups, wide_weight, wide_bias)
    assert y.dtype == x.dtype and y.shape == x.shape and y.is_contiguous()
    assert_near(y, expected.detach(), terms=8)
    grad = tensor(*x.shape, dtype=x.dtype, device=x.device)
    found = torch.autograd.grad(y, [t for t in leaves if t is not None], grad)
    wanted = torch.autograd.grad(expected, [t for t in wide_leaves if t is not None], wide(grad))
    length = x.numel() // (x.shape[0] * groups)
    # The gradient of x is a difference of terms as large as scale * grad * weight.
    rows = wide(x).reshape(x.shape[0], groups, -1)
    largest = torch.rsqrt(rows.var(-1, correction=0) + 1e-5).max() * wide(grad).abs().max()
    largest = largest if weight is None else largest * wide(weight).abs().max()
    assert_near(found[0], wanted[0], terms=4 + length**0.5, magnitude=largest.item())
    for actual, reference in zip(found[1:], wanted[1:]):
        assert actual.shape == reference.shape
        assert_near(actual, reference, terms=4 + (x.numel() / x.shape[1]) ** 0.5)


@each_family
def test_groups_of_equal_elements_and_gradients(device, family):
    """The gradient is 0: test_layer_norm.py has the same of rows, and says what the numbers are."""
    with tuned(family):
        for channels, area in ((1, 1), (2, 1), (2, 64), (16, 64), (2, 4096)):
            x = leaf(torch.full((2, 4 * channels, area), 3.0, device=device))
            weight = torch.full((4 * channels,), 1 + 2**-13, device=device)
            y = metalcore.group_norm(x, 4, weight, weight)
            assert (y == 1 + 2**-13).all()
            assert not torch.autograd.grad(y, x, torch.full_like(y, 1 + 2**-13))[0].any(), (channels, area)


# Groups that one thread takes, and threadgroups; channels of one segment, of several, and of several that differ;
# whole vectors and not; more channels than simdgroups; a whole batch entry as one group, and single channels.
SHAPES = [
    ((3, 4, 2, 2), 2),
    ((2, 6, 5, 7), 3),
    ((2, 6, 4, 8), 6),
    ((2, 4, 32, 32), 2),
    ((1, 2, 33, 63), 1),
    ((2, 3, 8, 200), 1),
    ((2, 80, 4, 4), 2),
    ((5, 24), 3),
    ((2, 6, 9), 2),
]


@each_dtype
@each_family
@pytest.mark.parametrize("shape, groups", SHAPES, ids=str)
def test_shapes(device, dtype, family, shape, groups):
    with tuned(family):
        x = tensor(*shape, dtype=dtype, device=device)
        weight, bias = tensor(2, shape[1], dtype=dtype, device=device)
        check(x, groups, weight, bias)
        if dtype == torch.float32:
            check(x, groups, None, None)
            check(x, groups, None, bias)


def test_plans(device):
    with tuned("baseline"):
        for length, variant in ((16, "thread"), (17, "looped")):
            assert metalcore.explain("group_norm", (2, 4, length // 2 + length % 2), num_groups=2).variant == variant


@each_family
def test_layouts(device, family):
    with tuned(family):
        weight, bias = tensor(2, 6, device=device)
        for x in (
            tensor(2, 4, 5, 6, device=device).permute(0, 3, 1, 2),
            tensor(2, 12, 4, 5, device=device)[:, ::2],
            tensor(2 * 6 * 20 + 1, device=device)[1:].view(2, 6, 4, 5),
            tensor(2, 6, 1, 5, device=device).expand(2, 6, 4, 5),
        ):
            check(x, 3, weight, bias)


@each_family
def test_a_mean_far_from_zero(device, family):
    """The variance is no difference of large sums: numbers of 8 fractional bits around 4096 are exact in float32."""
    with tuned(family):
        x = (tensor(2, 4, 30, 30) * 256).round() / 256 + 4096
        y = metalcore.group_norm(x.to(device), 2)
        torch.testing.assert_close(wide(y), F.group_norm(wide(x), 2), rtol=2e-3, atol=4e-3)


@pytest.mark.parametrize("shape", [(0, 4, 3), (2, 4, 0)])
def test_empty(device, shape):
    x = tensor(*shape, device=device)
    assert metalcore.group_norm(x, 2).shape == shape
    means, scales = torch.zeros(2, shape[0], 2, device=device)
    gx, gw, gb = torch.ops.metalcore.group_norm_backward(x, x, means, scales, 2, None, True)
    assert gx.shape == shape and gw.tolist() == gb.tolist() == [0.0] * 4


def test_double_backward(device):
    *leaves, grad = (tensor(*shape, device=device) for shape in ((2, 4, 3), (4,), (4,), (2, 4, 3)))
    found = second_derivatives(lambda x, w, b: metalcore.group_norm(x, 2, w, b), leaves, grad)
    expected = second_derivatives(lambda x, w, b: F.group_norm(x, 2, w, b), map(wide, leaves), wide(grad))
    for actual, wanted in zip(found, expected):
        assert_near(actual, wanted, terms=16 * 6)


@each_dtype
def test_pytorch_samples(device, dtype):
    check_samples(metalcore.group_norm, "nn.functional.group_norm", device, dtype)


@pytest.mark.only_on("simulator", "mps", "cuda")
@each_dtype
def test_in_pytorchs_place(device, dtype):
    def gradients(x, weight, bias):
        y = F.group_norm(x, 3, weight, bias)
        return [y, *torch.autograd.grad(y.square().sum(), [x, weight, bias])]

    tensors = [leaf(tensor(*shape, dtype=dtype, device=device)) for shape in ((4, 6, 5, 8), (6,), (6,))]
    expected = gradients(*[leaf(wide(t)) for t in tensors])
    with metalcore.enable_pytorch_overrides("group_norm"):
        found = gradients(*tensors)
        rows = {row.what: row.ran for row in metalcore.report().rows}
    assert rows == {f"aten::native_group_norm on {device}": 1, f"aten::native_group_norm_backward on {device}": 1}
    for actual, wanted in zip(found, expected):
        bound = 16 * torch.finfo(dtype).eps * wanted.abs().max()
        assert ((wide(actual) - wanted.detach()).abs() <= bound).all()


@pytest.mark.parametrize("place", ["cpu", "device"])
def test_opcheck(device, place):
    device = "cpu" if place == "cpu" else device
    x, weight, bias = (leaf(tensor(*shape, device=device)) for shape in ((3, 4, 5), (4,), (4,)))
    means, scales = tensor(2, 3, 2, device=device)
    ops = torch.ops.metalcore
    check_operator(ops.group_norm, x, 2, weight, bias, 1e-3)
    check_operator(ops.group_norm_backward, x.detach(), x, means, scales, 2, weight, True)
    check_operator(ops.group_norm_backward, x.detach(), x, means, scales, 2, None, False)


def test_bad_input(device):
    x = tensor(2, 4, 3, device=device)
    for arguments in [(3,), (2, tensor(3, device=device))]:
        on_cpu = [a.cpu() if isinstance(a, torch.Tensor) else a for a in arguments]
        assert_same_error(lambda: metalcore.group_norm(x, *arguments), lambda: F.group_norm(x.cpu(), *on_cpu))
    for shape in [(1, 4), (1, 4, 1, 1)]:
        x = tensor(*shape, device=device)
        assert_same_error(lambda: metalcore.group_norm(x, 4), lambda: F.group_norm(x.cpu(), 4))
    x, op = tensor(2, 4, 3, device=device), torch.ops.metalcore.group_norm
    with pytest.raises(RuntimeError, match=r"the channels of x, \[2, 4, 3\], must be a multiple of groups, 3"):
        op(x, 3, None, None, 1e-5)
    with pytest.raises(RuntimeError, match="bias must have 4 elements, not 3"):
        op(x, 2, None, tensor(3, device=device), 1e-5)
