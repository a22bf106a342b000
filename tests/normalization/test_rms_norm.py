"""rms_norm and add_rms_norm."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from opinfo import check_samples
from references import (
    DTYPES,
    assert_near,
    assert_same_error,
    check_operator,
    flushes_subnormals,
    layouts,
    leaf,
    second_derivatives,
    tensor,
    wide,
)
from rows import FAMILIES, lengths, tuned

import metalcore
from metalcore.recording import record

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
EPS = torch.finfo(torch.float32).eps


def reference(x, weight, eps, dims=1):
    scale = torch.rsqrt(x.square().mean(tuple(range(-dims, 0)), keepdim=True) + eps)
    return x * scale if weight is None else x * scale * weight


def check(x, weight, eps=1e-5, dims=1):
    """Compares the result and the gradients with the reference."""
    x, weight = leaf(x), leaf(weight)
    wx, ww = leaf(wide(x)), leaf(None if weight is None else wide(weight))
    y = metalcore.rms_norm(x, x.shape[-dims:], weight, eps)
    expected = reference(wx, ww, EPS if eps is None else eps, dims)
    assert y.dtype == x.dtype and y.shape == x.shape
    length = max(1, x[(0,) * (x.dim() - dims)].numel() if x.numel() else 1)
    assert_near(y, expected.detach(), terms=4)
    grad = tensor(*x.shape, dtype=x.dtype, device=x.device)
    leaves = [x] if weight is None else [x, weight]
    wide_leaves = [wx] if weight is None else [wx, ww]
    found = torch.autograd.grad(y, leaves, grad)
    wanted = torch.autograd.grad(expected, wide_leaves, wide(grad))
    # The gradient of x is a difference of terms as large as scale * grad * weight.
    scale = torch.rsqrt(wide(x).square().mean(tuple(range(-dims, 0)), keepdim=True) + (EPS if eps is None else eps))
    parts = (scale * wide(grad) * (1 if weight is None else wide(weight))).abs()
    assert_near(found[0], wanted[0], terms=4 + length**0.5, magnitude=parts.max().item())
    if weight is not None:
        assert found[1].dtype == weight.dtype and found[1].shape == weight.shape
        assert_near(found[1], wanted[1], terms=4 + (x.numel() / length) ** 0.5)


@each_dtype
@pytest.mark.parametrize("family", FAMILIES)
def test_lengths(device, dtype, family):
    with tuned(family):
        for length in lengths("rms_norm", dtype):
            x = tensor(9 if length < 2000 else 2, length, dtype=dtype, device=device)
            check(x, tensor(length, dtype=dtype, device=device))
            check(x, None)


@pytest.mark.parametrize("family", FAMILIES)
def test_large_numbers(device, family):
    """The cube of a row's scale is outside of the range of float32, and the result is inside."""
    with tuned(family):
        for length in lengths("rms_norm", torch.float32):
            check(tensor(2, length, device=device, scale=1e15), tensor(length, device=device))


def test_longest(device):
    check(tensor(1, 131072, device=device), tensor(131072, device=device))


def check_with_residual(rows, length, dtype, device):
    x, weight = tensor(rows, length, dtype=dtype, device=device), tensor(length, dtype=dtype, device=device)
    check(x, weight)
    check(x, None)
    residual = tensor(rows, length, dtype=dtype, device=device)
    y, total = metalcore.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    assert_near(y, reference(wide(total), wide(weight), 1e-5), terms=4)


@each_dtype
@pytest.mark.parametrize("rows, length", [(1, 31278), (1, 31279), (1, 31280), (3, 39001), (12, 31279)])
def test_few_long_rows(device, dtype, rows, length):
    """Below and above the length and the number of rows from which several threadgroups share a row."""
    with tuned("baseline"):
        plan = metalcore.explain("rms_norm", (rows, length))
        shared = length > 31278 and rows < 12  # half of the threadgroups that fill 8 cores
        assert plan.variant == ("split" if shared else "looped")
        assert len(plan.steps) == 1 + shared
        if rows < 12:  # fewer rows exercise the same kernels
            check_with_residual(rows, length, dtype, device)


@each_dtype
@pytest.mark.parametrize("rows, length", [(3, 8192), (3, 8193), (8, 8200), (9, 8200), (9, 8203)])
def test_derivative_of_long_rows(device, dtype, rows, length):
    """Below and above the length from which threadgroups share a row, and the number of rows of one threadgroup."""
    with tuned("baseline"):
        plan = metalcore.explain("rms_norm", (rows, length), (length,), dtype=dtype, backward=True)
        shared = length > 8192
        assert plan.variant == ("split" if shared else "block2")
        assert len(plan.steps) == (2 if rows <= 8 else 3)
        check_with_residual(rows, length, dtype, device)
        if shared:  # the kernel does not write the gradient of a weight of another dtype
            other = torch.float16 if dtype == torch.bfloat16 else torch.bfloat16
            check(tensor(2, length, dtype=dtype, device=device), tensor(length, dtype=other, device=device))


@pytest.mark.parametrize(
    "rows, length, held",
    [(24, 8200, True), (23, 8200, False), (24, 8203, False), (25, 16384, True), (24, 16392, False)],
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_derivative_of_long_rows_in_registers(device, dtype, rows, length, held):
    """Where there are enough aligned rows for all threadgroups that fill 8 cores, each reads rows once."""
    with tuned("baseline"):
        plan = metalcore.explain("rms_norm", (rows, length), (length,), dtype=dtype, backward=True)
        assert plan.variant == (("block4" if dtype == torch.float32 else "block8") if held else "split")
        if held:
            check_with_residual(rows, length, dtype, device)
            check(tensor(rows, length, dtype=dtype, device=device), tensor(length, device=device))  # a wider weight


def test_derivative_of_many_long_rows(device):
    """A threadgroup has 64 rows at most."""
    with tuned("baseline"):
        for rows, chunks in ((21 * 64, 21), (21 * 64 + 1, 22)):
            plan = metalcore.explain("rms_norm", (rows, 8193), (8193,), backward=True)
            assert plan.steps[0].grid[1] == plan.steps[1].grid[1] == chunks


def test_many_rows(device):
    """More rows than one partial sum of the weight's gradient takes, and a last chunk that is not full."""
    for rows in (1, 31, 32, 33, 256 * 32, 256 * 32 + 1):
        check(tensor(rows, 5, device=device), tensor(5, device=device))


@pytest.mark.parametrize("family", FAMILIES)
def test_more_rows_than_teams_of_threads(device, family):
    """A simdgroup or a threadgroup takes several rows for the weight's gradient where there are many."""
    with tuned(family):
        for rows, length in ((2049, 24), (4230, 150), (1500, 600)):
            check(tensor(rows, length, device=device), tensor(length, device=device))


@each_dtype
@pytest.mark.parametrize("family", FAMILIES)
def test_layouts(device, dtype, family):
    with tuned(family):
        for x in layouts(lambda *shape: tensor(*shape, dtype=dtype, device=device)).values():
            check(x, tensor(8, dtype=dtype, device=device))
            check(x, tensor(17, dtype=dtype, device=device)[1::2])
            check(x, tensor(6, 8, dtype=dtype, device=device), dims=2)
            check(x, None, dims=3)


@pytest.mark.parametrize("dtypes", list(itertools.permutations(DTYPES, 2)), ids=str)
def test_weight_of_another_dtype(device, dtypes):
    for length in lengths("rms_norm", dtypes[0]):
        check(tensor(3, length, dtype=dtypes[0], device=device), tensor(length, dtype=dtypes[1], device=device))


@each_dtype
@pytest.mark.parametrize("family", FAMILIES)
def test_offset(device, dtype, family):
    """Gemma's 1 + weight, added in float32: a weight of 16 bits keeps its small numbers."""
    with tuned(family):
        for length in (7, 100, 600, 9000):
            x, weight = (
                leaf(tensor(3, length, dtype=dtype, device=device)),
                leaf(tensor(length, dtype=dtype, device=device, scale=1e-3)),
            )
            grad = tensor(3, length, dtype=dtype, device=device)
            y = metalcore.rms_norm(x, (length,), weight, 1e-5, 1.0)
            wx, ww = leaf(wide(x)), leaf(wide(weight))
            expected = reference(wx, ww + 1, 1e-5)
            assert_near(y, expected.detach(), terms=4)
            found = torch.autograd.grad(y, (x, weight), grad)
            wanted = torch.autograd.grad(expected, (wx, ww), wide(grad))
            parts = (torch.rsqrt(wide(x).square().mean(-1, keepdim=True) + 1e-5) * wide(grad)).abs().max().item()
            assert_near(found[0], wanted[0], terms=4 + length**0.5, magnitude=parts)
            assert_near(found[1], wanted[1], terms=8)
            total = metalcore.add_rms_norm(x, torch.zeros_like(x), weight, 1e-5, 1.0)
            assert torch.equal(total[0], y)
    on_cpu = metalcore.rms_norm(x.detach().cpu(), (length,), weight.detach().cpu(), 1e-5, 1.0)
    assert on_cpu.dtype == dtype
    assert_near(on_cpu, expected.detach(), terms=4)
    with pytest.raises(ValueError, match="offset is added to a weight"):
        metalcore.rms_norm(x, (length,), offset=1.0)


@pytest.mark.parametrize("family", FAMILIES)
def test_heads(device, family):
    """Rows that lie in two and three strides, as the heads of a projection of q, k and v do: no copy is made."""
    projection = tensor(2, 5, 12 * 64, device=device).view(2, 5, 12, 64)
    heads = projection[:, :, :4]
    with tuned(family):
        for x in (heads, heads.transpose(1, 2), heads[:, 1::2]):
            check(x, tensor(64, device=device))
            _, recording = record(metalcore.rms_norm, x, (64,), None)
            assert len(recording.dispatches) == 1 and not recording.torch_steps


@each_dtype
def test_default_eps(device, dtype):
    check(tensor(4, 32, dtype=dtype, device=device, scale=1e-3), None, eps=None)


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (2, 0, 3), (0,)])
def test_empty(device, shape):
    x, weight = leaf(tensor(*shape, device=device)), leaf(tensor(shape[-1], device=device))
    y = metalcore.rms_norm(x, shape[-1:], weight)
    assert y.shape == shape
    gx, gw = torch.autograd.grad(y.sum(), (x, weight))
    assert gx.shape == shape and not gw.any()


def test_special_values(device):
    inf, nan = float("inf"), float("nan")
    least = 1e-37 if flushes_subnormals() else 1e-40
    x = torch.tensor([[inf, 1.0], [nan, 1.0], [0.0, 0.0], [1e30, 1e30], [1e-30, 1e-30], [least, 0.0]])
    torch.testing.assert_close(
        metalcore.rms_norm(x.to(device), (2,)).cpu(), F.rms_norm(x, (2,)), equal_nan=True, rtol=4 * EPS, atol=0
    )


@each_dtype
@pytest.mark.parametrize("family", FAMILIES)
def test_add_rms_norm(device, dtype, family):
    with tuned(family):
        for length in lengths("add_rms_norm", dtype):
            x, residual = (leaf(tensor(3, length, dtype=dtype, device=device)) for _ in "xr")
            weight = leaf(tensor(length, dtype=dtype, device=device))
            y, total = metalcore.add_rms_norm(x, residual, weight, 1e-5)
            assert torch.equal(total, x + residual)
            again = leaf(total)
            expected = metalcore.rms_norm(again, (length,), weight, 1e-5)
            assert torch.equal(y, expected)

            gy, gt = (tensor(3, length, dtype=dtype, device=device) for _ in "yt")
            found = torch.autograd.grad((y, total), (x, residual, weight), (gy, gt), retain_graph=True)
            g_again, gw = torch.autograd.grad(expected, (again, weight), gy)
            assert torch.equal(found[0], found[1])
            assert_near(found[2], wide(gw), terms=6)  # other teams may add the rows up in another order
            # The fused op rounds the sum of the two gradients once, and separate ops round it twice.
            bound = 2 * torch.finfo(dtype).eps * (wide(g_again).abs() + wide(gt).abs() + 1e-30)
            assert ((wide(found[0]) - wide(g_again) - wide(gt)).abs() <= bound).all()

            only_y = torch.autograd.grad(y, (x, residual), gy, retain_graph=True)
            assert torch.equal(only_y[0], g_again) and torch.equal(only_y[1], g_again)
            only_total = torch.autograd.grad(total, (x, residual), gt)
            assert torch.equal(only_total[0], gt) and torch.equal(only_total[1], gt)


def test_add_rms_norm_elsewhere(device):
    """Input that the kernel does not take: broadcasting, mixed dtypes, the CPU."""
    x = tensor(3, 8, device=device)
    for residual in (tensor(8, device=device), tensor(3, 8, device=device).half()):
        y, total = metalcore.add_rms_norm(x, residual)
        assert torch.equal(total, x + residual) and torch.equal(y, metalcore.rms_norm(total, (8,)))
    y, total = metalcore.add_rms_norm(x.cpu(), x.cpu())
    assert torch.equal(y, F.rms_norm(total, (8,)))


def test_weight_gradient_is_deterministic(device):
    x, weight, grad = tensor(1000, 40, device=device), leaf(tensor(40, device=device)), tensor(1000, 40, device=device)
    first, second = (torch.autograd.grad(metalcore.rms_norm(x, (40,), weight), weight, grad)[0] for _ in "12")
    assert torch.equal(first, second)


def test_double_backward(device):
    x, weight, grad = tensor(5, 7, device=device), tensor(7, device=device), tensor(5, 7, device=device)
    found = second_derivatives(lambda x, w: metalcore.rms_norm(x, (7,), w, 1e-5), (x, weight), grad)
    expected = second_derivatives(lambda x, w: reference(x, w, 1e-5), (wide(x), wide(weight)), wide(grad))
    for actual, wanted in zip(found, expected):
        assert_near(actual, wanted, terms=4 * 7)


@each_dtype
def test_pytorch_samples(device, dtype):
    check_samples(metalcore.rms_norm, "nn.functional.rms_norm", device, dtype)


@pytest.mark.parametrize("place", ["cpu", "device"])
def test_opcheck(device, place):
    device = "cpu" if place == "cpu" else device
    x, weight = leaf(tensor(3, 5, device=device)), leaf(tensor(5, device=device))
    other = tensor(3, 5, device=device)
    ops = torch.ops.metalcore
    check_operator(ops.rms_norm, x, 1, weight, 1e-3, 1.0)
    check_operator(ops.rms_norm, x, 2, None, 1e-3, 0.0)
    check_operator(ops.add_rms_norm, x, other, 1, weight, 1e-3, 0.0)
    check_operator(ops.rms_norm_backward, other, x, None, 1, weight, 1e-3, 1.0, True)
    check_operator(ops.rms_norm_backward, other, x, other, 1, None, 1e-3, 0.0, False)


def test_compile(device):
    x, weight = leaf(tensor(4, 8, device=device)), leaf(tensor(8, device=device))

    def function(x, weight):
        y, total = metalcore.add_rms_norm(x, x * 2, weight, 1e-5)
        return (metalcore.rms_norm(y, (8,), weight) * total).sum()

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    expected = torch.autograd.grad(function(x, weight), (x, weight))
    for actual, wanted in zip(torch.autograd.grad(compiled(x, weight), (x, weight)), expected):
        torch.testing.assert_close(actual, wanted, rtol=8 * EPS, atol=8 * EPS * wanted.abs().max().item())


def test_bad_input(device):
    x = tensor(3, 4, device=device)
    for arguments in [((5,),), ((4,), tensor(3, device=device)), ((),)]:
        on_cpu = [a.cpu() if isinstance(a, torch.Tensor) else a for a in arguments]
        assert_same_error(lambda: metalcore.rms_norm(x, *arguments), lambda: F.rms_norm(x.cpu(), *on_cpu))
    with pytest.raises((RuntimeError, NotImplementedError)):
        metalcore.rms_norm(torch.ones(3, 4, device=device, dtype=torch.int64), (4,))
    op = torch.ops.metalcore.rms_norm
    with pytest.raises(RuntimeError, match="cannot normalize the last 3 of 2 dimensions"):
        op(x, 3, None, 1e-5, 0.0)
    with pytest.raises(RuntimeError, match="weight must have 4 elements, not 3"):
        op(x, 1, tensor(3, device=device), 1e-5, 0.0)
    with pytest.raises(RuntimeError, match="weight must be on the device"):
        op(x, 1, tensor(4), 1e-5, 0.0)


@pytest.mark.only_on("simulator")
def test_threads_past_the_end_of_a_long_row_read_no_sum_that_is_being_written(device):
    x, residual, weight = (
        tensor(40, 16500, device=device),
        tensor(40, 16500, device=device),
        tensor(16500, device=device),
    )
    with metalcore.simulator.checking():
        metalcore.add_rms_norm(x, residual, weight)
