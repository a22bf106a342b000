"""Attention runs on shards of the batch and of heads."""

from __future__ import annotations

from ._rule import Replicate, Shard, rule

_BATCH, _HEADS = 0, 1


def _dims(call):
    """Returns the dimensions that can be sharded. Sequences of variable length follow each other in a batch of one.
    With dropout the random numbers depend on the places of batch and head."""
    if call.seed is not None:
        return []
    return [_HEADS] if call.cu_seq_q is not None else [_BATCH, _HEADS]


def _inputs(call, dim, *names):
    placed = {name: Shard(dim) for name in names if getattr(call, name) is not None}
    if call.mask is not None and call.mask.shape[dim] > 1:
        placed["mask"] = Shard(dim)
    if call.sinks is not None and dim == _HEADS:
        placed["sinks"] = Shard(0)
    return placed


@rule("attention")
def attention(call):
    rests = call.differentiable and call.q.tensor_meta.dtype.itemsize == 2
    for dim in _dims(call):
        sums = Shard(dim + 1) if call.differentiable else Replicate()
        yield (Shard(dim), Shard(dim), sums, Shard(dim) if rests else Replicate()), _inputs(call, dim, "q", "k", "v")


@rule("plain_attention")
def plain_attention(call):
    for dim in (_BATCH, _HEADS):
        yield Shard(dim), dict.fromkeys("qkv", Shard(dim))


@rule("attention_backward")
def attention_backward(call):
    rests = call.q.tensor_meta.dtype.itemsize == 2
    for dim in _dims(call):
        inputs = _inputs(call, dim, "grad", "grad_lse", "q", "k", "v", "out")
        inputs["sums"] = Shard(dim + 1)
        if rests:
            inputs["rests"] = Shard(dim)
        yield Shard(dim), inputs
