"""Tensors beside those of torch.distributed.tensor, which this module does not import."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor

__all__ = ["beside", "is_dtensor", "is_partial", "like", "local", "whole"]


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
    """This rank's shard of a DTensor; others as they are."""
    return x.to_local() if is_dtensor(x) else x  # pyright: ignore
