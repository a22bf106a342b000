"""What an elementwise kernel reads: its leaves, or these with their dimensions in another order."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import Tensor
from torch.fx import Node

from .layout import geometry
from .lowering import At, Lowering
from .nodes import fake
from .storing import needs_coordinates


def names_of(node: Node) -> tuple[str, ...]:
    """Returns the names of the coordinates in a node's result."""
    return tuple(f"c{d}" for d in range(fake(node).dim()))


def operands_of(outputs: Sequence[Node], inputs: Sequence[Node], made: Sequence[Node]) -> list[tuple[Node, At]] | None:
    """Returns the leaves that outputs of one shape read, each with the names of its coordinates, or with None where it
    broadcasts to the outputs. None where an element is read at a place that has to be computed.

    Operations that only put dimensions into another order need no computation: the operand's strides say it.
    """
    if not needs_coordinates(outputs, made):
        return [(leaf, None) for leaf in inputs]
    found: dict[tuple[Node, At], None] = {}

    def load(leaf, at):
        found[leaf, at] = None
        return "x"

    lowering, names = Lowering(load, made=made), names_of(outputs[0])
    for node in outputs:
        lowering.value(node, names)
    plain = all(c in (*names, "0") for _, at in found for c in at)  # pyright: ignore[reportOptionalIterable]
    used = any(re.search(r"\bc\d", statement) for statement in lowering.statements)
    return list(found) if plain and not used else None


def geometry_of(tensor: Tensor, at: At, shape: Sequence[int]) -> tuple[tuple[int, ...], int, int]:
    """Returns the strides of an operand in the outputs' shape, its element size and its address modulo 16."""
    if at is None:
        return geometry(tensor, shape)
    own, size, address = geometry(tensor, tensor.shape)
    strides = (sum(stride for c, stride in zip(at, own) if c == f"c{d}") for d in range(len(shape)))
    return tuple(strides), size, address
