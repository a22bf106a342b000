"""Calls by way of the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = ["call_on_cpu"]


def call_on_cpu(function: Callable, *args: Any, **kwargs: Any) -> Any:
    """The function's results for copies of its tensors on the CPU, copied to the device of the first tensor.
    Derivatives and torch.func's transforms pass through the copies."""
    device = next(value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)).device
    args, kwargs = tree_map_only(Tensor, Tensor.cpu, (args, kwargs))
    return tree_map_only(Tensor, lambda result: result.to(device), function(*args, **kwargs))
