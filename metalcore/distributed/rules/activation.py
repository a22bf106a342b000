"""Elementwise operators run on any shards; softmaxes on any except along their rows."""

from __future__ import annotations

from ._rule import Partial, Shard, others, rule


@rule("relu", "silu", "gelu", "relu2", "quick_gelu")
def elementwise(call):
    for dim in others(call.x):
        yield Shard(dim), {"x": Shard(dim)}


@rule("relu_backward", "silu_backward", "gelu_backward", "relu2_backward", "quick_gelu_backward")
def elementwise_backward(call):
    for dim in others(call.x):
        yield Shard(dim), {"grad": Shard(dim), "x": Shard(dim)}
    yield Partial(), {"grad": Partial()}  # it is linear in grad


@rule("gated")
def gated(call):
    for dim in others(call.gate):
        yield Shard(dim), {"gate": Shard(dim), "up": Shard(dim)}


@rule("gated_backward")
def gated_backward(call):
    for dim in others(call.gate):
        yield Shard(dim), {"grad": Shard(dim), "gate": Shard(dim), "up": Shard(dim)}
    yield Partial(), {"grad": Partial()}


# The last dimension has both halves, which belong together.
@rule("gated_packed")
def gated_packed(call):
    for dim in others(call.x, -1):
        yield Shard(dim), {"x": Shard(dim)}


@rule("gated_packed_backward")
def gated_packed_backward(call):
    for dim in others(call.x, -1):
        yield Shard(dim), {"grad": Shard(dim), "x": Shard(dim)}
    yield Partial(), {"grad": Partial()}


@rule("bias_activation")
def bias_activation(call):
    for dim in others(call.x, -1):
        yield Shard(dim), {"x": Shard(dim)}
    yield Shard(call.x.ndim - 1), {"x": Shard(call.x.ndim - 1), "bias": Shard(0)}


@rule("bias_activation_backward")
def bias_activation_backward(call):
    for dim in others(call.x, -1):
        yield (Shard(dim), Partial()), {"grad": Shard(dim), "x": Shard(dim)}
    last = Shard(call.x.ndim - 1)
    yield (last, Shard(0)), {"grad": last, "x": last, "bias": Shard(0)}
    yield (Partial(), Partial()), {"grad": Partial()}


@rule("softmax", "log_softmax", "softmax_scaled")
def softmax(call):
    for dim in others(call.x, call.dim):
        yield Shard(dim), {"x": Shard(dim)}


@rule("softmax_backward", "log_softmax_backward")
def softmax_backward(call):
    for dim in others(call.output, call.dim):
        yield Shard(dim), {"grad": Shard(dim), "output": Shard(dim)}
    yield Partial(), {"grad": Partial()}
