"""Every formula, on numbers of all sizes, against PyTorch's operation on the CPU."""

import math

import pytest
import torch
from traced import built, distances, results

from metalcore.programs.pointwise.formulas import FORMULAS

aten = torch.ops.aten
# Errors are in units in the last place of float32. PyTorch's functions are off by up to 2 themselves.
ULPS = 8
SPECIAL = [0.0, -0.0, 0.5, -0.5, 1.0, -1.0, 2.5, -2.5, 3.0, -3.0, 1e-6, -1e-6, 100.0, -100.0]
ENDS = [float("inf"), float("-inf"), float("nan")]
# What takes more than tensors, and is tested below.
OTHERS = {"expand.default", "contiguous.default", "lift_fresh_copy.default", "div.Tensor_mode"}
# These end in sums whose terms may cancel: errors are in units in the last place of the terms.
SUMS = {"logaddexp.default", "addcmul.default", "addcdiv.default", "lerp.Tensor"}
# PyTorch's float64 loses these where they are small.
EXACT = {
    "gelu.default": lambda x: x * torch.special.erfc(x * -(0.5**0.5)) / 2,
    "gelu_backward.default": lambda grad, x: (
        grad * (torch.special.erfc(x * -(0.5**0.5)) / 2 + x * torch.exp(-x * x / 2) / (2 * torch.pi) ** 0.5)
    ),
}
ARGUMENTS = {
    "hardtanh": (-0.5, 2.0),
    "leaky_relu": (0.1,),
    "elu": (1.5, 1.1, 0.9),
    "softplus": (1.5, 10.0),
    "threshold": (0.3, -2.0),
    "hardshrink": (0.4,),
    "softshrink": (0.4,),
    "threshold_backward": (0.3,),
    "hardtanh_backward": (-0.5, 2.0),
    "leaky_relu_backward": (0.1, False),
}


def numbers(seed, scale=2.0):
    torch.manual_seed(seed)
    spread = torch.randn(200) * scale
    return torch.cat([torch.tensor(SPECIAL), spread, spread * 20])


def name_of(key):
    return key.removesuffix(".default")


def operation(key):
    packet, overload = key.split(".")
    return getattr(getattr(aten, packet), overload)


def formulas(count, kind):
    """The formulas with so many tensors as operands."""
    found = []
    for key, formula in FORMULAS.items():
        op = operation(key)
        tensors = [str(argument.type) for argument in op._schema.arguments][: len(formula.operands)]
        if len(formula.operands) == count and kind in formula.text and set(tensors) == {"Tensor"} and key not in OTHERS:
            found.append(key)
    return found


def check(keys, tensors):
    def function(*given):
        return tuple(operation(key)(*given, *ARGUMENTS.get(name_of(key), ())) for key in keys)

    doubles = [tensor.cpu().double() for tensor in tensors]
    for key, (made, expected) in zip(keys, results(function, *tensors)):
        assert (made.dtype, made.shape) == (expected.dtype, expected.shape), key
        if expected.dtype.is_floating_point:
            exact = EXACT.get(key, lambda *given, key=key: operation(key)(*given, *ARGUMENTS.get(name_of(key), ())))
            off = distances(made, expected, exact(*doubles)) > ULPS
            if key in SUMS or "_backward" in key:
                terms = math.prod(1 + tensor.abs() for tensor in doubles) ** 2
                eps = torch.finfo(torch.float32).eps
                off &= ~((made.cpu() - exact(*doubles)).abs() <= ULPS * eps * terms)
            assert not off.any(), f"{key}: {made.cpu()[off][:4]} is not {expected[off][:4]}"
        else:
            assert torch.equal(made.cpu(), expected), key


@pytest.mark.parametrize("part", [0, 1, 2])
def test_functions_of_a_number(device, part):
    keys = [key for key in formulas(1, "f") if name_of(key) not in ("mish", "nan_to_num")][part::3]
    check(keys, [torch.cat([numbers(0), torch.tensor(ENDS)]).to(device)])


def test_functions_of_two_and_three_numbers(device):
    exact = {"maximum", "minimum", "add", "sub", "mul", "div", "fmod", "remainder", "floor_divide"}
    two = [key for key in formulas(2, "f") if key.split(".")[0] != "pow"]
    check(two[::2], [numbers(1).to(device), numbers(2).to(device)])
    check(two[1::2], [numbers(1).to(device), numbers(2).to(device)])
    check(
        [key for key in two if key.split(".")[0] in exact],
        [torch.cat([numbers(0), torch.tensor(ENDS)]).to(device), numbers(3)[:1].to(device)],
    )
    check(formulas(3, "f"), [numbers(k).to(device) for k in (3, 4, 5)])


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8])
def test_whole_numbers(device, dtype):
    torch.manual_seed(0)
    low, high = (0, 256) if dtype == torch.uint8 else (-(2**40), 2**40)
    a, b = (torch.randint(low, high, (100,), dtype=dtype) for _ in range(2))
    b = torch.where(b == 0, 3, b // 2**36 if dtype == torch.int64 else b)
    b = torch.where(b == 0, 3, b).to(dtype)
    skipped = {"bitwise_left_shift", "bitwise_right_shift", "__lshift__", "__rshift__", "pow", "copysign", "atan2"}
    one = [key for key in formulas(1, "i") if dtype.is_signed or name_of(key) != "neg"]
    check(one, [a.to(device)])
    check([key for key in formulas(2, "i") if key.split(".")[0] not in skipped], [a.to(device), b.to(device)])


def test_powers_and_shifts(device):
    base = torch.tensor([2, -3, 0, 1, -1, 7], dtype=torch.int32, device=device)
    by = torch.tensor([5, 3, 0, 31, 2, 1], dtype=torch.int32, device=device)

    def function(base, by):
        shifts = aten.bitwise_left_shift.Tensor(base, by), aten.bitwise_right_shift.Tensor(base, by)
        return *shifts, base**by, base**3, 2**by, base.float() ** 2, base.abs().float() ** 0.5, base.float() ** -1

    for made, expected in results(function, base, by):
        assert torch.equal(made.cpu(), expected)


def test_numbers_that_whole_numbers_cannot_be_divided_by(device):
    """PyTorch has no result for 0 as a divisor, and processors stop there; the least number has no opposite."""
    a = torch.tensor([5, -(2**31), 7], dtype=torch.int32, device=device)
    b = torch.tensor([0, -1, -2], dtype=torch.int32, device=device)
    run = built(
        lambda a, b: (torch.div(a, b, rounding_mode="trunc"), aten.floor_divide(a, b), a % b), a, torch.ones_like(b)
    )
    trunc, floor, rest = (made.tolist() for made in run(a, b))
    assert trunc == [0, -(2**31), -3]
    assert floor == [0, -(2**31), -4]
    assert rest == [0, 0, -1]


def test_choices_limits_and_constants(device):
    x, y = numbers(6).to(device), numbers(7).to(device)

    def function(x, y):
        constants = torch.full_like(x, 2.5), torch.zeros_like(x), torch.full((x.shape[0],), 7)
        limits = x.clamp(-1, 2), x.clamp(min=y), x.clamp(y, y + 1), x.clamp_min(0.5), x.clamp_max(y)
        filled = (
            x.masked_fill(y > 0, -3.0),
            torch.where(x > y, x, y),
            torch.where(x > 0, x, 1.5),
            aten.fill.Scalar(x, 3.0),
        )
        dtypes = x.to(torch.int32), x.to(torch.bool), (x > 0).to(torch.float16), x.to(torch.bfloat16), x.nan_to_num()
        return *constants, *limits, *filled, *dtypes

    for k, (made, expected) in enumerate(results(function, x, y)):
        assert made.dtype == expected.dtype and torch.equal(made.cpu(), expected), k
