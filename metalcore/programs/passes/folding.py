"""Computes once what depends on parameters and constants alone, such as weights in the order in which kernels read them
fastest."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Interpreter, Node

from ...conv._conv2d import weight_order
from ..ir import ancestors, argument, is_pure, mutated_storages, nodes_named, returned_storages, storage_of, value
from ..rewriting import Emitter

__all__ = ["Recipe", "constants_of", "fold_constants", "pack_weights"]

MOST = 2  # a result may have so many times the memory of what it is made of


class Recipe(NamedTuple):
    """How constants of a program are made of parameters.

    Attributes:
        graph: a graph without inputs, which returns the constants. Its get_attr nodes are the parameters.
        owner: what has these.
        names: the constants' names in the program.
    """

    graph: Graph
    owner: torch.nn.Module
    names: tuple[str, ...]

    def run(self) -> list[Tensor]:
        """Returns the constants, in memory of their own."""
        with torch.no_grad():
            constants = list(Interpreter(self.owner, graph=self.graph).run())
            for index, tensor in enumerate(constants):
                constants[index] = tensor.detach().clone()
        return constants


def constants_of(graph: Graph, most_bytes: int = 1 << 26) -> dict[Node, None]:
    """Returns parameters that the program does not write to and operations on them alone, unless their results are much
    larger, or are the program's results: each call returns new ones. They have the order of the graph."""
    mutated = mutated_storages(graph)
    parameters = {storage_of(value(node)) for node in graph.nodes if node.op == "get_attr"}
    made_anew = mutated | (returned_storages(graph) - parameters)
    constants: dict[Node, None] = {}
    for node in graph.nodes:
        is_parameter = node.op == "get_attr" and storage_of(value(node)) not in mutated
        if is_parameter or node.op == "call_function" and _foldable(node, constants, made_anew, most_bytes):
            constants[node] = None
    return constants


def fold_constants(module: GraphModule, most_bytes: int = 1 << 26) -> Recipe | None:
    """Replaces operations on parameters and constants by their results (see `constants_of`). Returns how the results
    were made, or None if there are none."""
    graph = module.graph
    constants = constants_of(graph, most_bytes)
    results = [
        node
        for node in constants
        if node.op == "call_function"
        and isinstance(value(node), Tensor)
        and any(user not in constants for user in node.users)
    ]
    if not results:
        return None
    recipe = Recipe(*_extracted(module, results), ())
    emit = Emitter(module, value(results[0]).fake_mode)
    names = []
    for node, tensor in zip(results, recipe.run()):
        with graph.inserting_before(node):
            parameter = emit.parameter(node.meta.get("constant", f"folded_{node.name}"), tensor)
        node.replace_all_uses_with(parameter)
        names.append(str(parameter.target))
    for node in reversed(list(graph.nodes)):
        if node in constants and not node.users:
            graph.erase_node(node)
    return recipe._replace(names=tuple(names))


def _foldable(node, constants, made_anew, most_bytes):
    if not is_pure(node) or not all(source in constants for source in node.all_input_nodes):
        return False
    result = value(node)
    if not isinstance(result, Tensor):  # several results, or one of them
        return all(isinstance(t, Tensor) for t in result) if isinstance(result, (tuple, list)) else False
    if storage_of(result) in made_anew:
        return False
    if "constant" in node.meta:
        return True
    size = result.numel() * result.element_size()
    inputs = sum(t.numel() * t.element_size() for n in node.all_input_nodes if isinstance(t := value(n), Tensor))
    return size <= max(MOST * inputs, 1 << 16) and size <= most_bytes


def _extracted(module, results):
    """Returns a graph of its own for what is kept, with all that it needs."""
    graph, owner = Graph(), torch.nn.Module()
    copies: dict[Node, Node] = {}
    for node in ancestors(results):
        copies[node] = graph.node_copy(node, lambda n: copies[n])
        if node.op == "get_attr":
            setattr(owner, str(node.target), getattr(module, str(node.target)))
    graph.output(tuple(copies[node] for node in results))
    return graph, owner


def pack_weights(module: GraphModule) -> int:
    """Puts other strides behind the weights of metalcore.conv2d that are constants. What does so depends on parameters
    alone, so that `fold_constants` does it once. Returns how many weights these are."""
    convolutions = list(nodes_named(module.graph, "metalcore.conv2d"))
    count, constants = 0, constants_of(module.graph) if convolutions else {}
    for node in convolutions:
        x, weight = argument(node, "x"), argument(node, "weight")
        if weight not in constants:
            continue
        options = [argument(node, name) for name in ("stride", "padding", "dilation", "groups", "channels_last")]
        order = weight_order(value(x), value(weight), *options)
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
