"""Replaces operations that write to their arguments by ones that make new values.

What a program keeps as a whole, such as the number of tokens in a cache, is written once and at the program's end.
Until then it is a value like others, and no operation has to stay on its side of a write. What a program writes in
parts, such as a cache itself, stays as it is.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule
from torch.fx.node import map_arg
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from ..ir import mutated_storages, name_of, returned_storages, storage_of, tensors_of, value, written

__all__ = ["aliases", "functional_variant", "join_writes", "make_functional", "propagate", "write_at_end"]


def make_functional(module: GraphModule) -> None:
    """Makes x.relu_() a relu(x) if all uses of x's memory from then on go by the result."""
    changed = False
    order = {node: number for number, node in enumerate(module.graph.nodes)}
    nodes_of = aliases(module.graph)
    for node in list(module.graph.nodes):
        target = functional_variant(node)
        if target is None or not _private(node, order, nodes_of):
            continue
        node.target = target
        changed = True
    if changed:
        propagate(module)


def aliases(graph):
    """Returns the nodes that have tensors of a storage, in order, by storage."""
    nodes_of: dict = {}
    for node in graph.nodes:
        for tensor in tensors_of(node):
            nodes_of.setdefault(storage_of(tensor), []).append(node)
    return nodes_of


def functional_variant(node):
    """Returns the operator without the underscore, if the operation writes to its first argument alone and returns
    that."""
    name = name_of(node)
    if name == "copy_":  # aten.copy has no derivative
        return None
    if name is None or not name.endswith("_") or name.endswith("__") or len(written(node)) != 1:
        return None
    if written(node)[0] is not node.args[0]:
        return None
    import torch

    packet = getattr(torch.ops.aten, name[:-1], None)
    overload = node.target._overloadname
    if packet is None or overload not in packet.overloads():
        return None
    target = getattr(packet, overload)
    if _parameters(target) != _parameters(node.target):
        return None
    with value(node).fake_mode, torch.no_grad():
        result = target(*_values(node.args), **{name: _values([option])[0] for name, option in node.kwargs.items()})
    same = (
        result.shape == value(node).shape
        and result.dtype == value(node).dtype
        and result.stride() == value(node).stride()
    )
    return target if same else None


def _parameters(target):
    """Returns names and types: pow.Scalar takes a number and a tensor, pow_.Scalar a tensor and a number."""
    return [(spec.name, str(spec.type)) for spec in target._schema.arguments]


def _values(arguments):
    from torch.fx import Node
    from torch.fx.node import map_arg

    return map_arg(tuple(arguments), lambda node: value(node) if isinstance(node, Node) else node)


def _private(node, order, nodes_of):
    storage = storage_of(value(node))
    for alias in nodes_of[storage]:
        if alias.op in ("placeholder", "get_attr"):
            return False
        if order[alias] < order[node] and any(order[user] > order[node] for user in alias.users):
            return False
    return True


def propagate(module: GraphModule) -> None:
    """Computes the fake values of all operations anew: some have other strides, or other memory, than before."""
    fakes = [node.meta["val"] for node in module.graph.nodes if node.op == "placeholder"]
    with_values = [node for node in module.graph.nodes if node.op == "get_attr"]
    mode = next((v.fake_mode for v in [*fakes, *map(value, with_values)] if hasattr(v, "fake_mode")), None)
    if mode is not None:
        _Propagation(module, mode).propagate_dont_convert_inputs(*fakes)


class _Propagation(FakeTensorProp):
    def run_node(self, n):
        if n.op == "get_attr":
            return n.meta["val"]
        return super().run_node(n)


def write_at_end(module: GraphModule) -> bool:
    """Replaces operations that write all of a static value by ones that make a new value. The last one is written at
    the end. Returns whether there are any."""
    graph = module.graph
    mutated = mutated_storages(graph)
    nodes_of = aliases(graph)
    candidates = [nodes_of[storage] for storage in mutated - returned_storages(graph)]
    base_of = {node: nodes[0] for nodes in candidates if _is_written_whole(nodes, mutated) for node in nodes}
    if not base_of:
        return False
    current = {base: base for base in base_of.values()}
    copies = []
    for node in list(graph.nodes):
        node.args, node.kwargs = map_arg(
            (node.args, node.kwargs), lambda source: current[base_of[source]] if source in base_of else source
        )
        if node not in base_of or node.op == "get_attr":
            continue
        if name_of(node) == "copy_":
            current[base_of[node]] = node.args[1]
            copies.append(node)
        else:
            node.target = functional_variant(node)
            current[base_of[node]] = node
    for copy in reversed(copies):
        graph.erase_node(copy)
    end = next(node for node in graph.nodes if node.op == "output")
    for base, last in sorted(current.items()):
        with graph.inserting_before(end):
            graph.call_function(torch.ops.aten.copy_.default, (base, last))
    propagate(module)
    return True


def _is_written_whole(nodes, mutated):
    """Returns whether the nodes of a storage are a static value and then operations that write all of it."""
    base, *writes = nodes
    tensor = value(base)
    if base.op != "get_attr" or tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size():
        return False
    return all(_form(value(node)) == _form(tensor) and _writes_whole(node, mutated) for node in writes)


def _writes_whole(node, mutated):
    if node.op == "get_attr":  # the same value by another name
        return True
    if written(node) != [node.args[0]]:
        return False
    if name_of(node) != "copy_":
        return torch.Tag.pointwise in node.target.tags and functional_variant(node) is not None
    source = node.args[1]
    return _form(value(source)) == _form(value(node)) and storage_of(value(source)) not in mutated


def _form(tensor):
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device


def join_writes(module: GraphModule) -> None:
    """Makes one operation of the copies at the end of a graph, which is one kernel on some devices."""
    graph = module.graph
    end = next(node for node in graph.nodes if node.op == "output")
    copies, node = [], end._prev
    while name_of(node) == "copy_" and not node.users and _form(value(node.args[1])) == _form(value(node)):
        copies.insert(0, node)
        node = node._prev
    targets = {storage_of(value(copy)) for copy in copies}
    groups: dict = {}
    for copy in copies:
        if storage_of(value(copy.args[1])) not in targets:
            groups.setdefault((value(copy).dtype, value(copy).device), []).append(copy)
    for group in groups.values():
        if len(group) < 2:
            continue
        with graph.inserting_before(end):
            written_to, sources = (list(nodes) for nodes in zip(*(copy.args for copy in group)))
            graph.call_function(torch.ops.aten._foreach_copy_.default, (written_to, sources)).meta["val"] = None
        for copy in group:
            graph.erase_node(copy)
