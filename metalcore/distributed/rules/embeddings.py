"""Embeddings: tables by columns, indices by any dimension. Tables by rows are a function of their own, because indices
outside of a shard's rows have to be masked: metalcore.embedding of a table with Shard(0)."""

from __future__ import annotations

from ._rule import Partial, Replicate, Shard, others, rule


@rule("embedding")
def embedding(call):
    yield Shard(call.indices.ndim), {"weight": Shard(1)}
    for dim in others(call.indices):
        yield Shard(dim), {"indices": Shard(dim)}
    yield Partial(), {"weight": Partial()}


@rule("embedding_backward")
def embedding_backward(call):
    yield Shard(1), {"grad": Shard(call.grad.ndim - 1)}
    if not call.scale_grad_by_freq:  # which needs the frequencies of all
        for dim in others(call.indices):
            yield Partial(), {"grad": Shard(dim), "indices": Shard(dim)}
    yield Partial(), {"grad": Partial()}


# Bags begin at any place of the indices: both stay whole.
@rule("embedding_bag")
def embedding_bag(call):
    yield (Shard(1), Replicate(), Shard(1)), {"weight": Shard(1)}  # without maxima too the last one has columns
    if call.mode != 2:
        yield (Partial(), Replicate(), Replicate()), {"weight": Partial()}


@rule("embedding_bag_backward")
def embedding_bag_backward(call):
    yield Shard(1), {"grad": Shard(1), "maxima": Shard(1)}
    if call.mode != 2:
        yield Partial(), {"grad": Partial()}


@rule("embedding_bag_samples")
def embedding_bag_samples(call):
    return iter(())


@rule("embedding_bag_factors")
def embedding_bag_factors(call):
    yield Partial(), {"grad": Shard(1), "weight": Shard(1)}
    yield Shard(0), {"indices": Shard(0), "bags": Shard(0)}
