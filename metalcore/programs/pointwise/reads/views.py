"""The table of operations that read other elements than their own.

A function of the table gets the lowering, the node, its arguments by name, and the coordinates of an element of the
result: texts, one for each dimension. It returns the element's register.

Views, and copies of one operand in another order, are the first of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch.fx import Node

from ..nodes import fake, plain, result_dtype
from ..numbers import Unsupported, literal

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


@reads(*"view reshape _unsafe_view _reshape_copy view_copy flatten.using_ints unflatten.int unsqueeze".split())
@reads(*"squeeze squeeze.dim squeeze.dims prims.view_of unsqueeze_copy".split())
def _view(lowering, node, arguments, at):
    return lowering.value(node.args[0], _reshaped(lowering, at, fake(node).shape, fake(node.args[0]).shape)).text


def _reshaped(lowering, at: Sequence[str], shape: Sequence[int], other: Sequence[int]) -> At:
    """Returns the coordinates in another shape of as many elements. Dimensions that both have stay as they are."""
    coordinates: list[str] = []
    k = 0
    if 0 in other:
        return ("0",) * len(other)
    for j, size in enumerate(other):
        if len(coordinates) > j:
            continue
        if size == 1:
            coordinates.append("0")
            continue
        # The least runs of dimensions with the same number of elements.
        mine, theirs, first, last = 1, size, k, j + 1
        while mine != theirs:
            if mine < theirs:
                mine, k = mine * shape[k], k + 1
            else:
                theirs, last = theirs * other[last], last + 1
        long_dimensions = [d for d in range(first, k) if shape[d] != 1]
        if len(long_dimensions) == 1 and last == j + 1:
            coordinates.append(at[long_dimensions[0]])
            continue
        place = ""
        for d in long_dimensions:
            place = f"({place}) * {shape[d]} + {at[d]}" if place else at[d]
        rest = lowering.index(place or "0")
        for d in range(last - 1, j, -1):
            coordinates.insert(j, lowering.index(f"int(uint({rest}) % {other[d]}u)"))
            rest = lowering.index(f"int(uint({rest}) / {other[d]}u)")
        coordinates.insert(j, rest)
    return tuple(coordinates)


@reads("permute", "transpose.int", "t", "numpy_T", "permute_copy", "transpose_copy.int", "swapaxes", "movedim.int")
def _permute(lowering, node, arguments, at):
    source, names = node.args[0], node.target.overloadpacket.__name__
    rank = fake(source).dim()
    order = list(range(rank))
    if "permute" in names:
        order = [dimension(source, d) for d in arguments["dims"]]
    elif names == "movedim":
        moved, to = dimension(source, arguments["source"]), dimension(source, arguments["destination"])
        order.insert(to, order.pop(moved)) if rank else None
    elif names in ("t", "numpy_T"):
        order.reverse()
    elif rank:
        first, second = (dimension(source, d) for d in node.args[1:3])
        order[first], order[second] = second, first
    coordinate_of = dict(zip(order, at))
    return lowering.value(source, tuple(coordinate_of[d] for d in range(rank))).text


@reads("select.int", "select_copy.int")
def _select(lowering, node, arguments, at):
    source = node.args[0]
    dim, index = dimension(source, arguments["dim"]), plain(arguments["index"])
    index += fake(source).shape[dim] if index < 0 else 0
    return lowering.value(source, (*at[:dim], str(index), *at[dim:])).text


def bounds(arguments, size):
    """Returns the first element of a slice, and the step."""
    start, step = plain(arguments.get("start")), plain(arguments.get("step", 1))
    start = 0 if start is None else start
    return min(max(start + size if start < 0 else start, 0), size), step


@reads("slice.Tensor", "slice_copy.Tensor", "narrow")
def _slice(lowering, node, arguments, at):
    source = node.args[0]
    dim = dimension(source, arguments["dim"])
    start, step = bounds(arguments, fake(source).shape[dim])
    place = at[dim] if step == 1 else f"{at[dim]} * {step}"
    return lowering.value(source, replaced(at, dim, plus(lowering, place, start))).text  # pyright: ignore[reportArgumentType]


@reads("diagonal", "diagonal_copy")
def _diagonal(lowering, node, arguments, at):
    source, offset = node.args[0], plain(arguments["offset"])
    first, second = dimension(source, arguments["dim1"]), dimension(source, arguments["dim2"])
    others = iter(at[:-1])
    own = {first: plus(lowering, at[-1], max(-offset, 0)), second: plus(lowering, at[-1], max(offset, 0))}  # pyright: ignore[reportArgumentType]
    return lowering.value(source, tuple(own.get(d) or next(others) for d in range(fake(source).dim()))).text


@reads("flip")
def _flip(lowering, node, arguments, at):
    source, coordinates = node.args[0], at
    for dim in {dimension(source, d) for d in arguments["dims"]}:
        if at:
            coordinates = replaced(coordinates, dim, lowering.index(f"{fake(node).shape[dim] - 1} - {at[dim]}"))
    return lowering.value(source, coordinates).text


@reads("roll")
def _roll(lowering, node, arguments, at):
    source, coordinates = node.args[0], at
    shifts, dims = arguments["shifts"], arguments["dims"] or ()
    if not dims and fake(source).dim() == 1:
        dims = (0,)
    shifts = shifts if isinstance(shifts, Sequence) else (shifts,)
    if len(dims) != len(shifts):
        raise Unsupported("it rolls all dimensions as one")
    for dim, shift in zip(dims, shifts):
        dim = dimension(source, dim)
        size = fake(node).shape[dim] if at else 1
        if size and shift % size:
            coordinates = replaced(
                coordinates, dim, lowering.index(f"int(uint({coordinates[dim]} + {size - shift % size}) % {size}u)")
            )
    return lowering.value(source, coordinates).text


@reads("repeat")
def _repeat(lowering, node, arguments, at):
    source = node.args[0]
    shape = fake(source).shape
    own = at[len(at) - len(shape) :]
    sizes = fake(node).shape[len(at) - len(shape) :]
    coordinates = (
        c if new == size else lowering.index(f"int(uint({c}) % {size}u)") for c, size, new in zip(own, shape, sizes)
    )
    return lowering.value(source, tuple(coordinates)).text


@reads("repeat_interleave.self_int")
def _repeat_interleave(lowering, node, arguments, at):
    source, dim = node.args[0], arguments["dim"]
    if dim is None and fake(source).dim() != 1:
        raise Unsupported("it repeats elements of a flattened tensor")
    dim = dimension(source, dim or 0)
    return lowering.value(source, replaced(at, dim, lowering.index(f"{at[dim]} / {plain(arguments['repeats'])}"))).text


@reads("pixel_shuffle", "pixel_unshuffle")
def _pixel_shuffle(lowering, node, arguments, at):
    *outer, channel, y, x = at
    if "un" in node.target.overloadpacket.__name__:
        r = arguments["downscale_factor"]
        place = f"{channel} / {r * r}", f"{y} * {r} + {channel} / {r} % {r}", f"{x} * {r} + {channel} % {r}"
    else:
        r = arguments["upscale_factor"]
        place = f"({channel} * {r} + {y} % {r}) * {r} + {x} % {r}", f"{y} / {r}", f"{x} / {r}"
    return lowering.value(node.args[0], (*outer, *map(lowering.index, place))).text


@reads("tril", "triu")
def _triangle(lowering, node, arguments, at):
    dtype, lower = result_dtype(node), node.target.overloadpacket.__name__ == "tril"
    inside = f"{at[-1]} - {at[-2]} {'<=' if lower else '>='} {plain(arguments['diagonal'])}"
    return lowering.when(inside, dtype, zero(dtype), lambda: lowering.value(node.args[0], at).text)
