"""Pads the channels of products with zeros, where a target asks for it.

Weights are padded when the program is compiled. Activations keep their padding from one product to the next, through
operations on each channel alone; what the padding has there is multiplied by zeros. Elsewhere it is cut off.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.fx import GraphModule, Node

from ..ir import argument, arguments, mutated_storages, name_of, storage_of, value
from ..rewriting import Emitter
from .target import Target

__all__ = ["pad_channels"]

# Operations on each channel alone, which make finite numbers of zeros and of what they make of these.
_ALONE = frozenset(
    "relu relu6 hardtanh hardswish hardsigmoid silu gelu sigmoid tanh leaky_relu elu mish add sub mul".split()
)
_POOLS = frozenset("max_pool2d avg_pool2d adaptive_avg_pool2d".split())


class _Padded(NamedTuple):
    node: Node  # the value with its padding
    dim: int  # its channels


def pad_channels(module: GraphModule, target: Target) -> int:
    """Pads convolutions and linear layers with weights that are parameters. Returns how many."""
    graph = module.graph
    first = next((value(node) for node in graph.nodes if hasattr(value(node), "fake_mode")), None)
    if target.channel_bytes <= 1 or first is None:
        return 0
    mutated = mutated_storages(graph)
    emit = Emitter(module, first.fake_mode)
    padded: dict[Node, _Padded] = {}  # by the value without padding
    count = 0
    for node in list(graph.nodes):
        name = name_of(node)
        if name is None or storage_of(first) is None or _is_written(node, mutated):
            continue
        with graph.inserting_before(node):
            if name in ("conv1d", "conv2d", "conv3d"):
                padded_value = _convolution(node, padded, emit, target)
            elif name == "linear":
                padded_value = _linear(node, padded, emit, target)
            else:
                padded_value = _alone(node, name, padded, emit)
                count -= padded_value is not None
            if padded_value is None:
                continue
            count += 1
            plain = _cut(padded_value, value(node).shape[padded_value.dim], emit)
        node.replace_all_uses_with(plain)
        if plain is not padded_value.node:
            padded[plain] = padded_value
        graph.erase_node(node)
    return count


def _is_written(node, mutated):
    tensor = value(node)
    return not isinstance(tensor, torch.Tensor) or storage_of(tensor) in mutated


def _more(size, multiple):
    """Returns how many zeros make a size a multiple."""
    return -size % multiple


def _with_zeros(tensor, dim, count):
    return torch.constant_pad_nd(tensor, [0, 0] * (tensor.dim() - 1 - dim) + [0, count]) if count else tensor


def _activation(node, dim, count, padded, emit):
    """Returns the value with so many zeros, or with the padding that it has from before."""
    if not count:
        return node
    padded_value = padded.get(node)
    if (
        padded_value is not None
        and padded_value.dim == dim
        and value(padded_value.node).shape[dim] == value(node).shape[dim] + count
    ):
        return padded_value.node
    pads = [0, 0] * (value(node).dim() - 1 - dim) + [0, count]
    return emit(torch.ops.aten.constant_pad_nd.default, node, pads)


def _parameter(node, counts, emit):
    """Returns a parameter with zeros at the ends of its first dimensions."""
    if node is None or not any(counts):
        return node

    def fill(tensor):
        for dim, count in enumerate(counts):
            tensor = _with_zeros(tensor, dim, count)
        return tensor

    return emit.constant(f"{node.meta.get('constant', node.target)}_padded", fill, node)


def _is_parameter(node):
    return node is None or node.op == "get_attr" or "constant" in node.meta


def _convolution(node, padded, emit, target):
    x, weight, bias = (argument(node, name) for name in ("input", "weight", "bias"))
    groups, outputs, inputs = argument(node, "groups"), *value(weight).shape[:2]
    if not (_is_parameter(weight) and _is_parameter(bias)) or value(x).dim() != value(weight).dim():
        return None
    multiple = target.channels(value(x).dtype)
    more_out = _more(outputs, multiple)
    if groups == 1:
        more_in = _more(inputs, multiple)
        weights = more_out, more_in
    elif groups == outputs and inputs == 1 and value(x).shape[1] == groups:
        more_in, groups, weights = more_out, groups + more_out, (more_out,)
    else:
        return None
    if not more_in and not more_out:
        return None
    rest = (argument(node, name) for name in ("stride", "padding", "dilation"))
    padded_value = emit(
        node.target,
        _activation(x, 1, more_in, padded, emit),
        _parameter(weight, weights, emit),
        _parameter(bias, (more_out,), emit),
        *rest,
        groups,
    )
    return _Padded(padded_value, 1)


def _linear(node, padded, emit, target):
    x, weight, bias = (argument(node, name) for name in ("input", "weight", "bias"))
    if not (_is_parameter(weight) and _is_parameter(bias)) or value(weight).dim() != 2:
        return None
    multiple = target.channels(value(x).dtype)
    more_out, more_in = (_more(size, multiple) for size in value(weight).shape)
    if not more_in and not more_out:
        return None
    dim = value(x).dim() - 1
    padded_value = emit(
        node.target,
        _activation(x, dim, more_in, padded, emit),
        _parameter(weight, (more_out, more_in), emit),
        _parameter(bias, (more_out,), emit),
    )
    return _Padded(padded_value, dim)


def _alone(node, name, padded, emit):
    """Returns the operation on padded values, if all of its values are, and it takes each channel alone."""
    sources = node.all_input_nodes
    if name not in _ALONE and name not in _POOLS or not sources or any(source not in padded for source in sources):
        return None
    padded_value = [padded[source] for source in sources]
    dims = {(entry.dim, value(entry.node).dim(), value(entry.node).shape[entry.dim]) for entry in padded_value}
    if len(dims) > 1 or value(node).dim() != value(sources[0]).dim() or name in _POOLS and padded_value[0].dim != 1:
        return None
    if value(node).shape[padded_value[0].dim] != value(sources[0]).shape[padded_value[0].dim]:
        return None
    if name in _POOLS and value(node).dim() != 4:
        return None
    by_source = dict(zip(sources, padded_value))
    args = [by_source[thing].node if isinstance(thing, Node) else thing for thing in arguments(node)]
    specs = node.target._schema.arguments
    named = {spec.name: thing for spec, thing in zip(specs, args) if spec.kwarg_only}
    plain = [thing for spec, thing in zip(specs, args) if not spec.kwarg_only]
    return _Padded(emit(node.target, *plain, **named), padded_value[0].dim)


def _cut(padded_value, count, emit):
    """Returns the value without its padding."""
    if value(padded_value.node).shape[padded_value.dim] == count:
        return padded_value.node
    return emit(torch.ops.aten.slice.Tensor, padded_value.node, padded_value.dim, 0, count)
