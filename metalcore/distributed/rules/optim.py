"""Steps of optimizers run on the shards of parameters, as they are placed; norms of gradients on shards of them."""

from __future__ import annotations

from torch.distributed.tensor.placement_types import _StridedShard

from ..optim import of_shards
from ._rule import Partial, Replicate, Shard, refused, rule


@rule("adamw_", "sgd_", "lion_", lists=True)
def step(call, specs):
    """Places a parameter's gradient and state as it is, and replicates counts of steps."""
    placements = [spec.placements for spec in specs["params"]]
    return None, {
        name: [
            [Replicate()] * len(each) if name == "state_steps" else each
            for each, _ in zip(placements, specs[name], strict=True)
        ]
        for name in specs
    }


@rule("grad_clip_norm_", lists=True)
def clip_norm(call, specs):
    """Accepts all placements: a factor can be applied to partial sums as well."""
    return None, {"grads": [spec.placements for spec in specs["grads"]]}


@rule("grad_clip_value_", lists=True)
def clip_value(call, specs):
    if any(isinstance(placement, Partial) for spec in specs["grads"] for placement in spec.placements):
        raise RuntimeError(f"{call.operator} cannot clip gradients whose sum over the ranks is still to be made")
    return None, {"grads": [spec.placements for spec in specs["grads"]]}


def _is_shard(placement):
    return isinstance(placement, (Shard, _StridedShard))


@rule("grad_norm", lists=True)
def grad_norm(call, specs):
    """Returns, for each dimension of the mesh, a partial norm if all gradients are sharded along it, or else
    replicated ones."""
    grads = [list(spec.placements) for spec in specs["grads"]]
    output = []
    for place in range(len(grads[0])):
        if all(_is_shard(placements[place]) for placements in grads):
            output.append(of_shards(call.norm_type))
        else:
            output.append(Replicate())
            for placements in grads:
                placements[place] = Replicate()
    return output, {"grads": grads}


refused("update_8bit_", because="blocks of its states are of consecutive elements of whole parameters")
