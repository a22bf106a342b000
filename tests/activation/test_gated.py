"""Gated activations, and activations of x + bias."""

import pytest
import torch
import torch.nn.functional as F
from references import DTYPES, assert_near, check_operator, layouts, tensor, wide

import metalcore

ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}
GATED = {
    "silu": metalcore.swiglu,
    "gelu": metalcore.geglu,
    "gelu_tanh": lambda gate, up: metalcore.geglu(gate, up, "tanh"),
}
HALVES = {
    "silu": metalcore.silu_and_mul,
    "gelu": metalcore.gelu_and_mul,
    "gelu_tanh": lambda x: metalcore.gelu_and_mul(x, "tanh"),
}
BIASED = {
    "silu": metalcore.bias_silu,
    "gelu": metalcore.bias_gelu,
    "gelu_tanh": lambda x, bias: metalcore.bias_gelu(x, bias, "tanh"),
}
each = pytest.mark.parametrize("name", ACTIVATIONS)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def gated(name):
    return lambda gate, up: ACTIVATIONS[name](gate) * up


def halves(name):
    return lambda x: gated(name)(*x.chunk(2, -1))


def biased(name):
    return lambda x, bias: ACTIVATIONS[name](x + bias)


def check(ours, reference, *tensors, rows=1):
    """Compares the result and the gradients. A parameter's gradient is a sum over `rows` rows."""
    leaves = [t.detach().requires_grad_() for t in tensors]
    wide_leaves = [wide(t).requires_grad_() for t in tensors]
    y, expected = ours(*leaves), reference(*wide_leaves)
    assert y.is_contiguous() and y.dtype == tensors[0].dtype
    assert_near(y, expected.detach(), terms=2)
    grad = tensor(*y.shape, dtype=y.dtype, device=y.device)
    found, wanted = torch.autograd.grad(y, leaves, grad), torch.autograd.grad(expected, wide_leaves, wide(grad))
    for actual, value in zip(found, wanted):
        assert actual.shape == value.shape
        assert_near(actual, value, terms=4 * rows**0.5)


# A thread takes 16 bytes of a row, or one element where a row does not consist of whole vectors.
@each
@each_dtype
@pytest.mark.parametrize("shape", [(), (1,), (5,), (3, 7), (3, 8), (2, 3, 64), (300, 8)], ids=str)
def test_shapes(device, name, dtype, shape):
    def make(*sizes):
        return tensor(*sizes, dtype=dtype, device=device, scale=2)

    check(GATED[name], gated(name), make(*shape), make(*shape))
    if shape:
        check(HALVES[name], halves(name), make(*shape[:-1], 2 * shape[-1]))
        check(BIASED[name], biased(name), make(*shape), make(shape[-1]), rows=300)


@each_dtype
def test_layouts(device, dtype):
    def make(*sizes):
        return tensor(*sizes, dtype=dtype, device=device)

    for x in layouts(make).values():
        check(metalcore.swiglu, gated("silu"), x, make(4, 6, 8))
        check(metalcore.swiglu, gated("silu"), make(4, 6, 8), x)
        check(metalcore.silu_and_mul, halves("silu"), x)
        check(metalcore.bias_gelu, biased("gelu"), x, make(17)[1::2], rows=24)
    both = make(4, 6, 32)  # the halves of one projection
    check(metalcore.swiglu, gated("silu"), *both.chunk(2, -1))
    check(metalcore.swiglu, gated("silu"), *both.chunk(2, 1))


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 700])
def test_rows_of_a_thread(device, rows):
    """The bias's gradient: chunks of rows, of which four are at work at once, and many chunks."""
    check(metalcore.bias_silu, biased("silu"), tensor(rows, 8, device=device), tensor(8, device=device), rows=rows)


def test_empty(device):
    x = tensor(0, 8, device=device).requires_grad_()
    assert metalcore.swiglu(x, x).shape == (0, 8) and metalcore.silu_and_mul(x).shape == (0, 4)
    bias = tensor(8, device=device).requires_grad_()
    gx, gb = torch.autograd.grad(metalcore.bias_gelu(x, bias).sum(), (x, bias))
    assert gx.shape == (0, 8) and gb.tolist() == [0.0] * 8


def test_special_values(device):
    inf, nan = float("inf"), float("nan")
    gate = torch.tensor([inf, -inf, nan, 0.0, -0.0, 1e30, -100.0, 100.0])
    up = torch.tensor([2.0, 1.0, 1.0, inf, 3.0, 1.0, 1e30, -1e30])
    assert_near(metalcore.swiglu(gate.to(device), up.to(device)), gated("silu")(wide(gate), wide(up)))


@each
def test_double_backward(device, name):
    def second(function, *inputs):
        *inputs, grad = (t.detach().requires_grad_() for t in inputs)
        first = torch.autograd.grad(function(*inputs), inputs, grad, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), (*inputs, grad))

    for ours, reference, shapes in (
        (GATED[name], gated(name), ((5, 8), (5, 8), (5, 8))),
        (HALVES[name], halves(name), ((5, 8), (5, 4))),
        (BIASED[name], biased(name), ((5, 8), (8,), (5, 8))),
    ):
        inputs = [tensor(*shape, device=device) for shape in shapes]
        for actual, wanted in zip(second(ours, *inputs), second(reference, *map(wide, inputs))):
            assert_near(actual, wanted, terms=16)


def test_only_some_gradients(device):
    gate, up = tensor(3, 8, device=device), tensor(3, 8, device=device).requires_grad_()
    (found,) = torch.autograd.grad(metalcore.swiglu(gate, up).sum(), up, create_graph=True)
    assert_near(found, F.silu(wide(gate)), terms=2)
    assert not torch.autograd.grad(found.sum(), up)[0].any()


@pytest.mark.parametrize("place", ["cpu", "device"])
def test_opcheck(device, place):
    device = "cpu" if place == "cpu" else device
    x, y, bias = (tensor(*shape, device=device).requires_grad_() for shape in ((3, 8), (3, 8), (8,)))
    ops, half = torch.ops.metalcore, tensor(3, 4, device=device)
    check_operator(ops.gated, x, y, "silu")
    check_operator(ops.gated_backward, x.detach(), x, y, "gelu")
    if place == "device":  # on the CPU they are made of the same functions
        check_operator(ops.gated_packed, x, "gelu_tanh")
        check_operator(ops.gated_packed_backward, half, x, "silu")
    check_operator(ops.bias_activation, x, bias, "gelu")
    check_operator(ops.bias_activation_backward, y.detach(), x, bias, "silu")


def test_elsewhere(device):
    """Input that the kernels do not take: broadcasting, mixed dtypes, the CPU."""
    x, row = tensor(3, 8, device=device), tensor(8, device=device)
    assert_near(metalcore.swiglu(x, row), gated("silu")(wide(x), wide(row)), terms=2)
    assert metalcore.swiglu(x, x.half()).dtype == torch.float32
    assert torch.equal(metalcore.bias_gelu(x.cpu(), row.cpu()), F.gelu(x.cpu() + row.cpu()))
    assert metalcore.bias_gelu(x.half(), row).dtype == torch.float32


def test_bad_input(device):
    x = tensor(3, 7, device=device)
    ops = torch.ops.metalcore
    for function in (metalcore.silu_and_mul, metalcore.gelu_and_mul, lambda x: ops.gated_packed(x, "silu")):
        with pytest.raises(RuntimeError, match=r"the last dimension of x must be even, and x is \[3, 7\]"):
            function(x)
    for function in (metalcore.geglu, metalcore.bias_gelu):
        with pytest.raises(RuntimeError, match="approximate must be 'none' or 'tanh', not 'sigmoid'"):
            function(x, x, "sigmoid")
    with pytest.raises(RuntimeError, match="activation must be 'silu', 'gelu' or 'gelu_tanh', not 'relu'"):
        ops.gated(x, x, "relu")
    with pytest.raises(RuntimeError, match=r"up must have shape \[3, 7\], not \[7\]"):
        ops.gated(x, x[0], "silu")
    with pytest.raises(RuntimeError, match="bias must have the size of the last dimension of x"):
        ops.bias_activation(x, x, "silu")
