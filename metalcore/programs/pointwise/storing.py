"""Which results in the middle of a graph are stored, because computing them again at each place that is read would cost
more than the memory does, and what an elementwise kernel reads."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Sequence

from torch import Tensor
from torch.fx import Node

from ..ir import ancestors
from .layout import geometry
from .lowering import INDEXED, At, Lowering
from .nodes import REDUCTIONS, STORED, WRITES, fake, is_leaf, name_of, shape_of, split
from .windows import MEASURED, elements_of
from .writes import written

MOST_REPEATED = 8  # operations of an element that several operations read, some at other elements
MOST_IN_WINDOW = 64  # operations of all elements of a window
# What may read an element several times. Others read it once at most.
_SEVERAL = ("gather", "index", "embedding", "repeat", "upsample", "_upsample", "replication", *MEASURED)


def is_indexed(node: Node) -> bool:
    """Returns whether an operation reads operands at other elements than its own."""
    return name_of(node) in INDEXED


def repeats_of(node: Node, operand: Node) -> float:
    """Returns how often, about, an operation that reads elements at places of its own reads each of its operand's.
    Infinity for other operations, whose operands are of their shape."""
    name = name_of(node)
    if name in WRITES:
        return 1 if operand is node.args[0] else math.prod(written(node).shape) / max(1, fake(operand).numel())
    if name not in INDEXED:
        return math.inf
    return (
        elements_of(node) * math.prod(shape_of(node)) / max(1, fake(operand).numel())
        if name.startswith(_SEVERAL)
        else 1
    )


def needs_coordinates(nodes: Sequence[Node], kernel_nodes: Sequence[Node] = ()) -> bool:
    """Returns whether nodes have operations before them, down to leaves, that read other elements than their own."""
    _, computed = split(nodes, kernel_nodes)
    return any(map(is_indexed, computed))


def store(outputs: Sequence[Node]) -> None:
    """Marks the nodes that have kernels of their own."""
    nodes_above = ancestors(outputs)
    inside = set(nodes_above)
    work: dict[Node, int] = {}
    for node in nodes_above:
        if is_leaf(node):
            if name_of(node) in REDUCTIONS and needs_coordinates(node.args[:1]):  # pyright: ignore[reportArgumentType]
                _mark(node.args[0])
            work[node] = 0
            continue
        operands = sum(work[source] for source in node.all_input_nodes)
        if name_of(node) in MEASURED and elements_of(node) * operands > MOST_IN_WINDOW:
            _mark(node.args[0])
            work[node.args[0]] = operands = 0  # pyright: ignore[reportArgumentType]
        work[node] = elements_of(node) * operands + (1 if node.target is not operator.getitem else 0)
        if name_of(node) in MEASURED:
            work[node] += elements_of(node)
        users = [user for user in node.users if user in inside]
        if len(users) > 1 and any(map(is_indexed, users)) and work[node] > MOST_REPEATED:
            _mark(node)
            work[node] = 0


def _mark(node):
    if node.op != "placeholder" and not is_leaf(node) and not isinstance(node.meta["val"], (tuple, list)):
        node.meta[STORED] = True


def names_of(node: Node) -> tuple[str, ...]:
    """Returns the names of the coordinates in a node's result."""
    return tuple(f"c{d}" for d in range(fake(node).dim()))


def operands_of(
    outputs: Sequence[Node], inputs: Sequence[Node], kernel_nodes: Sequence[Node]
) -> list[tuple[Node, At]] | None:
    """Returns the leaves that outputs of one shape read, each with the names of its coordinates, or with None where it
    broadcasts to the outputs. None where an element is read at a place that has to be computed.

    Operations that only put dimensions into another order need no computation: the operand's strides say it.
    """
    if not needs_coordinates(outputs, kernel_nodes):
        return [(leaf, None) for leaf in inputs]
    operands: dict[tuple[Node, At], None] = {}

    def load(leaf, at):
        operands[leaf, at] = None
        return "x"

    lowering, names = Lowering(load, kernel_nodes=kernel_nodes), names_of(outputs[0])
    for node in outputs:
        lowering.value(node, names)
    plain = all(c in (*names, "0") for _, at in operands for c in at)  # pyright: ignore[reportOptionalIterable]
    used = any(re.search(r"\bc\d", statement) for statement in lowering.statements)
    return list(operands) if plain and not used else None


def geometry_of(tensor: Tensor, at: At, shape: Sequence[int]) -> tuple[tuple[int, ...], int, int]:
    """Returns the strides of an operand in the outputs' shape, its element size and its address modulo 16."""
    if at is None:
        return geometry(tensor, shape)
    own, size, address = geometry(tensor, tensor.shape)
    strides = (sum(stride for c, stride in zip(at, own) if c == f"c{d}") for d in range(len(shape)))
    return tuple(strides), size, address
