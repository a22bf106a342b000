"""Computes once what depends on parameters and constants alone."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.node import map_arg

from ..ir import is_pure, mutated_storages, storage_of, value
from ..rewriting import Emitter

__all__ = ["fold_constants"]

MOST = 2  # a result may have so many times the memory of what it is made of


def fold_constants(module: GraphModule, most_bytes: int = 1 << 26) -> int:
    """Replaces operations on parameters and constants by their results, unless these are much larger, or the program
    writes to one of them. Returns how many operations are left out."""
    graph = module.graph
    mutated = mutated_storages(graph)
    known: dict = {}
    for node in graph.nodes:
        if node.op == "get_attr" and storage_of(value(node)) not in mutated:
            known[node] = getattr(module, str(node.target))
        elif node.op == "call_function" and _foldable(node, known, mutated, most_bytes):
            args, kwargs = map_arg((node.args, node.kwargs), lambda n: known[n])
            with torch.no_grad():
                known[node] = node.target(*args, **kwargs)
    count = 0
    for node in list(graph.nodes):
        if node.op == "call_function" and node in known:
            if isinstance(known[node], Tensor) and any(user not in known for user in node.users):
                _put(module, node, known[node])
            count += 1
    for node in reversed(list(graph.nodes)):
        if node in known and not node.users:
            graph.erase_node(node)
    return count


def _foldable(node, known, mutated, most_bytes):
    if not is_pure(node) or not all(source in known for source in node.all_input_nodes):
        return False
    result = value(node)
    if not isinstance(result, Tensor):  # several results, or one of them
        return all(isinstance(t, Tensor) for t in result) if isinstance(result, (tuple, list)) else False
    if storage_of(result) in mutated:
        return False
    size = result.numel() * result.element_size()
    inputs = sum(t.numel() * t.element_size() for n in node.all_input_nodes if isinstance(t := value(n), Tensor))
    return size <= max(MOST * inputs, 1 << 16) and size <= most_bytes


def _put(module, node, tensor):
    fake = value(node)
    emit = Emitter(module, fake.fake_mode)
    with module.graph.inserting_before(node):
        made = emit.parameter(f"folded_{node.name}", tensor.detach().clone())
    node.replace_all_uses_with(made)
