"""The probes, by area. A probe is a function of a device that does what a report does, compares it with the CPU, and
returns the largest relative error beside its bound (`Found`). It raises what PyTorch raises.

Where a fault reads wrong memory, numbers are whole and so few that every sum of them is exact in any order: the bound
is 0 then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Found", "error_of", "gradients", "numbers", "whole_numbers"]

LARGEST = 1e300  # a number, for JSON


class Found(NamedTuple):
    """What a probe has found.

    Attributes:
        error: the largest difference from the CPU's result, over the result's largest magnitude; LARGEST where a result
            is not finite or has another shape.
        bound: what rounding alone may make of it.
    """

    error: float
    bound: float


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """Returns random normal float32 numbers on the CPU."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), device="cpu", dtype=torch.float32)


def whole_numbers(*shape: int, seed: int = 0) -> Tensor:
    """Returns random -1, 0 and 1, as float32, on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-1, 2, shape, generator=generator, device="cpu").to(torch.float32)


def error_of(result: Tensor, expected: Tensor) -> float:
    """Returns the largest difference, over the largest magnitude that was expected."""
    if result.shape != expected.shape:
        return LARGEST
    expected = expected.detach().cpu().double()
    difference = (result.detach().cpu().double() - expected).abs().max()
    error = (difference / expected.abs().max().clamp_min(torch.finfo(torch.float32).tiny)).item()
    return min(error, LARGEST) if error == error else LARGEST


def gradients(function: Callable[..., Tensor], *tensors: Tensor) -> list[Tensor]:
    """Returns the gradients of a function's sum."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    return list(torch.autograd.grad(function(*leaves).sum(), leaves))
