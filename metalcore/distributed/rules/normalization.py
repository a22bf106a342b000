"""Norms run on shards of whole rows; the gradients of their parameters are partial sums then."""

from __future__ import annotations

from ._rule import Partial, Replicate, Shard, batches, rule


def _inputs(call, *names, dim):
    return {name: Shard(dim) for name in names if getattr(call, name) is not None}


@rule("rms_norm", "layer_norm", "plain_layer_norm")
def norm(call):
    for dim in batches(call.x, call.dims):
        yield Shard(dim), {"x": Shard(dim)}


@rule("add_rms_norm", "add_layer_norm", "plain_add_layer_norm")
def add_norm(call):
    for dim in batches(call.x, call.dims):
        yield Shard(dim), {"x": Shard(dim), "residual": Shard(dim)}


@rule("rms_norm_gated")
def gated_norm(call):
    for dim in batches(call.x, 1):
        yield Shard(dim), _inputs(call, "x", "gate", dim=dim)


def _of_parameters(wanted):
    return Partial() if wanted else Replicate()


@rule("rms_norm_backward")
def rms_norm_backward(call):
    of_weight = _of_parameters(call.weight_wanted)
    for dim in batches(call.x, call.dims):
        yield (Shard(dim), of_weight), _inputs(call, "grad", "x", "sum_grad", dim=dim)


@rule("rms_norm_gated_backward")
def gated_norm_backward(call):
    of_weight = _of_parameters(call.weight_wanted)
    for dim in batches(call.x, 1):
        yield (Shard(dim), Shard(dim), of_weight), _inputs(call, "grad", "x", "gate", dim=dim)


@rule("layer_norm_backward")
def layer_norm_backward(call):
    of_parameters = _of_parameters(call.parameters_wanted)
    for dim in batches(call.x, call.dims):
        inputs = _inputs(call, "grad", "x", "means", "scales", "sum_grad", dim=dim)
        yield (Shard(dim), of_parameters, of_parameters), inputs


# Channels are not sharded: a shard's channels would have to be whole groups, whose number is an argument.
@rule("group_norm")
def group_norm(call):
    yield Shard(0), {"x": Shard(0)}


@rule("group_norm_backward")
def group_norm_backward(call):
    of_parameters = _of_parameters(call.parameters_wanted)
    yield (Shard(0), of_parameters, of_parameters), _inputs(call, "grad", "x", "means", "scales", dim=0)
