"""Sampling runs on shards of rows, each with its random number."""

from __future__ import annotations

from ._rule import Shard, rule


@rule("sample")
def sample(call):
    own = {"options": Shard(0)} if call.options is not None else {}
    yield Shard(0), {"x": Shard(0), "uniform": Shard(0), **own}


@rule("renorm_rows")
def renorm_rows(call):
    yield Shard(0), {"x": Shard(0), "limits": Shard(0)}


@rule("topk")
def topk(call):
    yield (Shard(0), Shard(0)), {"x": Shard(0)}
