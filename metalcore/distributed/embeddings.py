"""Embeddings whose tables are sharded by rows."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from .._core.tensors import beside, is_dtensor

__all__ = ["by_rows", "embedding"]


def by_rows(weight: Tensor) -> bool:
    """Returns whether a table is a DTensor that is sharded by rows."""
    return is_dtensor(weight) and Shard(0) in weight.placements  # pyright: ignore[reportAttributeAccessIssue]


def embedding(local: Callable, weight, indices, padding: int, *options) -> Tensor:
    """Looks up the rows that this rank has, with zeros for all others: a partial sum over the ranks.

    Args:
        local: the lookup in one rank's rows. It gives NaN for indices that are none of them, and no gradient.
        weight: as `by_rows` says. Where it is not sharded by rows it is replicated.
        indices: a DTensor, or a tensor that every rank has.
        padding: the row without gradient, or -1.
    """
    mesh = weight.device_mesh
    tables = [p if p == Shard(0) else Replicate() for p in weight.placements]
    indices = indices if is_dtensor(indices) else beside(weight, indices)
    rows = [p if isinstance(p, Shard) and t != Shard(0) else Replicate() for p, t in zip(indices.placements, tables)]  # pyright: ignore[reportAttributeAccessIssue]
    of_weight = [Partial() if isinstance(r, Shard) else t for r, t in zip(rows, tables)]
    weight = weight.redistribute(mesh, tables)
    first = compute_local_shape_and_global_offset(weight.shape, mesh, tables)[1][0]
    table = weight.to_local(grad_placements=of_weight)
    chosen = indices.redistribute(mesh, rows).to_local()  # pyright: ignore[reportAttributeAccessIssue]
    place = chosen - first
    inside = (place >= 0) & (place < len(table))
    nowhere = (chosen < 0) | (chosen >= len(weight))
    padding = padding - first if first <= padding < first + len(table) else -1
    part = local(table, place.where(inside, -1), padding, *options)
    part = torch.where((inside | nowhere)[..., None], part, 0)
    placements = [Partial() if t == Shard(0) else r for r, t in zip(rows, tables)]
    return DTensor.from_local(part, mesh, placements, run_check=False)
