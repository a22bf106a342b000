"""softmax and log_softmax."""

import pytest
import torch
from opinfo import check_samples
from references import DTYPES, assert_near, check_operator, layouts, tensor, wide
from rows import FAMILIES, lengths, tuned

import metalcore

OPS = {"softmax": (metalcore.softmax, torch.softmax), "log_softmax": (metalcore.log_softmax, torch.log_softmax)}
each_op = pytest.mark.parametrize("op", OPS)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def gradient(function, x, grad, *args):
    x = x.detach().requires_grad_()
    return torch.autograd.grad(function(x, *args), x, grad)[0]


def check(op, x, grad, dim):
    """Compares result and gradient. The gradient is computed from the op's own rounded output, as in PyTorch."""
    ours, reference = OPS[op]
    length = x.shape[dim] if x.dim() else 1
    expected = reference(wide(x), dim)
    assert_near(ours(x, dim), expected, terms=4)
    rounded = wide(expected.to(x.dtype))
    g = wide(grad)
    if op == "softmax":
        expected = rounded * (g - (g * rounded).sum(dim, keepdim=True))
    else:
        expected = g - rounded.exp() * g.sum(dim, keepdim=True)
    # Output and reference may be rounded to neighbours, and the gradient depends on each of these roundings.
    slack = 4 * torch.finfo(x.dtype).eps / torch.finfo(torch.float32).eps
    slack *= 1 + (rounded.abs().max().item() if op == "log_softmax" and rounded.numel() else 0)
    assert_near(gradient(ours, x, grad, dim), expected, terms=length**0.5 + slack)


@each_op
@each_dtype
@pytest.mark.parametrize("family", FAMILIES)
def test_lengths(device, op, dtype, family):
    with tuned(family):
        for length in lengths(op, dtype):
            rows = 9 if length < 2000 else 2
            check(
                op,
                tensor(rows, length, dtype=dtype, device=device, scale=3),
                tensor(rows, length, dtype=dtype, device=device),
                -1,
            )


@each_op
def test_longest(device, op):
    check(op, tensor(1, 131072, device=device), tensor(1, 131072, device=device), -1)


# Rows of `length` elements that begin at any distance from a multiple of 16 bytes.
PLACES = {
    "rows of odd length": lambda make, length: make(9, length),
    "behind an element": lambda make, length: make(9 * length + 1)[1:].view(9, length),
    "behind a row": lambda make, length: make(10, length)[1:],
    "in rows as odd": lambda make, length: make(9, length + 8)[:, :length],
    "in longer rows": lambda make, length: make(9, length + 3)[:, :length],
    "in longer rows, later": lambda make, length: make(9, length + 5)[:, 2 : length + 2],
}


@each_op
@each_dtype
@pytest.mark.parametrize("place", PLACES)
def test_rows_anywhere(device, op, dtype, place):
    """Each variant loads whole vectors from such rows all the same, and writes nothing around them."""
    with tuned("baseline"):
        for length in (17, 31, 130, 513, 1021, 2051, 16391):
            x = PLACES[place](lambda *shape: tensor(*shape, dtype=dtype, device=device, scale=3), length)
            grad = PLACES[place](lambda *shape: tensor(*shape, dtype=dtype, device=device), length)
            check(op, x, grad, -1)
            if dtype != torch.float32:
                y = OPS[op][0](x, -1, torch.float32)
                assert_near(y, OPS[op][1](wide(x), -1), terms=4)


@each_op
@each_dtype
@pytest.mark.parametrize("rows, length", [(1, 16383), (1, 16384), (1, 16385), (3, 33001), (12, 16385), (13, 16385)])
def test_few_long_rows(device, op, dtype, rows, length):
    """Below and above the length and the number of rows from which several threadgroups share a row."""
    with tuned("baseline"):
        plan = metalcore.explain(op, (rows, length))
        shared = length > 16384 and rows <= 12  # half of the threadgroups that fill 8 cores
        assert plan.variant == ("split" if shared else "looped" if length > 16384 else "block8") and len(
            plan.steps
        ) == (2 if shared else 1)
        if rows == 12:
            return  # fewer rows exercise the same kernels
        x = tensor(rows, length, dtype=dtype, device=device, scale=3)
        x[0, : length // 2] = -float("inf")  # the maximum lies in another part
        check(op, x, tensor(rows, length, dtype=dtype, device=device), -1)


@each_op
@each_dtype
def test_layouts_and_dimensions(device, op, dtype):
    grad = tensor(4, 6, 8, dtype=dtype, device=device)
    for x in layouts(lambda *shape: tensor(*shape, dtype=dtype, device=device)).values():
        for dim in (-1, 0, 1, 2):
            check(op, x, grad, dim)


@each_op
def test_few_long_columns(device, op):
    x = tensor(2, 1000, 3, device=device)
    assert "contiguous" in metalcore.explain(op, x, dim=1).why
    check(op, x, tensor(2, 1000, 3, device=device), 1)


@each_op
@pytest.mark.parametrize("shape,dim", [((), 0), ((), -1), ((0,), 0), ((3, 0), 1), ((3, 0), 0), ((0, 3), 1)])
def test_small_shapes(device, op, shape, dim):
    check(op, tensor(*shape, device=device), tensor(*shape, device=device), dim)


@each_op
@pytest.mark.parametrize("family", FAMILIES)
def test_special_values(device, op, family):
    ours, reference = OPS[op]
    inf, nan = float("inf"), float("nan")
    rows = torch.tensor(
        [
            [-inf, -inf, -inf],
            [-inf, 1.0, 2.0],
            [inf, 1.0, 2.0],
            [nan, 1.0, 2.0],
            [-inf, nan, -inf],
            [1e38, -1e38, 1e38],
            [-inf, -inf, 5.0],
        ]
    )
    with tuned(family):
        for length in lengths(op, torch.float32):
            if length < 3:
                continue
            x = torch.full((len(rows), length), -inf)
            x[:, [0, length // 2, length - 1]] = rows
            assert_near(ours(x.to(device), -1), reference(x.double(), -1), terms=8)


@each_op
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_float32_of_16_bits(device, op, dtype):
    ours, reference = OPS[op]
    for length in lengths(op, dtype):
        x, grad = tensor(3, length, dtype=dtype, device=device), tensor(3, length, device=device)
        y = ours(x, -1, torch.float32)
        assert y.dtype == torch.float32
        assert_near(y, reference(wide(x), -1), terms=4)
        found = gradient(ours, x, grad, -1, torch.float32)
        assert found.dtype == dtype
        assert_near(found, gradient(reference, wide(x), wide(grad), -1), terms=64)


@each_op
def test_conversion_to_16_bits(device, op):
    ours, reference = OPS[op]
    x = tensor(3, 50, device=device)
    assert_near(ours(x, -1, torch.bfloat16), reference(wide(x.bfloat16()), -1))


@each_dtype
@pytest.mark.parametrize("family", FAMILIES)
def test_temperature(device, dtype, family):
    with tuned(family):
        for shape, dim in (((5, 7), -1), ((5, 200), -1), ((3, 5000), -1), ((2, 17000), -1), ((3, 20, 6), 1)):
            x, grad = tensor(*shape, dtype=dtype, device=device), tensor(*shape, dtype=dtype, device=device)
            found = gradient(lambda x, dim: metalcore.softmax(x, dim, temperature=0.5), x, grad, dim)
            expected = gradient(lambda x, dim: torch.softmax(x / 0.5, dim), wide(x), wide(grad), dim)
            assert_near(metalcore.softmax(x, dim, temperature=0.5), torch.softmax(wide(x) / 0.5, dim), terms=8)
            bound = 4 * torch.finfo(dtype).eps * expected.abs().max().item()  # the results are rounded before
            torch.testing.assert_close(wide(found), expected, rtol=0, atol=bound)
    assert metalcore.softmax(x, 1, torch.float32, temperature=2).dtype == torch.float32


def test_temperature_elsewhere(device):
    x = torch.randn(3, 4).double()
    torch.testing.assert_close(metalcore.softmax(x, 1, temperature=0.3), torch.softmax(x / 0.3, 1))
    for bad in (0.0, -1.0, float("inf"), "1"):
        with pytest.raises(ValueError, match="softmax: temperature must be a positive number"):
            metalcore.softmax(tensor(3, 4, device=device), 1, temperature=bad)
    with pytest.raises(RuntimeError, match="metalcore::softmax_scaled: scale must be positive"):
        torch.ops.metalcore.softmax_scaled(tensor(3, 4, device=device), 1, False, -1.0)
    check_operator(torch.ops.metalcore.softmax_scaled, tensor(3, 5, device=device).requires_grad_(), 1, False, 2.0)


@each_op
def test_double_backward(device, op):
    ours, reference = OPS[op]

    def second(function, x, grad):
        x, grad = x.detach().requires_grad_(), grad.detach().requires_grad_()
        (first,) = torch.autograd.grad(function(x, 1), x, grad, create_graph=True)
        return torch.autograd.grad(first.square().sum(), (x, grad))

    x, grad = tensor(5, 7, device=device), tensor(5, 7, device=device)
    for actual, expected in zip(second(ours, x, grad), second(reference, wide(x), wide(grad))):
        assert_near(actual, expected, terms=4 * 7)


@each_op
@each_dtype
def test_pytorch_samples(device, op, dtype):
    check_samples(OPS[op][0], op, device, dtype)


@each_op
@pytest.mark.parametrize("place", ["cpu", "device"])
def test_opcheck(device, op, place):
    x = tensor(3, 5, device="cpu" if place == "cpu" else device).requires_grad_()
    forward, backward = getattr(torch.ops.metalcore, op), getattr(torch.ops.metalcore, f"{op}_backward")
    check_operator(forward, x, 1, False)
    check_operator(forward, x.detach().half().requires_grad_(), 0, True)
    check_operator(backward, x.detach(), x, 1, torch.float32)


@each_op
def test_compile(device, op):
    ours, _ = OPS[op]
    x = tensor(4, 8, device=device).requires_grad_()
    weights = tensor(4, 8, device=device)
    compiled = torch.compile(lambda x: (ours(x * 2, -1) * weights).sum(), fullgraph=True, backend="aot_eager")
    expected = torch.autograd.grad((ours(x * 2, -1) * weights).sum(), x)[0]
    assert torch.equal(torch.autograd.grad(compiled(x), x)[0], expected)


@each_op
def test_bad_input(device, op):
    ours, _ = OPS[op]
    for dim in (2, -3):
        with pytest.raises(IndexError, match="Dimension out of range"):
            ours(tensor(3, 4, device=device), dim)
    with pytest.raises((RuntimeError, NotImplementedError)):
        ours(torch.arange(3, device=device), 0)
    assert ours(torch.arange(3, device=device), 0, torch.float32).dtype == torch.float32
    with pytest.raises(RuntimeError, match=rf"metalcore::{op}: dim must be in \[-2, 1\], not 2"):
        getattr(torch.ops.metalcore, op)(tensor(3, 4, device=device), 2, False)
