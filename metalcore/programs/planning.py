"""What each value of a program is, how long it lives, and where in one arena of memory it lies."""

from __future__ import annotations

import operator
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import GraphModule, Node

from .._core import torch_operators
from .._core.arena import fixed_memory, peak, place
from .ir import is_barrier, mutated_storages, name_of, storage_of, tensors_of, value
from .passes.groups import writing_to

__all__ = ["Plan", "Planned", "bind_arena", "make_plan", "out_variant"]


class Planned(NamedTuple):
    """A value of a program.

    Attributes:
        kind: "input", "parameter", "static" (what the program writes to and keeps), "output", "temporary", or "view"
            (of another value).
        first, last: the numbers of the first and the last operation that need it. -1 is before all of them.
        offset: the first byte in the arena, or None for what is not there.

    Example:
        >>> x = torch.ones(2, 4, device="mps")
        >>> report = metalcore.compile(metalcore.nn.RMSNorm(4, device="mps").eval(), (x,)).report()
        >>> [value.kind for value in report.plan.values]
        ['input', 'parameter', 'output']
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    first: int
    last: int
    offset: int | None


class Plan(NamedTuple):
    """The values of a program, in the order in which they appear.

    Attributes:
        arena_bytes: the size of the arena.
        peak_bytes: the most memory that temporaries and outputs take at one time.
        parameter_bytes: the memory of parameters and static values.

    Example:
        >>> x = torch.ones(2, 4, device="mps")
        >>> report = metalcore.compile(metalcore.nn.RMSNorm(4, device="mps").eval(), (x,)).report()
        >>> report.plan.parameter_bytes
        16
    """

    values: tuple[Planned, ...]
    arena_bytes: int
    peak_bytes: int
    parameter_bytes: int


def make_plan(module: GraphModule, device: torch.device | None = None) -> Plan:
    """Plans the memory of a graph's values. Values in the arena, which is on one device, share it where their lives do
    not overlap. Without a device there is none."""
    graph = module.graph
    order = {node: number for number, node in enumerate(graph.nodes)}
    lives = _lives(graph, order)
    kinds = _kinds(graph)
    owners: dict = {}
    by_begin = _read_from_the_begin(graph)
    values, wanted = [], []
    for node in graph.nodes:
        if node.op == "output" or isinstance(value(node), (tuple, list)):
            continue
        for tensor in tensors_of(node):
            storage = storage_of(tensor)
            if storage is None:
                continue
            first_of_storage = owners.setdefault(storage, node) is node
            kind = kinds.get(storage, "temporary") if first_of_storage else "view"
            first, last = lives[storage]
            nbytes = tensor.untyped_storage().nbytes()
            movable = kind == "temporary" and storage not in by_begin
            if movable and tensor.device == device and nbytes and _placeable(node):
                wanted.append((len(values), first, last, nbytes))
            form = tuple(tensor.shape), tensor.stride(), tensor.dtype
            values.append(Planned(node.name, kind, *form, nbytes, first, last, None))
    offsets, arena = place([(first, last, nbytes) for _, first, last, nbytes in wanted])
    for (index, *_), offset in zip(wanted, offsets):
        values[index] = values[index]._replace(offset=offset)
    most = peak([(v.first, v.last, v.nbytes) for v in values if v.kind in ("temporary", "output")])
    parameters = sum(v.nbytes for v in values if v.kind in ("parameter", "static"))
    return Plan(tuple(values), arena, most, parameters)


def _lives(graph, order):
    lives: dict = {}
    for node in graph.nodes:
        last = max([order[node], *(order[user] for user in node.users)])
        for tensor in tensors_of(node):
            storage = storage_of(tensor)
            first, before = lives.get(storage, (order[node], -1))
            lives[storage] = (first, max(before, last))
    return lives


def _read_from_the_begin(graph):
    """Returns the storages whose elements an operation counts from their begin, which is not the value's in an
    arena."""
    return {
        storage_of(tensor)
        for node in graph.nodes
        if name_of(node) is not None and torch_operators.reads_storage(node.target, node.args, node.kwargs)
        for source in node.all_input_nodes
        for tensor in tensors_of(source)
    }


def _kinds(graph):
    mutated = mutated_storages(graph)
    kinds: dict = {}
    for node in graph.nodes:
        if node.op == "output":
            for result in node.all_input_nodes:
                for tensor in tensors_of(result):
                    kinds.setdefault(storage_of(tensor), "output")
        elif node.op in ("placeholder", "get_attr"):
            for tensor in tensors_of(node):
                storage = storage_of(tensor)
                static = "static" if storage in mutated else "parameter"
                kinds[storage] = "input" if node.op == "placeholder" else static
    return kinds


def _placeable(node):
    return _of_kernel(node) or out_variant(node) is not None


def _of_kernel(node):
    """Returns whether a value is a result of a generated kernel, which writes to any memory."""
    return node.target is operator.getitem and node.args[0].meta.get("place") == "generated"


def out_variant(node: Node):
    """Returns the operator that computes an operation's result into memory which the caller gives, or None without one
    that was seen to write nothing else."""
    if name_of(node) is None or is_barrier(node) or not isinstance(value(node), Tensor):
        return None
    result = value(node)
    # PyTorch's gelu, and others, leave memory of other strides unwritten where they find contiguous arguments.
    if result.layout is not torch.strided or not result.is_contiguous() or result.storage_offset():
        return None
    if result.untyped_storage().nbytes() != result.numel() * result.element_size():
        return None
    variant = _out_overload(node.target, result.device)
    if variant is None:
        return None
    return (
        None
        if any(storage_of(t) == storage_of(result) for n in node.all_input_nodes for t in tensors_of(n))
        else variant
    )


def _out_overload(target, device):
    if any(spec.alias_info is not None for spec in target._schema.arguments):
        return None
    variant = torch_operators.out_variant(target, device)
    return variant[0] if variant and variant[1] == ["out"] else None


def bind_arena(module: GraphModule, plan: Plan, device: torch.device) -> Tensor | None:
    """Makes the arena, and has the operations write their results into it. Returns the arena."""
    if not plan.arena_bytes:
        return None
    graph = module.graph
    with unset_fake_temporarily():  # AOTAutograd compiles in a mode in which new tensors have no memory
        arena = fixed_memory(plan.arena_bytes, device)
        memory = {v.name: _view(arena, v) for v in plan.values if v.offset is not None}
    for node in list(graph.nodes):
        if node.meta.get("place") == "generated":
            likes = value(node)
            places: list[Tensor | None] = [None] * len(likes)
            for user in node.users:
                places[user.args[1]] = memory.get(user.name)
            node.target = writing_to(node.target, places, likes)
        elif node.name in memory and not _of_kernel(node):
            name = f"arena_{node.name}"
            module.register_buffer(name, memory[node.name], persistent=False)
            with graph.inserting_before(node):
                got = graph.get_attr(name)
            got.meta["val"] = value(node)
            node.target, node.kwargs = out_variant(node), {**node.kwargs, "out": got}
    return arena


def _view(arena, planned):
    memory = arena[planned.offset : planned.offset + planned.nbytes].view(planned.dtype)
    return memory.as_strided(planned.shape, planned.strides, memory.storage_offset())
