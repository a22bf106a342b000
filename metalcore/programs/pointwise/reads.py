"""Operations whose elements are elements of their operands, at other coordinates.

A function of the table gets the lowering, the node, its arguments by name, and the coordinates of an element of the
result: texts, one for each dimension. It returns the element's register.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch.fx import Node

from .nodes import fake, plain, result_dtype
from .numbers import Unsupported, converted, kind, literal, register

READS: dict[str, Callable] = {}

At = tuple[str, ...]


def _reads(*names):
    def enter(function):
        READS.update(dict.fromkeys((name if "." in name else f"{name}.default" for name in names), function))  # pyright: ignore[reportArgumentType, reportCallIssue]
        return function

    return enter


def dimension(node: Node, dim: int, more: int = 0) -> int:
    """A dimension of a node's result, counted from the first."""
    return plain(dim) % max(1, fake(node).dim() + more)


def _with(at: Sequence[str], dim: int, coordinate: str) -> At:
    """Coordinates of which one is another. A tensor without dimensions has none."""
    return tuple(coordinate if d == dim else c for d, c in enumerate(at))


def _plus(lowering, coordinate: str, number: int) -> str:
    return lowering.index(f"{coordinate} {'-' if number < 0 else '+'} {abs(number)}" if number else coordinate)


def _zero(dtype) -> str:
    return literal(0, dtype)


def _missing(dtype) -> str:
    """What stands for an element that does not exist, because an index is out of range."""
    return "NAN" if dtype.is_floating_point else _zero(dtype)


def _within(coordinate: str, size: int) -> str:
    return f"uint({coordinate}) < {size}u"


def _as(lowering, node, at, dtype) -> str:
    """The register of a node's element as one of a dtype."""
    value = lowering.value(node, at)
    return lowering.rounded(value.text, value.dtype, dtype).text if value.dtype != dtype else value.text


# Views and copies -------------------------------------------------------------------------------------------------


@_reads(*"view reshape _unsafe_view _reshape_copy view_copy flatten.using_ints unflatten.int unsqueeze".split())
@_reads(*"squeeze squeeze.dim squeeze.dims prims.view_of unsqueeze_copy".split())
def _view(lowering, node, arguments, at):
    return lowering.value(node.args[0], _reshaped(lowering, at, fake(node).shape, fake(node.args[0]).shape)).text


def _reshaped(lowering, at: Sequence[str], shape: Sequence[int], other: Sequence[int]) -> At:
    """The coordinates in another shape of as many elements. Dimensions that both have stay as they are."""
    made: list[str] = []
    k = 0
    if 0 in other:
        return ("0",) * len(other)
    for j, size in enumerate(other):
        if len(made) > j:
            continue
        if size == 1:
            made.append("0")
            continue
        # The least runs of dimensions with the same number of elements.
        mine, theirs, first, last = 1, size, k, j + 1
        while mine != theirs:
            if mine < theirs:
                mine, k = mine * shape[k], k + 1
            else:
                theirs, last = theirs * other[last], last + 1
        kept = [d for d in range(first, k) if shape[d] != 1]
        if len(kept) == 1 and last == j + 1:
            made.append(at[kept[0]])
            continue
        place = ""
        for d in kept:
            place = f"({place}) * {shape[d]} + {at[d]}" if place else at[d]
        rest = lowering.index(place or "0")
        for d in range(last - 1, j, -1):
            made.insert(j, lowering.index(f"int(uint({rest}) % {other[d]}u)"))
            rest = lowering.index(f"int(uint({rest}) / {other[d]}u)")
        made.insert(j, rest)
    return tuple(made)


@_reads("permute", "transpose.int", "t", "numpy_T", "permute_copy", "transpose_copy.int", "swapaxes", "movedim.int")
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
    found = dict(zip(order, at))
    return lowering.value(source, tuple(found[d] for d in range(rank))).text


@_reads("select.int", "select_copy.int")
def _select(lowering, node, arguments, at):
    source = node.args[0]
    dim, index = dimension(source, arguments["dim"]), plain(arguments["index"])
    index += fake(source).shape[dim] if index < 0 else 0
    return lowering.value(source, (*at[:dim], str(index), *at[dim:])).text


def _bounds(arguments, size):
    """The first element of a slice, and the step."""
    start, step = plain(arguments.get("start")), plain(arguments.get("step", 1))
    start = 0 if start is None else start
    return min(max(start + size if start < 0 else start, 0), size), step


@_reads("slice.Tensor", "slice_copy.Tensor", "narrow")
def _slice(lowering, node, arguments, at):
    source = node.args[0]
    dim = dimension(source, arguments["dim"])
    start, step = _bounds(arguments, fake(source).shape[dim])
    place = at[dim] if step == 1 else f"{at[dim]} * {step}"
    return lowering.value(source, _with(at, dim, _plus(lowering, place, start))).text  # pyright: ignore[reportArgumentType]


@_reads("diagonal", "diagonal_copy")
def _diagonal(lowering, node, arguments, at):
    source, offset = node.args[0], plain(arguments["offset"])
    first, second = dimension(source, arguments["dim1"]), dimension(source, arguments["dim2"])
    others = iter(at[:-1])
    own = {first: _plus(lowering, at[-1], max(-offset, 0)), second: _plus(lowering, at[-1], max(offset, 0))}  # pyright: ignore[reportArgumentType]
    return lowering.value(source, tuple(own.get(d) or next(others) for d in range(fake(source).dim()))).text


@_reads("flip")
def _flip(lowering, node, arguments, at):
    source, made = node.args[0], at
    for dim in {dimension(source, d) for d in arguments["dims"]}:
        if at:
            made = _with(made, dim, lowering.index(f"{fake(node).shape[dim] - 1} - {at[dim]}"))
    return lowering.value(source, made).text


@_reads("roll")
def _roll(lowering, node, arguments, at):
    source, made = node.args[0], at
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
            made = _with(made, dim, lowering.index(f"int(uint({made[dim]} + {size - shift % size}) % {size}u)"))
    return lowering.value(source, made).text


@_reads("repeat")
def _repeat(lowering, node, arguments, at):
    source = node.args[0]
    shape = fake(source).shape
    own = at[len(at) - len(shape) :]
    sizes = fake(node).shape[len(at) - len(shape) :]
    made = (
        c if new == size else lowering.index(f"int(uint({c}) % {size}u)") for c, size, new in zip(own, shape, sizes)
    )
    return lowering.value(source, tuple(made)).text


@_reads("repeat_interleave.self_int")
def _repeat_interleave(lowering, node, arguments, at):
    source, dim = node.args[0], arguments["dim"]
    if dim is None and fake(source).dim() != 1:
        raise Unsupported("it repeats elements of a flattened tensor")
    dim = dimension(source, dim or 0)
    return lowering.value(source, _with(at, dim, lowering.index(f"{at[dim]} / {plain(arguments['repeats'])}"))).text


@_reads("pixel_shuffle", "pixel_unshuffle")
def _pixel_shuffle(lowering, node, arguments, at):
    *outer, channel, y, x = at
    if "un" in node.target.overloadpacket.__name__:
        r = arguments["downscale_factor"]
        place = f"{channel} / {r * r}", f"{y} * {r} + {channel} / {r} % {r}", f"{x} * {r} + {channel} % {r}"
    else:
        r = arguments["upscale_factor"]
        place = f"({channel} * {r} + {y} % {r}) * {r} + {x} % {r}", f"{y} / {r}", f"{x} / {r}"
    return lowering.value(node.args[0], (*outer, *map(lowering.index, place))).text


@_reads("tril", "triu")
def _triangle(lowering, node, arguments, at):
    dtype, lower = result_dtype(node), node.target.overloadpacket.__name__ == "tril"
    inside = f"{at[-1]} - {at[-2]} {'<=' if lower else '>='} {plain(arguments['diagonal'])}"
    return lowering.when(inside, dtype, _zero(dtype), lambda: lowering.value(node.args[0], at).text)


# Parts of several tensors -----------------------------------------------------------------------------------------


@_reads("cat", "concat")
def _cat(lowering, node, arguments, at):
    dtype = result_dtype(node)
    # PyTorch takes empty tensors of one dimension beside those of other shapes.
    sources = [source for source in node.args[0] if fake(source).numel()]
    dim = dimension(node, arguments["dim"])
    name = lowering.variable(register(dtype), _zero(dtype))
    begin = 0
    for source in sources:
        end = begin + fake(source).shape[dim]
        with lowering.scope(f"if ({at[dim]} >= {begin} && {at[dim]} < {end})"):
            own = _with(at, dim, _plus(lowering, at[dim], -begin))
            lowering.statements.append(f"{name} = {_as(lowering, source, own, dtype)};")
        begin = end
    return name


@_reads("stack")
def _stack(lowering, node, arguments, at):
    dtype, dim = result_dtype(node), dimension(node, arguments["dim"])
    own = at[:dim] + at[dim + 1 :]
    name = lowering.variable(register(dtype), _zero(dtype))
    for k, source in enumerate(node.args[0]):
        with lowering.scope(f"if ({at[dim]} == {k})"):
            lowering.statements.append(f"{name} = {_as(lowering, source, own, dtype)};")
    return name


def _slice_or(lowering, node, source, outside: Callable[[], str], arguments, at, shape):
    """The element of what lies in a slice, and another one elsewhere."""
    dtype, dim = result_dtype(node), dimension(node, arguments["dim"])
    start, step = _bounds(arguments, shape[dim])
    count = fake(source).shape[dim]
    place = lowering.index(f"{at[dim]} - {start}")
    inside = f"{place} >= 0 && {place} < {count * step}" + (f" && {place} % {step} == 0" if step > 1 else "")  # pyright: ignore[reportOperatorIssue]
    name = lowering.variable(register(dtype), _zero(dtype))
    with lowering.scope(f"if ({inside})"):
        own = _with(at, dim, lowering.index(f"{place} / {step}") if step > 1 else place)  # pyright: ignore[reportOperatorIssue]
        lowering.statements.append(f"{name} = {_as(lowering, source, own, dtype)};")
    with lowering.scope("else"):
        lowering.statements.append(f"{name} = {outside()};")
    return name


@_reads("slice_scatter")
def _slice_scatter(lowering, node, arguments, at):
    def outside():
        return lowering.value(arguments["self"], at).text

    return _slice_or(lowering, node, arguments["src"], outside, arguments, at, fake(node).shape)


@_reads("slice_backward")
def _slice_backward(lowering, node, arguments, at):
    zero = _zero(result_dtype(node))
    return _slice_or(lowering, node, arguments["grad_output"], lambda: zero, arguments, at, fake(node).shape)


def _selected(lowering, node, source, outside, arguments, at):
    dtype, dim, index = result_dtype(node), dimension(node, arguments["dim"]), plain(arguments["index"])
    index += fake(node).shape[dim] if index < 0 else 0
    name = lowering.variable(register(dtype), _zero(dtype))
    with lowering.scope(f"if ({at[dim]} == {index})"):
        lowering.statements.append(f"{name} = {_as(lowering, source, at[:dim] + at[dim + 1 :], dtype)};")
    with lowering.scope("else"):
        lowering.statements.append(f"{name} = {outside()};")
    return name


@_reads("select_scatter")
def _select_scatter(lowering, node, arguments, at):
    def outside():
        return lowering.value(arguments["self"], at).text

    return _selected(lowering, node, arguments["src"], outside, arguments, at)


@_reads("select_backward")
def _select_backward(lowering, node, arguments, at):
    zero = _zero(result_dtype(node))
    return _selected(lowering, node, arguments["grad_output"], lambda: zero, arguments, at)


# Padding ----------------------------------------------------------------------------------------------------------


@_reads("constant_pad_nd", "pad")
@_reads(*(f"{name}_pad{n}d" for name in ("reflection", "replication") for n in (1, 2, 3)))
def _pad(lowering, node, arguments, at):
    source, name = node.args[0], node.target.overloadpacket.__name__
    shape, dtype = fake(source).shape, result_dtype(node)
    pads = arguments["pad"] if "pad" in arguments else arguments["padding"]
    mode = arguments.get("mode") or {"reflection": "reflect", "replication": "replicate"}.get(
        name.split("_")[0], "constant"
    )
    made, inside = list(at), []
    for k in range(len(pads) // 2):
        d, left, right = len(shape) - 1 - k, plain(pads[2 * k]), plain(pads[2 * k + 1])
        if left == right == 0:
            continue
        size, place = shape[d], _plus(lowering, at[d], -left)  # pyright: ignore[reportArgumentType]
        if mode == "constant":
            inside.append(_within(place, size)) if left > 0 or right > 0 else None  # pyright: ignore[reportOperatorIssue]
        elif mode == "replicate":
            place = lowering.index(f"min(max({place}, 0), {size - 1})")
        elif mode == "reflect":
            place = lowering.index(f"{size - 1} - abs({size - 1} - abs({place}))")
        elif mode == "circular":
            place = lowering.index(f"int(uint({place} + {size}) % {size}u)")
        else:
            raise Unsupported(f"padding of mode {mode!r}")
        made[d] = place
    if not inside:
        return lowering.value(source, tuple(made)).text
    filling = lowering.operand(arguments.get("value") or 0, dtype)
    return lowering.when(" && ".join(inside), dtype, filling, lambda: lowering.value(source, tuple(made)).text)


def _nearest(lowering, node, arguments, at):
    source, exact = node.args[0], "exact" in node.target.overloadpacket.__name__
    spatial = len(at) - 2
    scales = arguments.get("scale_factors") or [
        arguments.get(name)
        for name in {1: ("scales",), 2: ("scales_h", "scales_w")}.get(spatial, ("scales_d", "scales_h", "scales_w"))
    ]
    made = list(at)
    for d, scale in zip(range(2, len(at)), scales):
        size, new = fake(source).shape[d], fake(node).shape[d]
        step = literal(1.0 / scale if scale else size / new, torch.float32)
        place = f"(float({at[d]}) + 0.5f) * {step}" if exact else f"float({at[d]}) * {step}"
        made[d] = (
            lowering.index(f"min(int(floor({place})), {size - 1})")
            if size != new or scale not in (None, 1.0)
            else at[d]
        )
    return lowering.value(source, tuple(made)).text


for _n in (1, 2, 3):
    for _overload in ("default", "vec"):
        _reads(f"upsample_nearest{_n}d.{_overload}", f"_upsample_nearest_exact{_n}d.{_overload}")(_nearest)


# Indices in tensors -----------------------------------------------------------------------------------------------


def looked_up(lowering, index: Node, at: Sequence[str], size: int, *, wraps: bool = False) -> tuple[str, str]:
    """The number that a tensor of indices has at some coordinates, and the condition that it is within a size.

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
    """The element at coordinates of which those that are None come from tensors of indices."""
    dtype, numbers = result_dtype(node), list(numbers)

    def make():
        found = iter([lowering.index(f"int({number})") for number, _ in numbers])
        return lowering.value(source, tuple(next(found) if c is None else c for c in at)).text

    return lowering.when(" && ".join(inside for _, inside in numbers), dtype, _missing(dtype), make)


@_reads("gather")
def _gather(lowering, node, arguments, at):
    source, dim = arguments["self"], dimension(arguments["self"], arguments["dim"])
    number = looked_up(lowering, arguments["index"], at, size_of(source, dim))
    return _looked_up_value(lowering, node, source, with_none(at, dim, source), [number])


def size_of(source: Node, dim: int) -> int:
    """A dimension's size. A tensor without dimensions counts as one of one element."""
    return fake(source).shape[dim] if fake(source).dim() else 1


def with_none(at: Sequence[str], dim: int, source: Node) -> list[str | None]:
    """The coordinates in a tensor, of which a tensor of indices gives one."""
    return [None if d == dim else at[d] for d in range(fake(source).dim())]


@_reads("index_select")
def _index_select(lowering, node, arguments, at):
    source, index, dim = arguments["self"], arguments["index"], dimension(arguments["self"], arguments["dim"])
    own = at[dim : dim + fake(index).dim()] if at else ("0",) * fake(index).dim()
    number = looked_up(lowering, index, own, size_of(source, dim))
    return _looked_up_value(lowering, node, source, with_none(at, dim, source), [number])


@_reads("embedding")
def _embedding(lowering, node, arguments, at):
    source = arguments["weight"]
    number = looked_up(lowering, arguments["indices"], at[:-1], fake(source).shape[0])
    return _looked_up_value(lowering, node, source, [None, at[-1]], [number])


def advanced(lowering, indices: Sequence[Node | None], shape: Sequence[int], at: Sequence[str]):
    """The coordinates in a tensor of a shape that is indexed by tensors, None where a tensor gives the number, with
    these numbers and conditions, as `looked_up` gives them.

    Args:
        at: the coordinates in the result of x[indices].
    """
    given = [index for index in indices if index is not None]
    for index in given:
        if fake(index).dtype in (torch.bool, torch.uint8):
            raise Unsupported("a mask as index, which makes a shape that depends on numbers")
    places = [d for d, index in enumerate(indices) if index is not None]
    common = torch.broadcast_shapes(*(fake(index).shape for index in given))
    # The indices' dimensions come where the indices are, or first if they are not side by side.
    first = places[0] if places[-1] - places[0] == len(places) - 1 else 0
    of_indices, others = at[first : first + len(common)], iter([*at[:first], *at[first + len(common) :]])
    made, numbers = [], []
    for d, size in enumerate(shape):
        index = indices[d] if d < len(indices) else None
        if index is None:
            made.append(next(others))
            continue
        own = of_indices[len(common) - fake(index).dim() :]
        made.append(None)
        numbers.append(looked_up(lowering, index, own, size, wraps=True))
    return made, numbers


@_reads("index.Tensor")
def _index(lowering, node, arguments, at):
    source = arguments["self"]
    made, numbers = advanced(lowering, arguments["indices"], fake(source).shape, at)
    return _looked_up_value(lowering, node, source, made, numbers)


# What is known from coordinates alone -----------------------------------------------------------------------------


@_reads("arange", "arange.start", "arange.start_step", "prims.iota")
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


@_reads("eye", "eye.m")
def _eye(lowering, node, arguments, at):
    dtype = result_dtype(node)
    return lowering.statement(register(dtype), f"{at[0]} == {at[1]} ? {literal(1, dtype)} : {_zero(dtype)}")
