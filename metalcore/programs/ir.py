"""The intermediate representation: an FX graph of ATen's and metalcore's operators, in order.

A placeholder is an input, a get_attr node a parameter or a static value, and a call_function node an operation. Each
has its fake tensor (or its number) in `node.meta["val"]`. The functions here say what other code needs to know of it.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.utils._pytree import tree_leaves

from .._core.routing import DEVICES, FLOAT_DTYPES

__all__ = [
    "accelerated",
    "ancestors",
    "argument",
    "arguments",
    "changes_mode",
    "changes_shape",
    "is_barrier",
    "is_pure",
    "mutated_storages",
    "name_of",
    "one_tracer",
    "returned_storages",
    "segments",
    "storage_of",
    "tensors_of",
    "value",
    "written",
]

# PyTorch's make_fx patches the whole process: one thread traces at a time, and holds this.
one_tracer = threading.RLock()

# Operators that write to tensors although their schema does not say so: (the flag that makes them, what they write).
_SECRET_WRITERS = {
    "batch_norm": ("training", ("running_mean", "running_var")),
    "instance_norm": ("use_input_stats", ("running_mean", "running_var")),
}


def name_of(node: Any) -> str | None:
    """Returns the operator's name without its overload: "add" of ATen's operators, "metalcore.rope" of others; else
    None."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return None
    namespace, name = target._schema.name.split("::")
    return name if namespace == "aten" else f"{namespace}.{name}"


def value(node: Any) -> Any:
    return node.meta.get("val")


def tensors_of(node: Node) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value(node)) if isinstance(leaf, Tensor)]


def arguments(node: Node) -> tuple:
    """Returns all arguments in the order of the operator's schema, with its defaults."""
    positional = list(node.args)
    rest = node.target._schema.arguments[len(positional) :]  # pyright: ignore[reportAttributeAccessIssue, reportFunctionMemberAccess]
    return (*positional, *(node.kwargs.get(spec.name, spec.default_value) for spec in rest))


def argument(node: Any, name: str) -> Any:
    """Returns an argument by its name, or None if the operator has none of this name."""
    for spec, thing in zip(node.target._schema.arguments, arguments(node)):  # pyright: ignore[reportAttributeAccessIssue, reportFunctionMemberAccess]
        if spec.name == name:
            return thing
    return None


def accelerated(*nodes: Any) -> bool:
    """Returns whether metalcore's kernels take the values of these nodes, as `routing.accelerated` says of tensors."""
    values = [value(node) for node in nodes if node is not None]
    return bool(values) and all(
        isinstance(v, Tensor)
        and v.layout is torch.strided
        and v.dtype in FLOAT_DTYPES
        and v.device.type in DEVICES
        and v.device == values[0].device
        for v in values
    )


def storage_of(tensor: Tensor) -> int | None:
    """Returns what tells apart the storages of fake tensors. Sparse tensors have none."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else None


def written(node: Node) -> list[Node]:
    """Returns the nodes whose tensors an operation writes to."""
    if name_of(node) is None:
        return []
    names, flag, secret = _writes(node.target)
    if flag and argument(node, flag):
        names = (*names, *secret)
    return [leaf for name in names for leaf in tree_leaves(argument(node, name)) if isinstance(leaf, Node)]


def changes_shape(node: Node) -> bool:
    """Returns whether an operation changes the shape or the strides of its argument itself, as unsqueeze_ does."""
    return name_of(node) is not None and torch.Tag.inplace_view in node.target.tags  # pyright: ignore[reportAttributeAccessIssue, reportFunctionMemberAccess]


@functools.cache
def _writes(target) -> tuple[tuple[str, ...], str, tuple[str, ...]]:
    """Returns the arguments that an operator writes to, and a flag with those that it writes to where the flag is
    set."""
    schema = target._schema
    names = tuple(spec.name for spec in schema.arguments if spec.alias_info is not None and spec.alias_info.is_write)
    flag, secret = _SECRET_WRITERS.get(schema.name.removeprefix("aten::"), ("", ()))
    return names, flag, secret


def is_barrier(node: Node) -> bool:
    """Returns whether operations must not move across this one: it writes to a tensor, or changes a mode of PyTorch."""
    return changes_mode(node) or bool(written(node))


def changes_mode(node: Node) -> bool:
    """Returns whether operations after this one may differ from equal ones before it."""
    if node.op != "call_function":
        return node.op == "call_module"
    return name_of(node) is None and not _is_plain_python(node)


def _is_plain_python(node):
    return getattr(node.target, "__module__", None) in ("_operator", "math") or getattr(node.target, "pure", False)


def is_pure(node: Node) -> bool:
    """Returns whether an operation can be left out if nobody uses it, and computed once for two equal ones."""
    if node.op == "get_attr":
        return True
    if node.op != "call_function" or is_barrier(node):
        return False
    if name_of(node) is None:
        return True
    return torch.Tag.nondeterministic_seeded not in node.target.tags and bool(node.target._schema.returns)  # pyright: ignore[reportAttributeAccessIssue, reportFunctionMemberAccess]


def segments(graph: Graph, ends: Callable[[Node], bool] = is_barrier) -> dict[Node, int]:
    """Numbers the stretches between barriers. A barrier belongs to the stretch that it ends, with an own number."""
    numbers, current = {}, 0
    for node in graph.nodes:
        if ends(node):
            current += 1
            numbers[node] = current
            current += 1
        else:
            numbers[node] = current
    return numbers


def mutated_storages(graph: Graph) -> set[int]:
    """Returns the storages that some operation of the graph writes to."""
    return {
        storage
        for node in graph.nodes
        for target in written(node)
        for tensor in tensors_of(target)
        if (storage := storage_of(tensor)) is not None
    }


def returned_storages(graph: Graph) -> set[int | None]:
    """Returns the storages of the graph's results."""
    results = [leaf for node in graph.nodes if node.op == "output" for leaf in node.all_input_nodes]
    return {storage_of(tensor) for leaf in results for tensor in tensors_of(leaf)}


def ancestors(nodes: Iterable[Node], ends: Callable[[Node], bool] = lambda node: False) -> list[Node]:
    """Returns nodes and what they are computed from, in the graph's order. A way ends at a node of which `ends` says
    so."""
    nodes_above: set[Node] = set()
    left = list(nodes)
    while left:
        node = left.pop()
        if node not in nodes_above:
            nodes_above.add(node)
            left += [] if ends(node) else node.all_input_nodes
    return sorted(nodes_above)


def nodes_named(graph: Graph, *names: str) -> Iterator[Node]:
    for node in list(graph.nodes):
        if name_of(node) in names:
            yield node
