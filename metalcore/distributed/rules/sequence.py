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
    """Yields the placements of the inputs, the dimensions that they have in tensors and in states, and the placement of
    the gradients of q and k: by heads, and by batch where cu_seqlens does not divide one entry."""
    names = ("grad", "v", "g", "beta") if grads else ("v", "g", "beta")
    by_heads = dict.fromkeys(names, 2) | dict.fromkeys(state, 1) | {"skip": 0}
    # Each shard has all of the value heads of its heads, or all shards have the only head of q and k.
    if call.q.shape[2] == call.v.shape[2] or not any(call.q.shape[2] % size for size in call.q.mesh.shape):
        yield 2, 1, Shard(2), _inputs(call, **by_heads, q=2, k=2)
    elif call.q.shape[2] == 1:
        yield 2, 1, Partial(), _inputs(call, **by_heads)
    if call.cu_seqlens is None:
        yield 0, 0, Shard(0), _inputs(call, **dict.fromkeys((*names, *state, "q", "k"), 0))


@rule("gated_delta_rule")
def gated_delta_rule(call):
    for dim, of_state, _, inputs in _delta_rule(call, ("initial_state",), grads=False):
        yield (Shard(dim), Shard(of_state)), inputs


@rule("gated_delta_rule_backward")
def gated_delta_rule_backward(call):
    for dim, of_state, of_keys, inputs in _delta_rule(call, ("initial_state", "grad_state"), grads=True):
        # What is not given has an empty gradient.
        given = ((call.g, dim), (call.beta, dim), (call.initial_state, of_state))
        rest = (Replicate() if x is None else Shard(of_x) for x, of_x in given)
        of_skip = Replicate() if call.skip is None else Shard(0) if dim else Partial()
        yield (of_keys, of_keys, Shard(dim), *rest, of_skip), inputs


def _scan(call, grads):
    """Yields the placements of the inputs; those of tensors with positions, of A, D and dt_bias, of B and C, and of
    states; by heads, of which each shard has all of its groups', and by batch."""
    by_position = ("grad", "x", "dt", "z") if grads else ("x", "dt", "z")
    states = ("grad_state", "initial_states") if grads else ("initial_states",)
    groups = call.B.shape[2]
    if not any(groups % size for size in call.x.mesh.shape):
        places = dict.fromkeys((*by_position, "B", "C"), 2) | dict.fromkeys(("A", "D", "dt_bias"), 0)
        yield 2, Shard(0), Shard(2), 1, _inputs(call, **places, **dict.fromkeys(states, 1))
    elif groups == 1:
        places = dict.fromkeys(by_position, 2) | dict.fromkeys(("A", "D", "dt_bias"), 0) | dict.fromkeys(states, 1)
        yield 2, Shard(0), Partial(), 1, _inputs(call, **places)
    places = dict.fromkeys((*by_position, "B", "C", *states, "seq_idx"), 0)
    yield 0, Partial(), Shard(0), 0, _inputs(call, **places)


@rule("selective_scan")
def selective_scan(call):
    for dim, _, _, of_state, inputs in _scan(call, grads=False):
        yield (Shard(dim), Shard(of_state)), inputs


@rule("selective_scan_backward")
def selective_scan_backward(call):
    for dim, of_parameters, of_rows, of_state, inputs in _scan(call, grads=True):
        given = {"D": of_parameters, "z": Shard(dim), "dt_bias": of_parameters, "initial_states": Shard(of_state)}
        # What is not given has an empty gradient.
        rest = (Replicate() if getattr(call, name) is None else place for name, place in given.items())
        yield (Shard(dim), Shard(dim), of_parameters, of_rows, of_rows, *rest), inputs


@rule("selective_state_update")
def selective_state_update(call):
    if not any(call.B.shape[1] % size for size in call.x.mesh.shape):
        by_heads = dict.fromkeys(("state", "x", "dt", "B", "C", "z"), 1) | dict.fromkeys(("A", "D", "dt_bias"), 0)
        yield Shard(1), _inputs(call, **by_heads)
    elif call.B.shape[1] == 1:
        by_heads = dict.fromkeys(("state", "x", "dt", "z"), 1) | dict.fromkeys(("A", "D", "dt_bias"), 0)
        yield Shard(1), _inputs(call, **by_heads)
    if call.state_batch_indices is None:
        yield Shard(0), _inputs(call, **dict.fromkeys(("state", "x", "dt", "B", "C", "z"), 0))
