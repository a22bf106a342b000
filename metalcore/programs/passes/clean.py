"""Removes what does nothing, what is computed twice, and what nobody uses."""

from __future__ import annotations

import contextlib
import functools
import operator

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from ..ir import (
    argument,
    changes_mode,
    changes_shape,
    is_barrier,
    is_pure,
    mutated_storages,
    name_of,
    nodes_named,
    returned_storages,
    segments,
    storage_of,
    tensors_of,
    value,
)

__all__ = [
    "clean",
    "loosen_views",
    "name_conversions",
    "remove_dead",
    "remove_no_ops",
    "remove_repeated",
    "renew_views",
]

# Operators that return their argument, or a view of all of it, if the result has the same shape, strides and dtype.
_VIEWS = frozenset(
    "to type_as contiguous alias view reshape expand flatten unflatten slice permute transpose t squeeze unsqueeze "
    "view_as reshape_as expand_as float lift_fresh _unsafe_view detach positive".split()
)
# Operators that return a copy of their argument if it is the same.
_COPIES = frozenset("clone _to_copy lift_fresh_copy".split())


def clean(module: GraphModule, differentiable: bool = False) -> None:
    """Runs all of the passes above. A graph that autograd has yet to see is `differentiable`."""
    remove_no_ops(module, differentiable)
    name_conversions(module)
    remove_repeated(module)
    remove_dead(module)
    renew_views(module)


def remove_no_ops(module: GraphModule, differentiable: bool = False) -> None:
    """Removes operations whose result is their argument. If the graph is `differentiable`, detach does something."""
    graph = module.graph
    mutated, returned = mutated_storages(graph), returned_storages(graph)
    # Memory that a result must not share with another result, or with an argument, unless it is a view of that.
    storages_in_use = returned | {
        storage_of(t) for n in graph.nodes if n.op in ("placeholder", "get_attr") for t in tensors_of(n)
    }
    for node in list(graph.nodes):
        name = name_of(node)
        is_mode = node.target is torch._C._set_grad_enabled and not differentiable  # nothing is differentiated
        if name == "_assert_tensor_metadata" or is_mode or node.op == "call_module" and not node.users:
            graph.erase_node(node)
            continue
        if name is None or not node.args or not isinstance(node.args[0], Node):
            continue
        source = node.args[0]
        if name == "detach" and differentiable or any(map(changes_shape, node.users)):
            continue
        if _does_nothing(node, name, mutated) and _alike(value(node), value(source)):
            if any(user.op == "output" for user in node.users) and source.op in ("placeholder", "get_attr"):
                continue
            storage, other = storage_of(value(node)), storage_of(value(source))
            if storage in returned and storage != other:
                if other in storages_in_use:
                    continue
                returned.add(other)
                storages_in_use.add(other)
            node.replace_all_uses_with(source)
            graph.erase_node(node)


def _does_nothing(node, name, mutated):
    if name in _VIEWS:
        return name != "to" or not argument(node, "copy")
    if name.removesuffix("_") in ("dropout", "alpha_dropout", "feature_dropout"):
        return not argument(node, "train") or argument(node, "p") == 0
    if any(storage_of(tensor) in mutated for tensor in [*tensors_of(node), *tensors_of(node.args[0])]):
        return False
    if name in _COPIES:
        return True
    if name == "mul":
        return type(node.args[1]) in (int, float) and node.args[1] == 1
    return name in ("add", "sub") and node.args[1] == 0 and type(node.args[1]) is int


def _alike(a, b):
    return (
        isinstance(a, Tensor)
        and isinstance(b, Tensor)
        and a.layout == b.layout == torch.strided
        and (a.shape, a.dtype, a.device, a.stride(), a.storage_offset())
        == (b.shape, b.dtype, b.device, b.stride(), b.storage_offset())
        and (a.is_conj(), a.is_neg()) == (b.is_conj(), b.is_neg())
    )


def name_conversions(module: GraphModule) -> None:
    """Gives one name to all operations that only convert to another dtype: `_to_copy`."""
    for node in module.graph.nodes:
        if name_of(node) not in ("to", "type_as") or not isinstance(node.args[0], Node):
            continue
        new, old = value(node), value(node.args[0])
        if new.dtype != old.dtype and new.device == old.device and new.stride() == old.stride():
            node.target, node.args = torch.ops.aten._to_copy.default, node.args[:1]
            node.kwargs = {"dtype": new.dtype}


def loosen_views(module: GraphModule) -> None:
    """Makes each view a reshape, unless something writes to its memory.

    Some kernels of PyTorch (batch norm's) give strides that differ from those of their fake tensors, so that a view
    may be impossible when the program runs.
    """
    mutated = mutated_storages(module.graph)
    for node in nodes_named(module.graph, "view"):
        if node.target is torch.ops.aten.view.default and storage_of(value(node)) not in mutated:
            node.target = torch.ops.aten.reshape.default


def remove_repeated(module: GraphModule) -> None:
    """Computes equal operations once. Operations of different modes are not equal, and neither are those that read what
    is written to in between, nor those whose result is written to, or is returned: each has memory of its own."""
    graph = module.graph
    stretch, mode, mutated = segments(graph), segments(graph, changes_mode), mutated_storages(graph)
    first_of: dict = {}
    apart = mutated | returned_storages(graph)
    for node in list(graph.nodes):
        if not is_pure(node) or any(storage_of(tensor) in apart for tensor in tensors_of(node)):
            continue
        reads = {storage_of(tensor) for source in node.all_input_nodes for tensor in tensors_of(source)}
        where = 0 if node.op == "get_attr" else mode[node] if reads.isdisjoint(mutated) else (mode[node], stretch[node])
        key = (node.op, node.target, _key(node.args), _key(node.kwargs), where)
        try:
            first = first_of.setdefault(key, node)
        except TypeError:  # an argument that cannot be hashed
            continue
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def _key(thing):
    if isinstance(thing, (list, tuple)):
        return (type(thing).__name__, *map(_key, thing))
    if isinstance(thing, dict):
        return tuple((name, _key(item)) for name, item in sorted(thing.items()))
    # 1, 1.0 and True are equal, and make different results; so do 0.0 and -0.0.
    return thing if isinstance(thing, Node) else (type(thing).__name__, repr(thing) if type(thing) is float else thing)


def renew_views(module: GraphModule) -> None:
    """Makes fake values of views anew whose argument is another value by now: they have to share its memory, so that
    the plan keeps this as long as they live."""
    for node in module.graph.nodes:
        if not (node.target is operator.getitem or name_of(node) is not None and _may_be_view(node.target)):
            continue
        sources = [tensor for source in node.all_input_nodes for tensor in tensors_of(source)]
        shared = {storage_of(tensor) for tensor in sources}
        if not sources or all(storage_of(tensor) in shared for tensor in tensors_of(node)):
            continue
        args, kwargs = map_arg((node.args, node.kwargs), value)
        mode = next((tensor.fake_mode for tensor in sources if isinstance(tensor, FakeTensor)), None)
        with mode or contextlib.nullcontext(), torch.no_grad():
            node.meta["val"] = node.target(*args, **kwargs)


@functools.cache
def _may_be_view(target):
    return any(spec.alias_info is not None and not spec.alias_info.is_write for spec in target._schema.returns)


def remove_dead(module: GraphModule) -> None:
    """Removes operations without users that write to nothing and draw no random numbers."""
    graph = module.graph
    for node in reversed(list(graph.nodes)):
        if not node.users and is_pure(node) and not is_barrier(node):
            graph.erase_node(node)
