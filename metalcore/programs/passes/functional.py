"""Replaces operations that write to a value by ones that make a new value, where nobody can tell."""

from __future__ import annotations

from torch.fx import GraphModule
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from ..ir import name_of, storage_of, tensors_of, value, written

__all__ = ["aliases", "functional_variant", "make_functional", "propagate"]


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
    found: dict = {}
    for node in graph.nodes:
        for tensor in tensors_of(node):
            found.setdefault(storage_of(tensor), []).append(node)
    return found


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
        made = target(*_values(node.args), **{name: _values([given])[0] for name, given in node.kwargs.items()})
    same = made.shape == value(node).shape and made.dtype == value(node).dtype and made.stride() == value(node).stride()
    return target if same else None


def _parameters(target):
    """Names and types: pow.Scalar takes a number and a tensor, pow_.Scalar a tensor and a number."""
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
