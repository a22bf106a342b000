"""The table of operations that read other elements than their own.

A function of the table gets the lowering, the node, its arguments by name, and the coordinates of an element of the
result: texts, one for each dimension. It returns the element's register.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch.fx import Node

from ..nodes import fake, plain
from ..numbers import literal

READS: dict[str, Callable] = {}

At = tuple[str, ...]


def reads(*names: str) -> Callable[[Callable], Callable]:
    """Enters a function for operators of aten, of which `default` may go without its overload."""

    def enter(function):
        READS.update(dict.fromkeys((name if "." in name else f"{name}.default" for name in names), function))  # pyright: ignore[reportArgumentType, reportCallIssue]
        return function

    return enter


def dimension(node: Node, dim: int, more: int = 0) -> int:
    """Returns a dimension of a node's result, counted from the first."""
    return plain(dim) % max(1, fake(node).dim() + more)


def replaced(at: Sequence[str], dim: int, coordinate: str) -> At:
    """Coordinates of which one is another. A tensor without dimensions has none."""
    return tuple(coordinate if d == dim else c for d, c in enumerate(at))


def plus(lowering, coordinate: str, number: int) -> str:
    return lowering.index(f"{coordinate} {'-' if number < 0 else '+'} {abs(number)}" if number else coordinate)


def zero(dtype) -> str:
    return literal(0, dtype)


def missing(dtype) -> str:
    """Returns what stands for an element that does not exist, because an index is out of range."""
    return "NAN" if dtype.is_floating_point else zero(dtype)


def within(coordinate: str, size: int) -> str:
    return f"uint({coordinate}) < {size}u"


def element_as(lowering, node, at, dtype) -> str:
    """Returns the register of a node's element as one of a dtype."""
    value = lowering.value(node, at)
    return lowering.rounded(value.text, value.dtype, dtype).text if value.dtype != dtype else value.text
