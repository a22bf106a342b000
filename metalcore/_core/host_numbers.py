"""Checks of integers in tensors, such as offsets, where the host sees them without waiting for a GPU."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from torch.compiler import is_compiling

from .routing import explained

__all__ = ["check_offsets", "host_sees"]


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
