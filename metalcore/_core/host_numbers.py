"""Integers in tensors, such as offsets: checks where the host sees them without waiting for a GPU, and conversion."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from torch.compiler import is_compiling

from .routing import explained

__all__ = ["check_offsets", "host_sees", "in_int32"]


def host_sees(tensor: Tensor) -> bool:
    """Whether the host sees a tensor's numbers. A trace has none, and a recording would have that as a step of
    PyTorch's."""
    if is_compiling() or explained.observers or type(tensor) is not Tensor:
        return False
    return tensor.is_cpu or tensor.is_mps and getattr(torch._C, "_metalcore_simulates_mps", False)


def check_offsets(op: str, name: str, offsets: Tensor, most: int) -> list[int]:
    """The offsets as a list. Raises ValueError unless they are 0 to `most` and do not descend."""
    numbers = offsets.tolist()
    if not numbers or numbers[0] < 0 or numbers[-1] > most or any(a > b for a, b in pairwise(numbers)):
        raise ValueError(f"{op}: {name} must be numbers of 0 to {most} that do not descend")
    return numbers


_LONGER = (torch.int64, torch.uint32, torch.uint64)


def in_int32(numbers: Tensor) -> Tensor:
    """The integers as int32, and its least or largest number for one beyond its range: a plain conversion would make
    2**32 a 0, which may be legal."""
    if numbers.dtype in _LONGER:
        numbers = numbers.long().clamp(-(2**31), 2**31 - 1)
    return numbers.to(torch.int32)
