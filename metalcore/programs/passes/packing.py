"""Lays weights out as the kernels read them fastest, in programs of fixed parameters."""

from __future__ import annotations

import torch
from torch.fx import GraphModule

from ...conv._packing import weight_order
from ..ir import argument, mutated_storages, nodes_named, storage_of, value
from ..rewriting import Emitter

__all__ = ["pack_weights"]


def pack_weights(module: GraphModule) -> int:
    """Puts other strides behind the weights of metalcore.conv2d that are parameters and not written to. What does so
    depends on parameters alone, so that `fold_constants` does it once. Returns how many weights these are."""
    count, mutated = 0, mutated_storages(module.graph)
    for node in nodes_named(module.graph, "metalcore.conv2d"):
        x, weight = argument(node, "x"), argument(node, "weight")
        if weight.op != "get_attr" or storage_of(value(weight)) in mutated:
            continue
        order = weight_order(value(x), value(weight), argument(node, "groups"), argument(node, "channels_last"))
        if order is None or value(weight).permute(order).is_contiguous():
            continue
        emit = Emitter(module, value(node).fake_mode)
        with module.graph.inserting_before(node):
            packed = emit(torch.ops.aten.permute.default, weight, list(order))
            packed = emit(torch.ops.aten.clone.default, packed, memory_format=torch.contiguous_format)
            packed = emit(torch.ops.aten.permute.default, packed, [order.index(d) for d in range(4)])
        node.replace_input_with(weight, packed)
        count += 1
    return count
