"""Convolutions run on shards of the batch, and without groups on shards of the outputs and of the input's channels
(which makes partial sums). Their derivatives run on shards of the batch."""

from __future__ import annotations

from ._rule import Partial, Replicate, Shard, rule


@rule("conv2d")
def conv2d(call):
    yield Shard(0), {"x": Shard(0), "residual": Shard(0)}
    if call.groups > 1:
        return
    yield Shard(1), {"weight": Shard(0), "scale": Shard(0), "bias": Shard(0), "residual": Shard(1)}
    if call.activation == "none":
        yield Partial(), {"x": Shard(1), "weight": Shard(1), "bias": Partial(), "residual": Partial()}


@rule("conv2d_backward")
def conv2d_backward(call):
    yield (Shard(0), Partial() if call.by_weight else Replicate()), {"grad": Shard(0), "x": Shard(0)}
