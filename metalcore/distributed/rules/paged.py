"""Paged attention runs on shards of heads. Tokens and pages belong together through lists of indices, which stay
whole."""

from __future__ import annotations

from ._rule import Shard, rule


def _heads(call):
    return Shard(1 if call.heads_first else 2)


@rule("paged_append")
def paged_append(call):
    yield (), {"key": Shard(1), "value": Shard(1), "k": _heads(call), "v": _heads(call)}


@rule("paged_attention")
def paged_attention(call):
    inputs = {"q": Shard(1), "k": _heads(call), "v": _heads(call)}
    yield Shard(1), inputs | ({"sinks": Shard(0)} if call.sinks is not None else {})


@rule("merge_states")
def merge_states(call):
    # (tokens, states, heads, size) and (tokens, states, heads) without states
    yield Shard(0), {"v": Shard(0), "s": Shard(0)}
    yield Shard(1), {"v": Shard(2), "s": Shard(2)}
