"""Sums and conversions run on any shards."""

from __future__ import annotations

from ._rule import Partial, Shard, others, rule


@rule("add")
def add(call):
    for dim in others(call.x):
        yield Shard(dim), {"x": Shard(dim), "y": Shard(dim)}
    yield Partial(), {"x": Partial(), "y": Partial()}


@rule("cast")
def cast(call):
    for dim in others(call.x):
        yield Shard(dim), {"x": Shard(dim)}
