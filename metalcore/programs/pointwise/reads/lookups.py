"""Look-ups by indices that are tensors, and what is known from coordinates alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch.fx import Node

from ..nodes import fake, plain, result_dtype
from ..numbers import Unsupported, converted, kind, literal, register
from .views import dimension, missing, reads, zero


def looked_up(lowering, index: Node, at: Sequence[str], size: int, *, wraps: bool = False) -> tuple[str, str]:
    """Returns the number that a tensor of indices has at some coordinates, and the condition that it is within a size.

    Args:
        wraps: whether negative numbers count from the end.
    """
    if result_dtype(index) not in (torch.int64, torch.int32):
        raise Unsupported(f"indices are int64 or int32, and {index} is {fake(index).dtype}")
    number = lowering.value(index, tuple(at)).text
    if wraps:
        number = lowering.statement("long", f"{number} < 0 ? long({number}) + {size} : long({number})")
    return number, f"{number} >= 0 && {number} < {size}"


def _looked_up_value(lowering, node, source, at: Sequence[str | None], numbers: Iterable[tuple[str, str]]):
    """Returns the element at coordinates of which those that are None come from tensors of indices."""
    dtype, numbers = result_dtype(node), list(numbers)

    def make():
        indices = iter([lowering.index(f"int({number})") for number, _ in numbers])
        return lowering.value(source, tuple(next(indices) if c is None else c for c in at)).text

    return lowering.when(" && ".join(inside for _, inside in numbers), dtype, missing(dtype), make)


@reads("gather")
def _gather(lowering, node, arguments, at):
    source, dim = arguments["self"], dimension(arguments["self"], arguments["dim"])
    number = looked_up(lowering, arguments["index"], at, size_of(source, dim))
    return _looked_up_value(lowering, node, source, with_none(at, dim, source), [number])


def size_of(source: Node, dim: int) -> int:
    """Returns a dimension's size. A tensor without dimensions counts as one of one element."""
    return fake(source).shape[dim] if fake(source).dim() else 1


def with_none(at: Sequence[str], dim: int, source: Node) -> list[str | None]:
    """Returns the coordinates in a tensor, of which a tensor of indices gives one."""
    return [None if d == dim else at[d] for d in range(fake(source).dim())]


@reads("index_select")
def _index_select(lowering, node, arguments, at):
    source, index, dim = arguments["self"], arguments["index"], dimension(arguments["self"], arguments["dim"])
    own = at[dim : dim + fake(index).dim()] if at else ("0",) * fake(index).dim()
    number = looked_up(lowering, index, own, size_of(source, dim))
    return _looked_up_value(lowering, node, source, with_none(at, dim, source), [number])


@reads("embedding")
def _embedding(lowering, node, arguments, at):
    source = arguments["weight"]
    number = looked_up(lowering, arguments["indices"], at[:-1], fake(source).shape[0])
    return _looked_up_value(lowering, node, source, [None, at[-1]], [number])


def advanced(lowering, indices: Sequence[Node | None], shape: Sequence[int], at: Sequence[str]):
    """Returns the coordinates in a tensor of a shape that is indexed by tensors, None where a tensor gives the number,
    with these numbers and conditions, as `looked_up` gives them.

    Args:
        at: the coordinates in the result of x[indices].
    """
    tensors = [index for index in indices if index is not None]
    for index in tensors:
        if fake(index).dtype in (torch.bool, torch.uint8):
            raise Unsupported("a mask as index, which makes a shape that depends on numbers")
    places = [d for d, index in enumerate(indices) if index is not None]
    common = torch.broadcast_shapes(*(fake(index).shape for index in tensors))
    # The indices' dimensions come where the indices are, or first if they are not side by side.
    first = places[0] if places[-1] - places[0] == len(places) - 1 else 0
    of_indices, others = at[first : first + len(common)], iter([*at[:first], *at[first + len(common) :]])
    coordinates, numbers = [], []
    for d, size in enumerate(shape):
        index = indices[d] if d < len(indices) else None
        if index is None:
            coordinates.append(next(others))
            continue
        own = of_indices[len(common) - fake(index).dim() :]
        coordinates.append(None)
        numbers.append(looked_up(lowering, index, own, size, wraps=True))
    return coordinates, numbers


@reads("index.Tensor")
def _index(lowering, node, arguments, at):
    source = arguments["self"]
    coordinates, numbers = advanced(lowering, arguments["indices"], fake(source).shape, at)
    return _looked_up_value(lowering, node, source, coordinates, numbers)


@reads("arange", "arange.start", "arange.start_step", "prims.iota")
def _arange(lowering, node, arguments, at):
    dtype = result_dtype(node)
    start, step = plain(arguments.get("start", 0)), plain(arguments.get("step", 1))
    if kind(dtype) == "f":
        text = f"{literal(start, torch.float32)} + float({at[0]}) * {literal(step, torch.float32)}"  # pyright: ignore[reportArgumentType]
        return lowering.rounded(text, dtype, dtype).text
    if not all(isinstance(number, int) for number in (start, step)):
        raise Unsupported("whole numbers in steps that are none")
    text = f"{literal(start, torch.int64)} + long({at[0]}) * {literal(step, torch.int64)}"  # pyright: ignore[reportArgumentType]
    return lowering.statement(register(dtype), converted(text, torch.int64, dtype))


@reads("eye", "eye.m")
def _eye(lowering, node, arguments, at):
    dtype = result_dtype(node)
    return lowering.statement(register(dtype), f"{at[0]} == {at[1]} ? {literal(1, dtype)} : {zero(dtype)}")
