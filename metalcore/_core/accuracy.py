"""Compares an op's results and gradients with PyTorch's in float64 on the CPU, from the same rounded tensors.

Errors are relative to the largest value of their tensor, except where that is subnormal. The bound is

    roundings * eps(dtype) + 8 * sqrt(terms) * eps(float32)

because the kernels compute in float32, in sums of `terms` numbers whose roundings go up as often as down, and round to
the dtype of the result. For a gradient the bound is four times as large, because rounded results and two such
computations make it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .. import _C
from .registry import Op, Sample, Shape, random

__all__ = ["FACTORS", "bound", "directed", "evaluate", "shares", "shares_of"]

FACTORS = {"forward": 1, "gradient": 4}


def shares(op: Op, sample: Sample, device: torch.device | str, dtype: torch.dtype) -> dict[str, float]:
    """Returns the largest errors of the results and of the gradients, as shares of their bounds. An error is infinite
    if shapes differ, or if NaN is in only one of the two tensors."""
    return shares_of(op, sample, sample.make("cpu", dtype), device, dtype)


def shares_of(
    op: Op, sample: Sample, inputs: Sequence[Tensor], device: torch.device | str, dtype: torch.dtype
) -> dict[str, float]:
    """Returns shares() for inputs on the CPU."""
    tensors = [tensor.to(device) for tensor in inputs]
    actual = evaluate(op, sample, tensors)
    expected = evaluate(op, sample, [tensor.cpu().double() for tensor in tensors], op.reference, dtype)
    return {
        part: max(_share(sample, ours, theirs, FACTORS[part]) for ours, theirs in zip(actual[part], expected[part]))
        for part in actual
    }


def evaluate(
    op: Op,
    sample: Sample,
    tensors: Sequence[Tensor],
    function: Callable | None = None,
    dtype: torch.dtype | None = None,
    numbers: Callable[[Shape, int], Tensor] = random,
) -> dict[str, list[Tensor]]:
    """Returns the results, and the gradients of a random linear function of those results that have a derivative, if
    any has one. The coefficients of that function are `numbers(shape, seed)`, rounded to `dtype`."""
    backward = op.backward and sample.backward
    leaves = [tensor.detach().requires_grad_(backward) for tensor in tensors]
    results = op.compute(sample, leaves, function)
    parts = {"forward": [result.detach() for result in results]}
    if backward:
        outputs, directions = directed(results, dtype, numbers)
        parts["gradient"] = list(torch.autograd.grad(outputs, leaves, directions))
    return parts


def directed(
    results: Sequence[Tensor], dtype: torch.dtype | None = None, numbers: Callable[[Shape, int], Tensor] = random
) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the results that have a derivative, and a random tensor like each, which is the same on every device."""
    directions = [numbers(tuple(x.shape), 1000 + index).to(dtype or x.dtype).to(x) for index, x in enumerate(results)]
    pairs = [(x, direction) for x, direction in zip(results, directions) if x.requires_grad]
    return [x for x, _ in pairs], [direction for _, direction in pairs]


def bound(sample: Sample, dtype: torch.dtype) -> float:
    """Returns the bound for a result of this dtype."""
    rounding, arithmetic = torch.finfo(dtype).eps, torch.finfo(torch.float32).eps
    return sample.roundings * rounding + 8 * sample.terms**0.5 * arithmetic


def _share(sample: Sample, actual: Tensor, expected: Tensor, factor: int) -> float:
    if actual.shape != expected.shape:
        return float("inf")
    actual_wide = actual.cpu().double()
    same = (actual_wide == expected) | (actual_wide.isnan() & expected.isnan())  # infinities, and two NaNs
    if bool(same.all()):
        return 0.0
    error = (actual_wide - expected).masked_fill(same, 0).abs().max()
    largest = expected.masked_fill(~expected.isfinite(), 0).abs().max()
    least = torch.finfo(actual.dtype).smallest_normal  # what becomes zero
    if not _flushes(actual):
        least *= torch.finfo(actual.dtype).eps
    share = error / (factor * (bound(sample, actual.dtype) * largest + sample.roundings * least))
    return float("inf") if share.isnan() else float(share)


def _flushes(tensor: Tensor) -> bool:
    """Returns whether kernels on the tensor's device take its dtype's subnormal numbers for zero."""
    if tensor.device.type != "mps":
        return False
    if hasattr(_C, "mps_half_subnormals"):
        return tensor.dtype is not torch.float16 or not _C.mps_half_subnormals()
    return _C.simulator_info()["flushing"]
