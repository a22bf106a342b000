"""Joins operations into groups, of which each is to be a generated kernel.

What is joined: operations of one shape, of which one reads the other's result or which read the same tensor; and an
operation that reads others' elements at places of its own (a slice, a
window, a table's rows), with the operation whose result nobody else reads, unless each element would be computed more
than MOST_READS times. Views join what they are between, and stay views elsewhere. A group has two operations at least,
since PyTorch's own kernel is as good for one, except where PyTorch has none.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from ..._core.routing import DEVICES
from .. import pointwise
from ..ir import is_pure, mutated_storages, name_of, segments, storage_of, tensors_of, value
from ..pointwise import is_elementwise, repeats_of, supports
from .transfers import lacks_kernel

__all__ = ["build_kernel", "group_pointwise", "is_generated", "kernel_names", "writing_to"]

LEAST = 2  # operations
MOST_READS = 4


def is_generated(node: Node) -> bool:
    """Returns whether a generated kernel can compute an operation."""
    if name_of(node) is None or not is_pure(node) or not isinstance(value(node), Tensor):
        return False
    return bool(value(node).numel()) and supports(node) is None


def group_pointwise(module: GraphModule, build, *, single: bool = False) -> int:
    """Replaces each group by a call of `build(graph, fakes)`, a function of tensors that returns a tuple.

    No barrier lies between a group's operations. `build` returns None for a group that it does not take, which stays as
    it is. With `single` an operation alone is a group as well. Returns the number of groups.
    """
    count = 0
    for members in _find_groups(module.graph, 1 if single else LEAST):
        count += _replace(module, members, build, count)
    return count


def _find_groups(graph, least):
    """Returns lists of operations, in order. As units that run at once, they leave the graph without cycles."""
    stretch, mutated = segments(graph), mutated_storages(graph)
    unit: dict[Node, int] = {}  # the group of an operation, or one of its own
    bit = {node: 1 << number for number, node in enumerate(graph.nodes)}
    above: dict[int, int] = {}  # the nodes on which a unit depends, itself and all of its members included
    members: dict[int, list[Node]] = {}
    joinable = {node for node in graph.nodes if _may_join(node, mutated)}
    for number, node in enumerate(graph.nodes):
        unit[node], members[number] = number, [node]
        sources = node.all_input_nodes
        before = bit[node]
        for source in sources:
            before |= above[unit[source]]
        above[number] = before
        if node not in joinable:
            continue
        for source in sources:
            if source in joinable:
                _join(unit, members, above, bit, stretch, node, source)
    _join_readers(graph, unit, members, above, bit, stretch, joinable)
    groups = [_without_ends(group) for group in members.values() if joinable.issuperset(group)]
    return [sorted(group) for group in groups if _pays_alone(group, least)]


def _without_ends(group):
    """Returns a group without the views of what is outside of it, and without those that nobody in it reads."""
    inside = set(group)
    while True:
        ends = {
            node
            for node in inside
            if _is_view(node) and (inside.isdisjoint(node.all_input_nodes) or inside.isdisjoint(node.users))
        }
        if not ends:
            return inside
        inside -= ends


def _pays_alone(group, least):
    operations = [node for node in group if not _is_view(node)]
    lacking = any(value(node).device.type == "mps" and lacks_kernel(node) for node in operations)
    return len(operations) >= (1 if lacking else least)


def _may_join(node, mutated):
    if not is_generated(node) or value(node).device.type not in DEVICES:
        return False
    if _is_view(node) and 0 in value(node).stride():  # elements that share memory cannot be a kernel's result
        return False
    return storage_of(value(node)) not in mutated


def _is_view(node):
    storage = storage_of(value(node))
    return any(storage_of(t) == storage for source in node.all_input_nodes for t in tensors_of(source))


def _pays(node, source):
    """Returns whether an operation is better computed together with one of its operands."""
    alone, same = len(source.users) == 1, value(node).shape == value(source).shape
    if (_is_view(node) or _is_view(source)) and not alone:
        return False
    if (repeats := repeats_of(node, source)) < math.inf:
        return (alone or same) and repeats <= MOST_READS
    is_constant = not source.all_input_nodes
    return same or (is_constant and alone and value(source).numel() <= value(node).numel())


def _join(unit, members, above, bit, stretch, node, source):
    own, other = unit[node], unit[source]
    if own == other or stretch[node] != stretch[source]:
        return
    if not _pays(node, source):
        return
    inside = _bits(members[other], bit)
    # Another way from the group to this unit, through an operation outside of both, would be a cycle.
    for member in members[own]:
        for argument in member.all_input_nodes:
            if unit[argument] not in (own, other) and above[unit[argument]] & inside:
                return
    _unite(unit, members, above, bit, own, other)


def _unite(unit, members, above, bit, own, other):
    """Makes two units the second one."""
    group, before = members[other], above[own] | above[other]
    for member in members.pop(own):
        unit[member] = other
        group.append(member)
    del above[own]
    joined = _bits(group, bit)
    before |= joined
    above[other] = before
    for number, nodes in above.items():  # what depends on a member depends on all of them
        if nodes & joined:
            above[number] = nodes | before


def _join_readers(graph, unit, members, above, bit, stretch, joinable):
    """Joins units of elementwise operations of one shape that read the same tensor, of which none depends on another.
    The tensor is then read once."""
    for source in graph.nodes:
        shape = getattr(value(source), "shape", None)
        readers = [user for user in source.users if user in joinable and value(user).shape == shape]
        units = dict.fromkeys(unit[user] for user in readers)
        first, *others = [number for number in units if _is_elementwise(members[number], shape)] or [None]
        for number in others:
            one, other = members[first], members[number]
            apart = not (above[first] & _bits(other, bit) or above[number] & _bits(one, bit))
            if apart and stretch[one[0]] == stretch[other[0]] and _borders(sorted(one + other)) is not None:
                _unite(unit, members, above, bit, number, first)


def _is_elementwise(group, shape):
    return all(value(node).shape == shape and is_elementwise(node) and not _is_view(node) for node in group)


def _borders(members):
    """Returns the inputs and outputs of operations that run at once; None where an output is needed before all inputs
    exist."""
    inside = set(members)
    inputs = list(dict.fromkeys(s for node in members for s in node.all_input_nodes if s not in inside))
    outputs = [node for node in members if any(user not in inside for user in node.users)]
    users = [user for node in outputs for user in node.users if user not in inside]
    if not inputs or not outputs:
        return None
    last = max(inputs)
    return None if any(user < last for user in users) else (inputs, outputs)


def _bits(nodes, bit):
    total = 0
    for node in nodes:
        total |= bit[node]
    return total


def _replace(module, members, build, number):
    graph, borders = module.graph, _borders(members)
    if borders is None or not all(map(_is_tensor, borders[0])):
        return 0
    inside, (inputs, outputs) = set(members), borders
    kernel = build(_subgraph(members, inputs, outputs), [value(node) for node in inputs])
    if kernel is None:
        return 0
    kernel.__name__ = f"pointwise_{number}"
    kernel.pure = True
    place = max(max(inputs)._next, members[0])  # and not before a barrier that is between its inputs and the group
    while place.op in ("placeholder", "get_attr"):
        place = place._next
    with graph.inserting_before(place):
        call = graph.call_function(kernel, tuple(inputs))
        call.meta["val"] = tuple(value(node) for node in outputs)
        call.meta["place"] = "generated"
        call.meta["operations"] = [name_of(node) for node in members]
        for index, node in enumerate(outputs):
            got = graph.call_function(operator.getitem, (call, index))
            got.meta["val"] = value(node)
            node.replace_all_uses_with(got, delete_user_cb=lambda user: user not in inside)
    for node in reversed(members):
        graph.erase_node(node)
    return 1


def _is_tensor(node):
    return isinstance(value(node), Tensor)


def _subgraph(members, inputs, outputs):
    graph = Graph()
    copies = {}
    for index, node in enumerate(inputs):
        copies[node] = graph.placeholder(f"in_{index}")
        copies[node].meta["val"] = value(node)
    for node in members:
        copies[node] = graph.node_copy(node, lambda n: copies[n])
    graph.output(tuple(copies[node] for node in outputs))
    return graph


def build_kernel(graph: Graph, fakes: Sequence[Tensor]) -> Callable[..., tuple] | None:
    """Returns a function of tensors like `fakes` that returns the tuple of what the graph computes, or None where the
    generator does not take the graph."""
    try:
        kernel = pointwise.build(graph, fakes)
    except pointwise.Unsupported:
        return None

    def run(*tensors):
        return kernel(*tensors)

    run.kernel = kernel  # pyright: ignore[reportFunctionMemberAccess]
    return run


def writing_to(run: Callable, memory: Sequence[Tensor | None], likes: Sequence[Tensor]) -> Callable[..., tuple]:
    """Returns the same function with its results in given memory. Where that is None, they are new tensors like
    `likes`."""
    kernel = run.kernel  # pyright: ignore[reportFunctionMemberAccess]
    forms = [(tuple(like.shape), like.stride(), like.dtype, like.device) for like in likes]

    def run_into(*tensors):
        results = [
            torch.empty_strided(shape, strides, dtype=dtype, device=device) if place is None else place
            for place, (shape, strides, dtype, device) in zip(memory, forms)
        ]
        kernel.into(results, *tensors)
        return tuple(results)

    run_into.__name__, run_into.pure, run_into.kernel = run.__name__, True, kernel  # pyright: ignore[reportFunctionMemberAccess]
    return run_into


def kernel_names(node: Node) -> list[str]:
    """Returns the names of the kernels of a step, for arguments like its fake tensors that begin where vectors may."""
    likes = [value(source) for source in node.args]
    metas = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in likes]
    return node.target.kernel.kernels(*metas)  # pyright: ignore[reportFunctionMemberAccess, reportAttributeAccessIssue]
