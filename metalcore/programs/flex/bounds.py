"""What a mask_mod says about a range of keys, or of queries: `q >= k` and `q - k < 512` are the ends of one.

A row of scores then has two ends, and no kernel compares each of its scores. What is no such comparison stays a
function of each score.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.fx import GraphModule, Node

from ..pointwise.nodes import arguments_of, fake, name_of
from .graphs import returned_by

__all__ = ["Bound", "columns_of", "parts_of"]

_ANDS = ("bitwise_and.Tensor", "logical_and.default", "__and__.Tensor", "mul.Tensor")
_COMPARISONS = ("lt", "le", "gt", "ge")
_INTEGERS = (torch.int32, torch.int64)
_INDICES = 4  # placeholders before those of what is captured
_MOST_HELD = 16  # bytes
_MOST = 1 << 30  # numbers that are added, so that no sum with the number of a key overflows


class Bound(NamedTuple):
    """A comparison that is true of all numbers of a variable on one side of another number.

    Attributes:
        left, right: a node or a number. What they are where the variable is 0 tells the other number.
        is_end: whether the other number is behind the last one, or it is the first one.
        rises: whether left - right grows with the variable.
        is_strict: whether equal numbers make the comparison false.
    """

    left: Node | int
    right: Node | int
    is_end: bool
    rises: bool
    is_strict: bool


def parts_of(graph: GraphModule, variable: int) -> tuple[list[Bound], list[Node]]:
    """Returns the bounds of the numbers that a mask_mod shows, and the conditions that say more.

    Args:
        variable: the number of the placeholder of keys, or of queries.
    """
    placeholder = [node for node in graph.graph.nodes if node.op == "placeholder"][variable]
    bounds, others, waiting, seen = [], [], [returned_by(graph)], set()
    while waiting:
        node = waiting.pop(0)
        if node in seen:
            continue
        seen.add(node)
        if name_of(node) in _ANDS and all(isinstance(x, Node) and fake(x).dtype == torch.bool for x in node.args):
            waiting += node.args
        elif bound := _bound(node, placeholder):
            bounds.append(bound)
        else:
            others.append(node)
    return bounds, others


def columns_of(graph: GraphModule, conditions: Sequence[Node], variable: int, other: int) -> tuple[list[Node], bool]:
    """Returns what conditions find in captured tensors for a number of a variable, whatever that of the other one is,
    and whether they read nothing else of it. Kernels hold it for a tile. Where that is much, there is nothing.

    Args:
        variable, other: the numbers of the placeholders of keys and of queries, or the other way round.
    """
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    found, waiting, seen = [], list(conditions), set()
    while waiting:
        node = waiting.pop(0)
        if node in seen or not _reads(node, placeholders[variable]):
            continue
        seen.add(node)
        is_number = not fake(node).dim()  # a vector is read element by element
        if (
            is_number
            and not _reads(node, placeholders[other])
            and any(_reads(node, x) for x in placeholders[_INDICES:])
        ):
            found.append(node)
        else:
            waiting += node.all_input_nodes
    if not found or sum(map(_held_bytes, found)) > _MOST_HELD:
        return [], False
    return sorted(found, key=_held_bytes, reverse=True), placeholders[variable] not in seen  # a struct without gaps


def _held_bytes(node: Node) -> int:
    return max(fake(node).element_size(), 4)


def _bound(node: Node, variable: Node) -> Bound | None:
    operation = name_of(node).split(".")[0]
    if operation not in _COMPARISONS:
        return None
    left, right = node.args[:2]
    one, other = _slope(left, variable), _slope(right, variable)
    if one is None or other is None or one - other not in (1, -1):
        return None
    rises = one > other
    is_less = operation in ("lt", "le")
    return Bound(left, right, is_less == rises, rises, operation in ("lt", "gt"))  # pyright: ignore[reportArgumentType]


def _slope(value, variable: Node) -> int | None:
    """Returns by how much a number grows with the variable, or None where that is no fixed number."""
    if not isinstance(value, Node):
        return 0 if isinstance(value, int) and abs(value) <= _MOST else None
    if value is variable:
        return 1
    if fake(value).dtype not in _INTEGERS or fake(value).dim():
        return None
    if not _reads(value, variable):
        return 0
    operation = name_of(value).split(".")[0]
    if operation not in ("add", "sub", "rsub"):
        return None
    arguments = arguments_of(value)
    one, other = (_slope(x, variable) for x in value.args[:2])
    if one is None or other is None or arguments.get("alpha", 1) != 1:
        return None
    return {"add": one + other, "sub": one - other, "rsub": other - one}[operation]


def _reads(node: Node, variable: Node) -> bool:
    waiting, seen = [node], set()
    while waiting:
        current = waiting.pop()
        if current is variable:
            return True
        if current not in seen:
            seen.add(current)
            waiting += current.all_input_nodes
    return False
