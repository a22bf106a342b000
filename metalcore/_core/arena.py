"""Where values live in one piece of memory, by their lifetimes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._C import _to_dlpack as to_dlpack
from torch.utils.dlpack import from_dlpack

__all__ = ["ALIGNMENT", "fixed_memory", "peak", "place"]

ALIGNMENT = 256  # bytes: more than any binding needs


def place(lives: Sequence[tuple[int, int, int]]) -> tuple[list[int], int]:
    """Returns the offset of each value, and the size of the memory, in bytes.

    A value is (its first step, its last step, its size in bytes). Values share memory where their steps do not meet.
    The largest come first, and each takes the lowest place that is free during all of its steps.
    """
    offsets = [0] * len(lives)
    placed: list[tuple[int, int, int, int]] = []  # begin, end, first step, last step, by begin
    for index in sorted(range(len(lives)), key=lambda i: (-lives[i][2], lives[i][0])):
        first, last, nbytes = lives[index]
        size = -(-nbytes // ALIGNMENT) * ALIGNMENT
        at = 0
        for begin, end, other_first, other_last in placed:
            if other_first <= last and first <= other_last:
                if at + size <= begin:
                    break
                at = max(at, end)
        offsets[index] = at
        placed.append((at, at + size, first, last))
        placed.sort()
    return offsets, max((end for _, end, _, _ in placed), default=0)


def fixed_memory(nbytes: int, device: torch.device | None) -> Tensor:
    """Returns bytes whose storage never grows: PyTorch refuses operators that would resize a tensor past their end."""
    return from_dlpack(to_dlpack(torch.empty(nbytes, dtype=torch.uint8, device=device)))


def peak(lives: Sequence[tuple[int, int, int]]) -> int:
    """Returns the most bytes that live at one step: no arrangement needs less."""
    changes: dict[int, int] = {}
    for first, last, nbytes in lives:
        changes[first] = changes.get(first, 0) + nbytes
        changes[last + 1] = changes.get(last + 1, 0) - nbytes
    most = now = 0
    for step in sorted(changes):
        now += changes[step]
        most = max(most, now)
    return most
