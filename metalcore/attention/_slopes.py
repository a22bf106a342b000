"""ALiBi (Press et al., "Train Short, Test Long", 2022): a bias of scores that grows with the distance of the keys."""

from __future__ import annotations

import torch
from torch import Tensor

from .._core.routing import require_tensors

__all__ = ["bias_of", "check_slopes"]


def check_slopes(op: str, slopes: Tensor, batch: int, heads: int, on: Tensor) -> Tensor:
    """Returns the slopes as (batch or 1, heads), in the dtype that scores have."""
    require_tensors(op, alibi_slopes=slopes)
    if tuple(slopes.shape) not in ((heads,), (batch, heads)):
        raise ValueError(
            f"{op}: alibi_slopes must have the shape ({heads},) or ({batch}, {heads}), not {tuple(slopes.shape)}"
        )
    if not slopes.is_floating_point():
        raise ValueError(f"{op}: alibi_slopes must be floating-point numbers, not {slopes.dtype}")
    if slopes.device != on.device:
        raise RuntimeError(f"{op}: alibi_slopes must be on query's device, {on.device}, not on {slopes.device}")
    return slopes.reshape(-1, heads).to(torch.float64 if on.dtype == torch.float64 else torch.float32)


def bias_of(slopes: Tensor, shift: int | Tensor, queries: int, keys: int) -> Tensor:
    """Returns what is added to scores, as a mask with a number for each distance of a key and a query: (batch or 1,
    heads, 1, queries + keys - 1).

    Args:
        slopes: (batch or 1, heads).
        shift: query i is at the place of key i + shift; a number, or one for each batch item.
        queries, keys: the largest numbers of them.
    """
    distance = torch.arange(1 - max(queries, 1), keys, device=slopes.device)
    distance = distance - (shift.unsqueeze(-1) if isinstance(shift, Tensor) else shift)
    return -(slopes.unsqueeze(-1) * distance.abs().unsqueeze(-2)).unsqueeze(2)
