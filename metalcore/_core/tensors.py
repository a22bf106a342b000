"""What ops ask of tensors: shapes that broadcast, strides that share memory, integers that the host may see, results by
way of the CPU, and where a DTensor has its shards. Nothing here imports torch.distributed.tensor."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.utils._pytree import tree_leaves, tree_map_only

from .routing import explained

__all__ = [
    "beside",
    "broadcast_shapes",
    "call_on_cpu",
    "check_offsets",
    "host_sees",
    "in_int32",
    "is_dtensor",
    "is_partial",
    "like",
    "local",
    "may_share_memory",
    "whole",
]


def broadcast_shapes(first: Sequence[int], *others: Sequence[int]) -> Sequence[int]:
    """Returns what torch.broadcast_shapes does, without its 10 µs of Python where the shapes are alike or empty, as
    in most calls."""
    shapes = [shape for shape in (first, *others) if len(shape)]
    if not shapes:
        return first
    return shapes[0] if all(shape == shapes[0] for shape in shapes) else torch.broadcast_shapes(*shapes)


def may_share_memory(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Returns whether some elements of a tensor may have one place in memory, as those of an expanded tensor have."""
    end = 0
    for stride, size in sorted((stride, size) for size, stride in zip(shape, strides) if size != 1):
        if stride <= end:
            return 0 not in shape
        end += (size - 1) * stride
    return False


def host_sees(tensor: Tensor) -> bool:
    """Returns whether the host sees a tensor's numbers. A trace has none, and a recording would have that as a step
    of PyTorch's."""
    if is_compiling() or explained.observers or type(tensor) is not Tensor:
        return False
    return tensor.is_cpu or tensor.is_mps and getattr(torch._C, "_metalcore_simulates_mps", False)


def check_offsets(op: str, name: str, offsets: Tensor, most: int) -> list[int]:
    """Returns the offsets as a list. Raises ValueError unless they are 0 to `most` and do not descend."""
    numbers = offsets.tolist()
    if not numbers or numbers[0] < 0 or numbers[-1] > most or any(a > b for a, b in pairwise(numbers)):
        raise ValueError(f"{op}: {name} must be numbers of 0 to {most} that do not descend")
    return numbers


_LONGER = (torch.int64, torch.uint32, torch.uint64)


def in_int32(numbers: Tensor, device: torch.device | None = None) -> Tensor:
    """Returns the integers as int32, and its least or largest number for one beyond its range: a plain conversion
    would make 2**32 a 0, which may be legal. With a device they are there."""
    if numbers.dtype in _LONGER:
        numbers = numbers.long().clamp(-(2**31), 2**31 - 1)
    return numbers.to(device or numbers.device, torch.int32)


def check_written(op: str, name: str, tensor: Tensor) -> None:
    """Raises RuntimeError where several elements of a tensor that is to be written are one memory location."""
    if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride())):
        raise RuntimeError(
            f"{op}: {name} is to be written, but is an expanded tensor: several of its elements are one memory location"
        )


def call_on_cpu(function: Callable, *args: Any, **kwargs: Any) -> Any:
    """Returns the function's results for copies of its tensors on the CPU, copied to the device of the first tensor.
    Derivatives and torch.func's transforms pass through the copies."""
    device = next(value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)).device
    args, kwargs = tree_map_only(Tensor, Tensor.cpu, (args, kwargs))
    return tree_map_only(Tensor, lambda result: result.to(device), function(*args, **kwargs))


def is_dtensor(value: Any) -> bool:
    """Returns whether a value is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def is_partial(x: Tensor) -> bool:
    """Returns whether x is a DTensor whose sum over ranks is still to be made."""
    return is_dtensor(x) and any(placement.is_partial() for placement in x.placements)  # pyright: ignore


def beside(x: Tensor, tensor: Tensor) -> Tensor:
    """Returns a tensor that every rank has, for a computation with x: replicated over x's mesh if x is a DTensor."""
    return type(x).from_local(tensor, x.device_mesh, run_check=False) if is_dtensor(x) else tensor  # pyright: ignore


def like(x: Tensor, placed: Tensor) -> Tensor:
    """Returns the DTensor x, placed as another one; others as they are."""
    return x.redistribute(placed.device_mesh, placed.placements) if is_dtensor(x) else x  # pyright: ignore


def whole(x: Tensor) -> Tensor:
    """Returns the tensor of which a DTensor is a shard or a partial sum, which every rank gets; others as they are."""
    return x.full_tensor() if is_dtensor(x) else x  # pyright: ignore


def local(x: Tensor) -> Tensor:
    """Returns this rank's shard of a DTensor; others as they are."""
    return x.to_local() if is_dtensor(x) else x  # pyright: ignore
