"""Lays weights out as the kernels read them fastest, in programs of fixed parameters."""

from __future__ import annotations

import torch
from torch.fx import GraphModule

from ...conv._packing import weight_order
from ..ir import argument, nodes_named, value
from ..rewriting import Emitter
from .folding import constants_of

__all__ = ["pack_weights"]


def pack_weights(module: GraphModule) -> int:
    """Puts other strides behind the weights of metalcore.conv2d that are constants. What does so depends on parameters
    alone, so that `fold_constants` does it once. Returns how many weights these are."""
    convolutions = list(nodes_named(module.graph, "metalcore.conv2d"))
    count, constants = 0, constants_of(module.graph) if convolutions else {}
    for node in convolutions:
        x, weight = argument(node, "x"), argument(node, "weight")
        if weight not in constants:
            continue
        order = weight_order(value(x), value(weight), argument(node, "groups"), argument(node, "channels_last"))
        if order is None or value(weight).permute(order).is_contiguous():
            continue
        emit = Emitter(module, value(node).fake_mode)
        with module.graph.inserting_before(node):
            name = weight.meta.get("constant", weight.target if weight.op == "get_attr" else weight.name)
            packed = emit.constant(f"{name}_packed", _packing(order), weight)
        node.replace_input_with(weight, packed)
        count += 1
    return count


def _packing(order):
    back = [order.index(d) for d in range(4)]
    return lambda weight: weight.permute(order).clone(memory_format=torch.contiguous_format).permute(back)
