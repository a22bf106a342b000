"""Ops along time run on shards of channels or heads, and of the batch where cu_seqlens does not divide one entry."""

from __future__ import annotations

from ._rule import Partial, Replicate, Shard, rule


def _inputs(call, **dims):
    return {name: Shard(dim) for name, dim in dims.items() if getattr(call, name) is not None}


@rule("causal_conv1d")
def causal_conv1d(call):
    yield Shard(1), _inputs(call, x=1, weight=0, bias=0, initial_state=1)
    if call.cu_seqlens is None:
        yield Shard(0), _inputs(call, x=0, seq_idx=0, initial_state=0)


@rule("causal_conv1d_backward")
def causal_conv1d_backward(call):
    def results(dim, of_weight, of_bias):
        # What does not exist or is not wanted is an empty tensor.
        wanted = (
            call.parameters_wanted,
            call.parameters_wanted and call.bias is not None,
            call.initial_state is not None,
        )
        places = of_weight, of_bias, Shard(dim)
        return Shard(dim), *(place if exists else Replicate() for place, exists in zip(places, wanted))

    yield results(1, Shard(0), Shard(0)), _inputs(call, grad=1, x=1, weight=0, bias=0, initial_state=1)
    if call.cu_seqlens is None:
        yield results(0, Partial(), Partial()), _inputs(call, grad=0, x=0, seq_idx=0, initial_state=0)


@rule("causal_conv1d_update")
def causal_conv1d_update(call):
    yield Shard(1), _inputs(call, x=1, conv_state=1, weight=0, bias=0)
    if call.conv_state_indices is None:
        yield Shard(0), _inputs(call, x=0, conv_state=0, cache_seqlens=0)


def _delta_rule(call, state, grads):
    """Yields the placements of the inputs, and the dimensions that they have in tensors and in states: heads, and the
    batch where cu_seqlens does not divide one entry."""
    names = ("grad", "q", "k", "v", "g", "beta") if grads else ("q", "k", "v", "g", "beta")
    # Each shard has all of the value heads of its heads.
    if call.q.shape[2] == call.v.shape[2] or not any(call.q.shape[2] % size for size in call.q.mesh.shape):
        yield 2, 1, _inputs(call, **dict.fromkeys(names, 2), **dict.fromkeys(state, 1))
    if call.cu_seqlens is None:
        yield 0, 0, _inputs(call, **dict.fromkeys(names, 0), **dict.fromkeys(state, 0))


@rule("gated_delta_rule")
def gated_delta_rule(call):
    for dim, of_state, inputs in _delta_rule(call, ("initial_state",), grads=False):
        yield (Shard(dim), Shard(of_state)), inputs


@rule("gated_delta_rule_backward")
def gated_delta_rule_backward(call):
    for dim, of_state, inputs in _delta_rule(call, ("initial_state", "grad_state"), grads=True):
        # What is not given has an empty gradient.
        given = ((call.g, dim), (call.beta, dim), (call.initial_state, of_state))
        rest = (Replicate() if x is None else Shard(of_x) for x, of_x in given)
        yield (Shard(dim), Shard(dim), Shard(dim), *rest), inputs
