"""Each formula at the ends of its operands' types, against PyTorch's operation on the CPU, alone and behind a product
that leaves the type's range."""

import pytest
import torch
from test_formulas import ARGUMENTS, formulas, name_of, operation
from traced import results

SIXTEEN = [torch.float16, torch.bfloat16]
each_float = pytest.mark.parametrize("dtype", [*SIXTEEN, torch.float32], ids=str)
# Of large arguments PyTorch's own vectorized and scalar functions differ, in the last place of the argument.
OF_ANGLES = {"sin", "cos", "tan"}


def ends(dtype):
    """Numbers at the ends of a type; products with 4 leave it."""
    if not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        return torch.tensor([info.min, info.min + 1, -1 if info.min else 1, 0, 1, info.max - 1, info.max], dtype=dtype)
    info = torch.finfo(dtype)
    inf, nan = float("inf"), float("nan")
    found = [
        0.0,
        -0.0,
        1.0,
        -1.0,
        info.max,
        info.min,
        info.max / 2,
        info.min / 2,
        info.tiny,
        -info.tiny,
        inf,
        -inf,
        nan,
    ]
    return torch.tensor(found, dtype=dtype)


def same(name, made, expected, exact=None):
    """Asserts that results are PyTorch's, or those of float64 where PyTorch's own float32 is wrong: its gelu of the
    largest number is inf, its erf of small ones 0."""
    assert (made.dtype, made.shape) == (expected.dtype, expected.shape), name
    made, dtype = made.cpu(), expected.dtype
    if not dtype.is_floating_point:
        assert torch.equal(made, expected), (name, made, expected)
        return
    if exact is not None:
        expected = torch.where(_close(made, exact.to(dtype)), made, expected)
    assert _close(made, expected).all(), (name, made, expected)


def _close(a, b):
    eps = torch.finfo(a.dtype).eps
    # Results below the smallest normal number may be zero.
    return torch.isclose(a, b, rtol=max(2 * eps, 2e-6), atol=2 * torch.finfo(a.dtype).tiny, equal_nan=True)


def check(keys, tensors, scaled=lambda *given: given):
    """Compares operations of the `scaled` tensors, which have their dtype."""

    def call(key, given):
        return operation(key)(*given, *ARGUMENTS.get(name_of(key), ()))

    def function(*given):
        given = scaled(*given)
        return tuple(call(key, given) for key in keys)

    wide = [tensor.double() if tensor.is_floating_point() else tensor for tensor in scaled(*(t.cpu() for t in tensors))]
    for key, (made, expected) in zip(keys, results(function, *tensors)):
        has_limits = name_of(key) == "nan_to_num" or not expected.is_floating_point()
        same(key, made, expected, None if has_limits else call(key, wide))


ONE = [*(key for key in formulas(1, "f") if name_of(key) not in OF_ANGLES), "nan_to_num.default"]


@each_float
def test_one_operand(device, dtype):
    check(ONE, [ends(dtype).to(device)])


@pytest.mark.parametrize("dtype", SIXTEEN, ids=str)
def test_products(device, dtype):
    """They leave the range of 16 bits, and not that of the float32 in which a kernel has them."""
    factors = torch.tensor([4.0, 0.25], dtype=dtype)[:, None]
    check(ONE, [ends(dtype).to(device), factors.to(device)], lambda x, factors: (x * factors,))


@each_float
def test_two_operands(device, dtype):
    x, y = (pair.flatten() for pair in torch.meshgrid(ends(dtype), ends(dtype), indexing="ij"))
    keys = [key for key in formulas(2, "f") if "backward" not in key]
    check(keys, [x.to(device), y.to(device)])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8, torch.int8, torch.int16], ids=str)
def test_whole_numbers(device, dtype):
    check(formulas(1, "i"), [ends(dtype).to(device)])


LIMITED = {
    "nan_to_num": lambda x: x.nan_to_num(),
    "nan_to_num of a product": lambda x: (x * 100.0).nan_to_num(),
    "nan_to_num with numbers": lambda x: (x * 4).nan_to_num(0.1, 1e5, -1e5),
    "clamp": lambda x: (x * 4).clamp(-6e4, 65504.0),
    "clamp_min": lambda x: (x * 4).clamp(min=float("-inf")),
    "hardtanh": lambda x: torch.nn.functional.hardtanh(x * 4, -6e4, 6e4),
    "threshold": lambda x: torch.nn.functional.threshold(x, 1e5, -2.0),
    "masked_fill": lambda x: x.masked_fill(x > 0, float("-inf")),
    "where": lambda x: torch.where(x > 1, 1e4, x),
    "less": lambda x: x < 1e5,
    "equal": lambda x: x == 65520.0,
    "add": lambda x: x * 4 + 6e4,
    "sub": lambda x: 6e4 - x * 4,
    "mul": lambda x: x * 1e5,
    "div": lambda x: x / 1e5,
    "isinf": lambda x: (x * 4).isinf(),
    "isfinite": lambda x: (x * 4).isfinite(),
    "softplus": lambda x: torch.nn.functional.softplus(x * 4),
    "silu": lambda x: torch.nn.functional.silu(x * 4),
    "maximum": lambda x: torch.maximum(x * 4, -x),
    "to half and back": lambda x: (x.half() * 2).float(),
}


@each_float
def test_constants_and_limits(device, dtype):
    found = results(lambda x: tuple(function(x) for function in LIMITED.values()), ends(dtype).to(device))
    for name, (made, expected) in zip(LIMITED, found):
        same(name, made, expected)
