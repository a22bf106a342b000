"""flex_attention of DTensors: each rank computes the batch items and heads of its shards.

The functions see the numbers of the whole tensors, so that a rank adds those of its first batch item and head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, BlockMask

__all__ = ["of_shards"]

_BATCH, _HEADS = 0, 1


def of_shards(function: Callable, query: Any, key: Any, value: Any, options: dict[str, Any]) -> Any:
    """Returns the results of a function as DTensors, placed as the query is.

    Args:
        function: (query, key, value, **options) -> a tensor, or a tensor and what comes with it.

    Raises:
        TypeError: not all of the three tensors are DTensors of one mesh.
    """
    from torch.distributed.tensor import DTensor, Replicate
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    tensors = {"query": query, "key": key, "value": value}
    for name, tensor in tensors.items():
        if not isinstance(tensor, DTensor) or tensor.device_mesh != query.device_mesh:
            raise TypeError(f"metalcore.flex_attention: {name} must be a DTensor on the mesh of the others")
    mesh = query.device_mesh
    placements = [
        placement if _is_taken(placement, mesh.size(i), query, key) else Replicate()
        for i, placement in enumerate(query.placements)
    ]
    shape, first = compute_local_shape_and_global_offset(query.shape, mesh, placements)
    local = (
        query.redistribute(mesh, placements).to_local(),
        _of_keys(key, mesh, placements, query),
        _of_keys(value, mesh, placements, query),
    )
    options = dict(options)
    if options["score_mod"] is not None:
        options["score_mod"] = _of_scores(options["score_mod"], *first[:2])
    if options["block_mask"] is not None:
        options["block_mask"] = _part_of_mask(options["block_mask"], first, shape)
    results = function(*local, **options)

    def whole(part):
        if part is None:
            return None
        size = torch.Size((*query.shape[:3], *part.shape[3:]))
        strides = torch.empty(size, device="meta").stride()
        return DTensor.from_local(part, mesh, placements, run_check=False, shape=size, stride=strides)

    if isinstance(results, Tensor):
        return whole(results)
    out, more = results
    if isinstance(more, AuxOutput):
        return whole(out), AuxOutput(lse=whole(more.lse), max_scores=whole(more.max_scores))
    return whole(out), whole(more)


def _is_taken(placement, ranks: int, query, key) -> bool:
    """Returns whether ranks have the shards of a placement for themselves. Heads of keys stay with those of their
    queries."""
    if placement.is_shard(_HEADS):
        return query.shape[_HEADS] % ranks == 0 and key.shape[_HEADS] % ranks == 0
    return placement.is_shard(_BATCH)


def _of_keys(tensor, mesh, placements, query) -> Tensor:
    """Returns a rank's part of keys or values. All ranks add to the gradient of a batch item that they share."""
    from torch.distributed.tensor import Partial, Replicate

    is_shared = tensor.shape[_BATCH] != query.shape[_BATCH]
    shares = [is_shared and placement.is_shard(_BATCH) for placement in placements]
    placed = [Replicate() if share else placement for share, placement in zip(shares, placements)]
    gradients = [Partial() if share else placement for share, placement in zip(shares, placements)]
    return tensor.redistribute(mesh, placed).to_local(grad_placements=gradients)


def _of_scores(score_mod: Callable, batch: int, head: int) -> Callable:
    return lambda score, b, h, q, k: score_mod(score, b + batch, h + head, q, k)


def _of_places(mask_mod: Callable, batch: int, head: int) -> Callable:
    return lambda b, h, q, k: mask_mod(b + batch, h + head, q, k)


def _part_of_mask(mask: BlockMask, first, shape) -> BlockMask:
    """Returns the mask of some batch items and heads."""
    index = tuple(slice(first[d], first[d] + shape[d]) if mask.shape[d] > 1 else slice(None) for d in (_BATCH, _HEADS))
    part = mask[index]
    part.mask_mod = _of_places(mask.mask_mod, *first[:2])
    return part
