"""Norms of gradients that are sharded."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor._ops._math_ops import _NormPartial

__all__ = ["of_shards", "whole"]


def of_shards(norm_type: float) -> Partial:
    """Returns the placement of the norms of shards: which reduction makes of them the norm of what they are shards
    of."""
    return Partial("max") if math.isinf(norm_type) else _NormPartial(norm_type)


def whole(norm: Callable[[list[Tensor]], Tensor], grads: Sequence[DTensor], norm_type: float) -> Tensor:
    """Returns the norm of gradients that are placed alike, none of them partial, from that of each rank's shards."""
    mesh, placements = grads[0].device_mesh, grads[0].placements
    placed = [Replicate() if p.is_replicate() else of_shards(norm_type) for p in placements]
    return DTensor.from_local(norm([grad.to_local() for grad in grads]), mesh, placed, run_check=False).full_tensor()
