"""Operators of PyTorch that write their results into memory which the caller gives."""

from __future__ import annotations

import functools
from typing import Any

import torch

__all__ = ["out_variant"]


@functools.cache
def out_variant(func: Any) -> tuple[Any, list[str]] | None:
    """The overload that writes results into tensors, and the names of these arguments; None where there is none."""
    if func._schema.is_mutable:
        return None
    wanted = [(argument.name, str(argument.type)) for argument in func._schema.arguments]
    for name in func.overloadpacket.overloads():
        other = getattr(func.overloadpacket, name)
        outs = [argument for argument in other._schema.arguments if argument.is_out]
        rest = [(a.name, str(a.type)) for a in other._schema.arguments if not a.is_out]
        if torch.Tag.generated in other.tags:  # it computes a new tensor and copies it
            continue
        if len(outs) == len(func._schema.returns) and all(str(a.type) == "Tensor" for a in outs) and rest == wanted:
            return other, [argument.name for argument in outs]
    return None
