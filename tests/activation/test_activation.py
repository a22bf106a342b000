"""silu, relu and gelu."""

import pytest
import torch
import torch.nn.functional as F
from opinfo import check_samples
from references import DTYPES, assert_near, check_operator, layouts, tensor, wide
from torch.autograd import forward_ad

import metalcore

OPS = {
    "silu": (metalcore.silu, F.silu),
    "relu": (metalcore.relu, F.relu),
    "gelu": (metalcore.gelu, F.gelu),
    "gelu_tanh": (lambda x: metalcore.gelu(x, "tanh"), lambda x: F.gelu(x, approximate="tanh")),
}
each_op = pytest.mark.parametrize("op", OPS)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def gradient(function, x, grad):
    x = x.detach().requires_grad_()
    return torch.autograd.grad(function(x), x, grad)[0]


# A thread takes 16 bytes, which are four or eight elements. Another dispatch takes the remaining elements.
@each_op
@each_dtype
@pytest.mark.parametrize("size", [0, 1, 3, 4, 5, 7, 8, 9, 1023, 1024, 1025])
def test_sizes(device, op, dtype, size):
    ours, reference = OPS[op]
    x = tensor(size, dtype=dtype, device=device, scale=4)
    grad = tensor(size, dtype=dtype, device=device)
    assert_near(ours(x), reference(wide(x)))
    assert_near(gradient(ours, x, grad), gradient(reference, wide(x), wide(grad)))


@each_op
@each_dtype
def test_layouts(device, op, dtype):
    ours, reference = OPS[op]
    grad = tensor(4, 6, 8, dtype=dtype, device=device)
    for name, x in layouts(lambda *shape: tensor(*shape, dtype=dtype, device=device)).items():
        y = ours(x)
        assert y.stride() == torch.empty_like(x).stride(), name
        assert_near(y, reference(wide(x)))
        assert_near(gradient(ours, x, grad), gradient(reference, wide(x), wide(grad)))


@each_op
def test_more_dimensions_than_a_kernel_walks(device, op):
    ours, reference = OPS[op]
    x = tensor(*[4] * 9, device=device)[(slice(None, None, 3),) * 9]
    assert_near(ours(x), reference(wide(x)))


@each_op
def test_zero_dimensions(device, op):
    ours, reference = OPS[op]
    x = tensor(device=device)
    assert ours(x).shape == ()
    assert_near(ours(x), reference(wide(x)))


@each_op
def test_special_values(device, op):
    ours, reference = OPS[op]
    x = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e30, -1e30, 1e-40, 100.0, -100.0])
    assert_near(ours(x.to(device)), reference(x.double()))


@each_dtype
def test_relu_of_nan_and_zeros(device, dtype):
    """Results and gradients are PyTorch's bit for bit: a gradient passes at NaN, and does not pass at either zero."""
    values = torch.tensor([float("nan"), 0.0, -0.0, float("inf"), float("-inf"), -1e-8, 1e-8, 3.0], dtype=dtype)
    found, expected = values.to(device).requires_grad_(), values.requires_grad_()
    y, reference = metalcore.relu(found), torch.relu(expected)
    y.sum().backward()
    reference.sum().backward()
    for ours, theirs in ((y, reference), (found.grad, expected.grad)):
        assert torch.equal(ours.detach().cpu().isnan(), theirs.detach().isnan())
        assert torch.equal(ours.detach().cpu().nan_to_num(7), theirs.detach().nan_to_num(7))


@pytest.mark.parametrize("op", ["silu", "gelu", "gelu_tanh", "quick_gelu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_of_the_largest_numbers(device, op, dtype):
    ours = metalcore.quick_gelu if op == "quick_gelu" else OPS[op][0]
    largest = torch.finfo(dtype).max
    x = torch.tensor([largest, -largest, 2e38, -2.5e38, 1e20, -1e20, 1e13, -1e13, 0.0], dtype=dtype)
    slope = (x > 0).to(dtype) + 0.5 * (x == 0).to(dtype)
    for where in (device, "cpu"):
        found = gradient(ours, x.to(where), torch.ones_like(x, device=where)).cpu()
        if where == device or op in ("silu", "quick_gelu"):  # PyTorch's own GELUs are NaN there on the CPU
            torch.testing.assert_close(found, slope, rtol=0, atol=0)


def test_relu_of_integers(device):
    x = torch.arange(-3, 3, device=device)
    assert metalcore.relu(x).dtype == x.dtype and metalcore.relu(x).tolist() == [0, 0, 0, 0, 1, 2]


@pytest.mark.only_on("simulator", "mps", "cuda")
@each_dtype
def test_relu_takes_pytorchs_place(device, dtype):
    x = tensor(5, 7, dtype=dtype, device=device).requires_grad_()
    grad = torch.randn_like(x)

    def both(function):
        return [function(x), gradient(function, x, grad)]

    def threshold(x):  # its derivative is relu's only for a threshold of zero
        return F.threshold(x, 0.5, 0.0)

    expected = both(F.relu) + both(threshold)
    with metalcore.enable_pytorch_overrides("relu"):
        found = both(torch.nn.ReLU()) + both(threshold)
        assert F.relu(torch.arange(-1, 2, device=device)).tolist() == [0, 0, 1]
        rows = {row.what: (row.ran, sum(row.left.values())) for row in metalcore.report().rows}
    assert all(torch.equal(a, b) for a, b in zip(found, expected))
    backward = (0, 0) if device == "cuda" else (1, 1)  # PyTorch's there
    assert rows == {
        f"aten::relu on {device}": (2, 1),
        f"aten::relu_ on {device}": (0, 0),
        f"aten::threshold_backward on {device}": backward,
    }


def test_gelu_keeps_relative_accuracy_in_its_tail(device):
    x = torch.linspace(-8, -1, 1001, device=device)
    expected = wide(x) * 0.5 * torch.special.erfc(-wide(x) / 2**0.5)
    # One rounding of the exponent x^2/2, which is 32 at most, gives a relative error of 32 eps at most.
    relative = ((wide(metalcore.gelu(x)) - expected) / expected).abs().max()
    assert relative < (32 + 8) * torch.finfo(torch.float32).eps


@each_op
def test_double_backward(device, op):
    ours, reference = OPS[op]

    def second(function, x, grad):
        x, grad = x.detach().requires_grad_(), grad.detach().requires_grad_()
        (first,) = torch.autograd.grad(function(x), x, grad, create_graph=True)
        return torch.autograd.grad(first.square().sum(), (x, grad))

    x, grad = tensor(5, 7, device=device), tensor(5, 7, device=device)
    for actual, expected in zip(second(ours, x, grad), second(reference, wide(x), wide(grad))):
        assert_near(actual, expected, terms=4)


@each_dtype
@pytest.mark.parametrize("name", ["silu", "relu", "gelu"])
def test_pytorch_samples(device, name, dtype):
    check_samples(getattr(metalcore, name), f"nn.functional.{name}", device, dtype)


@pytest.mark.parametrize("place", ["cpu", "device"])
def test_opcheck(device, place):
    x = tensor(3, 5, device="cpu" if place == "cpu" else device).requires_grad_()
    ops = torch.ops.metalcore
    check_operator(ops.silu, x)
    check_operator(ops.silu_backward, x.detach(), x)
    check_operator(ops.relu, x)
    check_operator(ops.relu_backward, x.detach(), x)
    check_operator(ops.gelu, x, "tanh")
    check_operator(ops.gelu_backward, x.detach(), x, "none")


@each_op
def test_compile(device, op):
    ours, _ = OPS[op]
    x = tensor(4, 8, device=device).requires_grad_()
    compiled = torch.compile(lambda x: ours(x * 2).sum(), fullgraph=True, backend="aot_eager")
    expected = torch.autograd.grad(ours(x * 2).sum(), x)[0]
    assert torch.equal(torch.autograd.grad(compiled(x), x)[0], expected)


def test_bad_input(device):
    with pytest.raises(RuntimeError, match="approximate"):
        metalcore.gelu(tensor(3, device=device), "sigmoid")
    with pytest.raises((RuntimeError, NotImplementedError)):
        metalcore.silu(torch.arange(3, device=device))
    with pytest.raises(RuntimeError, match="metalcore::silu: x must be float32, float16 or bfloat16, not int64"):
        torch.ops.metalcore.silu(torch.arange(3, device=device))
    x = tensor(3, device=device)
    with pytest.raises(RuntimeError, match=r"grad must have shape \[3\], not \[4\]"):
        torch.ops.metalcore.silu_backward(tensor(4, device=device), x)
    with pytest.raises(RuntimeError, match="grad must be float32, not float16"):
        torch.ops.metalcore.silu_backward(x.half(), x)


@each_op
def test_function_transforms(device, op):
    """torch.func knows PyTorch's own ops."""
    ours, reference = OPS[op]
    x = tensor(3, 4, device=device)
    slope = torch.func.vmap(torch.func.grad(lambda row: ours(row).sum()))(x)
    expected = torch.func.vmap(torch.func.grad(lambda row: reference(row).sum()))(wide(x))
    assert_near(slope, expected)


@each_op
def test_forward_mode(device, op):
    ours, reference = OPS[op]
    x, direction = tensor(2, 5, device=device)

    def tangent(function, x, direction):
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(function(forward_ad.make_dual(x, direction))).tangent

    assert_near(tangent(ours, x, direction), tangent(reference, wide(x), wide(direction)))


@each_op
def test_a_tensor_that_outlived_its_transform(device, op):
    ours, reference = OPS[op]
    kept = []
    torch.func.grad(lambda row: kept.append(row) or row.sum())(tensor(3, device=device))
    result = ours(kept[0])
    assert not result.requires_grad and not reference(kept[0]).requires_grad
    assert_near(result, reference(wide(kept[0])))
