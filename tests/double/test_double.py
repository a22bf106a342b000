"""Numbers of 48 bits: their errors, what the compiler has to keep, and what moves them."""

import math

import mpmath
import pytest
import torch

import metalcore
from metalcore.double import Double

UNIT = 2.0**-48
LIMIT = 1e-14 / UNIT  # of a function's error


def numbers(*shape, scale=1.0, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale


def error(found, function, *arguments):
    """The largest relative error in units of 2^-48, by a reference of 40 digits."""
    with mpmath.workdps(40):
        pairs = zip(found.double().tolist(), *(x.double().tolist() for x in arguments))
        exact = ((result, function(*map(mpmath.mpf, each))) for result, *each in pairs)
        return max(float(abs((result - wanted) / wanted)) for result, wanted in exact) / UNIT


# A result holds lo with 24 bits, and lo is at most half of hi's last bit: half a unit is the rounding of lo.
@pytest.mark.parametrize("name", ("add", "sub", "mul", "truediv"))
@pytest.mark.parametrize("near_one", (True, False))
def test_arithmetic(device, name, near_one):
    scale, shift = (1e-2, 1) if near_one else (3, 0)  # numbers above a power of 2 have the largest relative errors
    x, y = (Double(shift + numbers(500, scale=scale, seed=seed).abs(), device) for seed in (0, 1))
    operation = {"add": mpmath.fadd, "sub": mpmath.fsub, "mul": mpmath.fmul, "truediv": mpmath.fdiv}[name]
    assert error(getattr(x, f"__{name}__")(y), operation, x, y) <= 0.501


@pytest.mark.parametrize("name", ("sqrt", "exp", "log", "sin", "cos", "tan", "tanh"))
@pytest.mark.parametrize("scale", (1e-5, 1.0, 30.0))
def test_functions(device, name, scale):
    x = numbers(300, scale=scale).clamp(-2 * scale, 2 * scale)
    x = Double(x.abs() if name in ("sqrt", "log") else x, device)
    assert error(getattr(x, name)(), getattr(mpmath, name), x) <= (0.501 if name == "sqrt" else LIMIT)


def test_logarithms_of_numbers_near_one(device):
    x = Double(1 + numbers(300, scale=1e-4), device)
    assert error(x.log(), mpmath.log, x) <= LIMIT


def test_error_terms_survive_the_compiler(device):
    """Sums and products whose result is only in the error terms: a compiler that reorders or joins them gives zero."""
    one, tiny = Double(1.0, device), Double(2.0**-30, device)
    assert ((one + tiny) - one).double().item() == 2.0**-30
    x = Double(torch.tensor([1 + 2.0**-12, 1 + 2.0**-23, 3.0], dtype=torch.float64), device)
    assert ((x * x) - Double((x * x).float())).double().tolist() == [2.0**-24, 2.0**-46, 0.0]
    terms = Double(torch.tensor([1.0, 2.0**-40, -1.0], dtype=torch.float64), device)
    assert terms.sum().double().item() == 2.0**-40
    assert (terms.reshape(1, 3) @ Double(torch.ones(3, 1), device)).double().item() == 2.0**-40
    assert x[:1].dot(x[:1]).double().item() == (1 + 2.0**-12) ** 2


def test_special_numbers(device):
    x = Double(torch.tensor([0.0, math.inf, -math.inf, math.nan], dtype=torch.float64), device)
    expected = x.double()
    for name in ("sqrt", "exp", "log", "sin", "cos", "tanh"):
        torch.testing.assert_close(getattr(x, name)().double(), getattr(expected, name)(), equal_nan=True)
    for found, wanted in (
        ((x + 1), expected + 1),
        (x * x, expected * expected),
        (1 / x, 1 / expected),
        (-x, -expected),
    ):
        torch.testing.assert_close(found.double(), wanted, equal_nan=True)
    assert Double(2.0**24, device).sin().double().isnan()
    assert Double(torch.tensor([200.0, -200.0]), device).exp().double().tolist() == [math.inf, 0.0]


@pytest.mark.parametrize("length", (1, 256, 257, 8192, 8193, 20000))
def test_sums(device, length):
    x, y = (numbers(3, length, seed=seed) for seed in (0, 1))
    a, b = Double(x, device), Double(y, device)
    x, y = a.double(), b.double()
    # A term's rounding and those of a thread's sum: length / 256 of them, and 8 of the tree.
    bound = (length / 256 + 10) * UNIT
    assert ((a.sum(-1).double() - x.sum(-1)).abs() <= bound * x.abs().sum(-1)).all()
    assert ((a.dot(b).double() - (x * y).sum(-1)).abs() <= bound * (x * y).abs().sum(-1)).all()
    assert ((a.norm(-1).double() - x.norm(dim=-1)).abs() <= bound * x.norm(dim=-1)).all()
    torch.testing.assert_close(a.sum(0).double(), x.sum(0), rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("m, k, n", ((1, 1, 1), (32, 16, 32), (33, 17, 31), (70, 200, 5)))
@pytest.mark.parametrize("transposed", (False, True))
def test_matmul(device, m, k, n, transposed):
    a, b = Double(numbers(2, m, k), device), Double(numbers(k, n, seed=1), device)
    if transposed:
        a, b = (Double.of_pairs(x.mT.pairs.contiguous()).mT for x in (a, b))
    x, y = a.double(), b.double()
    # 4 for a product, 2 for each of the 16 terms of a sum, 3 for each sum added to the total.
    bound = (4 + 2 * 16 + 3 * (k / 16 + 1)) * UNIT
    assert (((a @ b).double() - x @ y).abs() <= bound * (x.abs() @ y.abs())).all()
    assert ((a @ Double(torch.ones(k), device)).double() - x.sum(-1)).abs().max() <= bound * k * x.abs().max()


def test_views_and_comparisons(device):
    values = numbers(4, 5, 6)
    x = Double(values, device)
    values = x.double()
    for view in (lambda t: t[1:, ..., 2], lambda t: t[2], lambda t: t.reshape(20, 6), lambda t: t.transpose(0, -1)):
        assert torch.equal(view(x).double(), view(values))
    assert torch.equal(x.abs().double(), values.abs()) and torch.equal((1 - x).double() < 0, values > 1)
    x[0] = 3.0
    assert (x[0].double() == 3.0).all() and len(x) == 4 and x.shape == (4, 5, 6)
    y = x + 2.0**-40
    assert (y > x).all() and (x < y).all() and (y >= x).all() and (x <= x).all() and (x == x).all() and (x != y).all()


def test_errors(device):
    with pytest.raises(TypeError, match="x must be real"):
        Double(torch.ones(1, dtype=torch.complex64))
    with pytest.raises(TypeError, match="x must be a tensor or a number"):
        Double("1")
    with pytest.raises(TypeError, match="pairs must be float32"):
        Double.of_pairs(torch.ones(3))
    pairs = torch.ones(3, 2, device=device)
    with pytest.raises(RuntimeError, match="double_function: there is no function 'erf' of one argument"):
        metalcore.double.double_function(pairs, None, "erf")
    with pytest.raises(RuntimeError, match="double_sum: x must have pairs in its last dimension"):
        metalcore.double.double_sum(torch.ones(3, 3, device=device))
    with pytest.raises(RuntimeError, match="double_matmul: a has 2 columns, and b has 3 rows"):
        metalcore.double.double_matmul(torch.ones(1, 2, 2, 2, device=device), torch.ones(1, 3, 2, 2, device=device))
