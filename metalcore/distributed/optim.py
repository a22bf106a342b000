"""What optimizers do with gradients and matrices whose shards lie on several ranks: norms, and work on whole matrices,
of which each rank does some."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._ops._math_ops import _NormPartial
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

__all__ = ["Owned", "of_shards", "of_whole", "whole_norm"]


def of_shards(norm_type: float) -> Partial:
    """Returns the placement of the norms of shards: which reduction makes of them the norm of what they are shards
    of."""
    return Partial("max") if math.isinf(norm_type) else _NormPartial(norm_type)


def whole_norm(norm: Callable[[list[Tensor]], Tensor], grads: Sequence[DTensor], norm_type: float) -> Tensor:
    """Returns the norm of gradients that are placed alike, none of them partial, from that of each rank's shards."""
    mesh, placements = grads[0].device_mesh, grads[0].placements
    placed = [Replicate() if p.is_replicate() else of_shards(norm_type) for p in placements]
    return DTensor.from_local(norm([grad.to_local() for grad in grads]), mesh, placed, run_check=False).full_tensor()


def of_whole(function: Callable[[Tensor], Tensor], batch) -> Tensor:
    """Returns function(batch) for a batch (count, m, n), a DTensor whose matrices are sharded or replicated, where the
    function treats each matrix by itself.

    Ranks exchange the shards such that each has some whole matrices, and exchange the results in the same way.
    """
    mesh, placements = batch.device_mesh, batch.placements
    owned = [Shard(0)] * mesh.ndim
    mine = batch.redistribute(mesh, owned).to_local()
    result = function(mine) if len(mine) else mine
    gathered = DTensor.from_local(result, mesh, owned, run_check=False, shape=batch.shape, stride=batch.stride())
    return gathered.redistribute(mesh, placements)


class Owned:
    """A batch (count, m, n) of a parameter's blocks, of which each rank of a mesh has some: DTensors with Shard(0)."""

    def __init__(self, mesh, count: int):
        self._mesh, self._count = mesh, count
        # How many blocks this rank has.
        self.here = compute_local_shape_and_global_offset((count,), mesh, self._placements)[0][0]

    def part(self, batch: Tensor) -> Tensor:
        """Returns the blocks of this rank, of a batch that every rank has."""
        replicated = DTensor.from_local(batch, self._mesh, [Replicate()] * self._mesh.ndim, run_check=False)
        return replicated.redistribute(self._mesh, self._placements).to_local()

    def state(self, part: Tensor) -> Tensor:
        """Returns a DTensor of the batch, in the memory of this rank's part."""
        shape = torch.Size((self._count, *part.shape[1:]))
        stride = (part.shape[1:].numel(), *part.stride()[1:])
        return DTensor.from_local(part, self._mesh, self._placements, run_check=False, shape=shape, stride=stride)

    def whole(self, part: Tensor) -> Tensor:
        """Returns the batch of which this rank has a part."""
        return self.state(part).full_tensor()  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def _placements(self):
        return [Shard(0)] * self._mesh.ndim
