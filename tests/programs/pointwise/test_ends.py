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
    if dtype == torch.bool:
        return torch.tensor([True, False])
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


def same(name, made, expected):
    assert (made.dtype, made.shape) == (expected.dtype, expected.shape), name
    made, dtype = made.cpu(), expected.dtype
    if not dtype.is_floating_point:
        assert torch.equal(made, expected), (name, made, expected)
        return
    eps = torch.finfo(dtype).eps
    # Results below the smallest normal number may be zero.
    torch.testing.assert_close(
        made,
        expected,
        rtol=max(2 * eps, 2e-6),
        atol=torch.finfo(dtype).tiny,
        equal_nan=True,
        msg=lambda m: f"{name}: {m}",
    )


def check(keys, tensors):
    def function(*given):
        return tuple(operation(key)(*given, *ARGUMENTS.get(name_of(key), ())) for key in keys)

    for key, (made, expected) in zip(keys, results(function, *tensors)):
        same(key, made, expected)


@each_float
@pytest.mark.parametrize("factor", [None, 4.0, 0.25])
def test_one_operand(device, dtype, factor):
    keys = [key for key in formulas(1, "f") if name_of(key) not in OF_ANGLES]
    if factor is None:
        check(keys, [ends(dtype).to(device)])
        return

    def function(x):
        y = x * factor
        return tuple(operation(key)(y, *ARGUMENTS.get(name_of(key), ())) for key in keys)

    for key, (made, expected) in zip(keys, results(function, ends(dtype).to(device))):
        same(f"{key} of x * {factor}", made, expected)


@each_float
def test_two_operands(device, dtype):
    x, y = (pair.flatten() for pair in torch.meshgrid(ends(dtype), ends(dtype), indexing="ij"))
    keys = [key for key in formulas(2, "f") if "backward" not in key]
    check(keys, [x.to(device), y.to(device)])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8, torch.int8, torch.int16, torch.bool], ids=str)
def test_whole_numbers(device, dtype):
    kind = "b" if dtype == torch.bool else "i"
    check([key for key in formulas(1, kind) if operation(key) is not None], [ends(dtype).to(device)])


LIMITED = {
    "nan_to_num": lambda x: x.nan_to_num(),
    "nan_to_num of a product": lambda x: (x * 100.0).nan_to_num(),
    "nan_to_num with numbers": lambda x: (x * 4).nan_to_num(0.1, 1e5, -1e5),
    "clamp": lambda x: (x * 4).clamp(-1e5, 1e5),
    "clamp_min": lambda x: x.clamp(min=-1e39),
    "hardtanh": lambda x: torch.nn.functional.hardtanh(x, -1e5, 1e5),
    "threshold": lambda x: torch.nn.functional.threshold(x, 1e5, -2.0),
    "masked_fill": lambda x: x.masked_fill(x > 0, float("-inf")),
    "where": lambda x: torch.where(x > 1, 1e4, x),
    "less": lambda x: x < 1e5,
    "equal": lambda x: x == 65520.0,
    "add": lambda x: x + 1e5,
    "sub": lambda x: 1e5 - x,
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
@pytest.mark.parametrize("name", LIMITED)
def test_constants_and_limits(device, dtype, name):
    for made, expected in results(lambda x: (LIMITED[name](x),), ends(dtype).to(device)):
        same(name, made, expected)
