"""Pairs stay together: their dimension is never sharded."""

from __future__ import annotations

from ._rule import Shard, others, rule


@rule("double_function")
def double_function(call):
    for dim in others(call.x, -1):
        yield Shard(dim), {"x": Shard(dim)} if call.y is None else {"x": Shard(dim), "y": Shard(dim)}


@rule("double_sum")
def double_sum(call):
    for dim in others(call.x, -1, -2):
        yield Shard(dim), {"x": Shard(dim)} if call.y is None else {"x": Shard(dim), "y": Shard(dim)}


@rule("double_matmul")
def double_matmul(call):
    yield Shard(0), {"a": Shard(0), "b": Shard(0)}
    yield Shard(1), {"a": Shard(1)}
    yield Shard(2), {"b": Shard(2)}
