"""joined_linear, against products in float64."""

import pytest
import torch
import torch.nn.functional as F
from references import DTYPES, check_operator, tensor

import metalcore

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
GATES = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}


def expected(x, weights, biases=(), norm=None, eps=1e-6, offset=0.0, gate=None, residual=None):
    x, *weights = (t.cpu().double() for t in (x, *weights))
    if norm is not None:
        x = F.rms_norm(x, x.shape[-1:], norm.cpu().double() + offset, eps)
    biases = [None if b is None else b.cpu().double() for b in biases] + [None] * (len(weights) - len(biases))
    parts = [F.linear(x, weight, bias) for weight, bias in zip(weights, biases)]
    y = GATES[gate](parts[0]) * parts[1] if gate else torch.cat(parts, -1)
    return y if residual is None else y + residual.cpu().double()


def assert_near(y, wanted, terms):
    """Sums of `terms` products are rounded to float32 as they grow, and results to y's dtype."""
    eps = torch.finfo(y.dtype).eps + terms**0.5 * torch.finfo(torch.float32).eps
    scale = max(1.0, wanted.abs().max().item())
    torch.testing.assert_close(y.cpu().double(), wanted, rtol=0, atol=4 * eps * scale)


def layers(terms, columns, dtype, device):
    x = tensor(1, 1, terms, dtype=dtype, device=device)
    return x, [tensor(n, terms, dtype=dtype, device=device, scale=terms**-0.5) for n in columns]


@each_dtype
@pytest.mark.parametrize("terms", [1, 31, 264, 384, 385, 776, 1600, 3104])
@pytest.mark.parametrize("columns", [(5,), (4, 1), (40, 9, 24), (1, 1, 1)], ids=str)
def test_layers_one_after_the_other(device, dtype, terms, columns):
    """Each number of terms that simdgroups share, rows of whole vectors and others, even and odd columns."""
    x, weights = layers(terms, columns, dtype, device)
    biases = [tensor(n, dtype=dtype, device=device) if i != 1 else None for i, n in enumerate(columns)]
    norm = tensor(terms, dtype=dtype, device=device)
    residual = tensor(1, 1, sum(columns), dtype=dtype, device=device)
    for options in ({}, {"biases": biases}, {"norm": norm, "eps": 1e-3, "offset": 1.0, "residual": residual}):
        y = metalcore.joined_linear(x, *weights, **options)
        assert y.shape == (1, 1, sum(columns)) and y.is_contiguous()
        assert_near(y, expected(x, weights, **options), terms)


@each_dtype
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("columns", [1, 2, 7, 64])
def test_gates(device, dtype, gate, columns):
    x, weights = layers(264, (columns, columns), dtype, device)
    biases = [tensor(columns, dtype=dtype, device=device)] * 2
    norm = tensor(264, dtype=dtype, device=device)
    for options in (
        {},
        {"biases": biases, "norm": norm, "residual": tensor(1, 1, columns, dtype=dtype, device=device)},
    ):
        y = metalcore.joined_linear(x, *weights, gate=gate, **options)
        assert_near(y, expected(x, weights, gate=gate, **options), 264)


def test_strides_and_offsets(device):
    """Columns that lie apart, rows that begin anywhere, and terms that are not neighbours."""
    x, weights = layers(264, (6, 4), torch.float32, device)
    wide = tensor(12, 272, device=device)
    for given in (x[..., 1:257], x[..., ::2], x[..., 4:260]):
        terms = given.shape[-1]
        for matrix in (wide[::2, 3 : 3 + terms], wide[:, :terms], wide.T[:terms].clone().T):
            y = metalcore.joined_linear(given, matrix, weights[1][:, :terms])
            assert_near(y, expected(given, (matrix, weights[1][:, :terms])), terms)


def test_what_the_kernel_does_not_take_is_pytorchs(device):
    x, weights = tensor(3, 24, device=device), [tensor(n, 24, device=device) for n in (5, 4)]
    assert_near(metalcore.joined_linear(x, *weights), expected(x, weights), 24)
    assert metalcore.joined_linear(x[:0], *weights).shape == (0, 9)
    x, weights = layers(24, (5, 4), torch.float64, "cpu")
    assert_near(metalcore.joined_linear(x, *weights), expected(x, weights), 24)


def test_gradients(device):
    x, weights = layers(24, (5, 5), torch.float32, device)
    given = [t.requires_grad_() for t in (x, *weights)]
    grads = torch.autograd.grad(metalcore.joined_linear(*given, gate="silu").sum(), given)
    wide = [t.detach().cpu().double().requires_grad_() for t in given]
    wanted = torch.autograd.grad((F.silu(F.linear(wide[0], wide[1])) * F.linear(wide[0], wide[2])).sum(), wide)
    for a, b in zip(grads, wanted):
        assert_near(a, b, 24)


def test_gradients_of_arguments_that_depend_on_each_other(device):
    """A weight stands twice, and the input comes from a layer of the same weight."""

    def two_layers(joined, x, weight):
        return joined(joined(x, weight).tanh(), weight, weight)

    x, (weight,) = layers(6, (6,), torch.float32, device)
    weight.requires_grad_()
    (grad,) = torch.autograd.grad(two_layers(metalcore.joined_linear, x, weight).square().sum(), weight)
    wide = weight.detach().cpu().double().requires_grad_()

    def by_torch(x, *weights):
        return torch.cat([F.linear(x, weight) for weight in weights], -1)

    (wanted,) = torch.autograd.grad(two_layers(by_torch, x.cpu().double(), wide).square().sum(), wide)
    assert_near(grad, wanted, 24)


def test_the_operator(device):
    x, (a, b, c) = layers(40, (5, 5, 3), torch.float32, device)
    norm, residual = tensor(40, device=device), tensor(1, 1, 5, device=device)
    operator = torch.ops.metalcore.joined_linear
    check_operator(operator, x, a, b, c, None, a[:, 0].clone(), None, norm, 1e-6, 0.0, None, "none")
    check_operator(operator, x, a, b, None, None, None, None, None, 1e-6, 0.0, residual, "gelu")


def test_errors(device):
    x, (a, b, c) = layers(24, (5, 5, 3), torch.float32, device)
    for error, message, arguments, options in [
        (ValueError, "a third weight goes with a second one", (x, a, None, c), {}),
        (ValueError, "2 biases do not go with 1 weights", (x, a), {"biases": (None, None)}),
        (ValueError, "gate must be None, 'silu', 'gelu', 'gelu_tanh', not 'tanh'", (x, a, b), {"gate": "tanh"}),
        (ValueError, "a gate goes with two weights, not 3", (x, a, b, c), {"gate": "silu"}),
        (TypeError, "second must be a tensor, not int", (x, a, 1), {}),
        (RuntimeError, r"a and b must have one shape", (x, a, c), {"gate": "silu"}),
        (RuntimeError, r"b of shape \[5, 23\] does not go with x of shape \[1, 1, 24\]", (x, a, b[:, 1:]), {}),
        (RuntimeError, r"bias_a must have shape \[5\], not \[3\]", (x, a), {"biases": (c[:, 0],)}),
        (RuntimeError, r"norm must have shape \[24\], not \[5\]", (x, a), {"norm": a[:, 0]}),
        (RuntimeError, r"residual must have shape", (x, a), {"residual": x}),
    ]:
        with pytest.raises(error, match=message):
            metalcore.joined_linear(*arguments, **options)


def test_plans(device):
    """Simdgroups share the terms of few columns, as far as each has enough of them."""
    for terms, columns in ((384, 2), (768, 2), (1600, 2), (8960, 2), (32, 4096)):
        plan = metalcore.explain("joined_linear", (1, terms), (columns, terms), (3, terms))
        assert plan.variant == "joined_linear" and "share the terms of 2 columns" in plan.why
