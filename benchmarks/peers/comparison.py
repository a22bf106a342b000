"""What the comparisons with peers share: both sides run on one device, and both are checked before they are timed."""

from __future__ import annotations

import functools
import math

import torch

from ..harness.case import Comparison

# The largest error over the largest number of the reference. A kernel that is wrong is off by more than any rounding.
LIMITS = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}


def peer_case(*, reference, limit, **fields):
    """Returns a comparison whose `ours` and `theirs` make calls: each is given the inputs, allocates, and returns a
    call without arguments. Only this call is timed.

    Args:
        reference: (*inputs) -> what a call must return, computed in float64: a tensor or a tuple of them. It may be the
            beginning of each dimension alone.
        limit: the largest error, over the largest number of the reference.
    """
    return Comparison(bind=bound, check=functools.partial(check, reference, limit), **fields)


def bound(make, *inputs):
    return make(*inputs)


def calls(function):
    """Returns the side of a function that needs no preparation."""
    return lambda *inputs: functools.partial(function, *inputs)


def check(reference, limit, case, *inputs):
    """Raises an ArithmeticError where a side's result is not the reference's."""
    expected = reference(*inputs)
    for name, make in (("metalcore's result", case.ours), ("the peer's result", case.theirs)):
        error = error_of(make(*inputs)(), expected)
        if error > limit:
            raise ArithmeticError(f"{name} is wrong: the error is {error:.1e} of the largest number (limit {limit:g})")


def error_of(result, expected):
    """Returns the largest error over the largest number, of tensors or of tuples of tensors."""
    if isinstance(expected, tuple):
        return max(error_of(*pair) for pair in zip(result, expected, strict=True))
    result_part = exact(result.detach()[tuple(map(slice, expected.shape))])
    error = ((result_part - expected).abs().max() / expected.abs().max().clamp_min(1e-30)).item()
    return math.inf if math.isnan(error) else error


def exact(tensor):
    """Returns the tensor in float64, on the CPU unless its device has float64. Integers stay what they are."""
    tensor = tensor if tensor.is_cuda else tensor.cpu()
    return tensor.double() if tensor.is_floating_point() else tensor
