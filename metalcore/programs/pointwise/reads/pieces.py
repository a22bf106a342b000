"""Results that are put together of several tensors, or of one and a filling, and nearest upsampling."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..nodes import fake, plain, result_dtype
from ..numbers import Unsupported, literal, register
from .views import At, bounds, dimension, element_as, plus, reads, replaced, within, zero


@reads("cat", "concat")
def _cat(lowering, node, arguments, at):
    dtype = result_dtype(node)
    # PyTorch takes empty tensors of one dimension beside those of other shapes.
    sources = [source for source in node.args[0] if fake(source).numel()]
    dim = dimension(node, arguments["dim"])
    name = lowering.variable(register(dtype), zero(dtype))
    begin = 0
    for source in sources:
        end = begin + fake(source).shape[dim]
        with lowering.scope(f"if ({at[dim]} >= {begin} && {at[dim]} < {end})"):
            own = replaced(at, dim, plus(lowering, at[dim], -begin))
            lowering.statements.append(f"{name} = {element_as(lowering, source, own, dtype)};")
        begin = end
    return name


@reads("stack")
def _stack(lowering, node, arguments, at):
    dtype, dim = result_dtype(node), dimension(node, arguments["dim"])
    own = at[:dim] + at[dim + 1 :]
    name = lowering.variable(register(dtype), zero(dtype))
    for k, source in enumerate(node.args[0]):
        with lowering.scope(f"if ({at[dim]} == {k})"):
            lowering.statements.append(f"{name} = {element_as(lowering, source, own, dtype)};")
    return name


def _either(lowering, inside: str, source, own: Callable[[], At], outside: Callable[[], str], dtype):
    """Returns the source's element where `inside` holds, and what `outside` gives elsewhere; each computed in its
    branch."""
    name = lowering.variable(register(dtype), zero(dtype))
    with lowering.scope(f"if ({inside})"):
        lowering.statements.append(f"{name} = {element_as(lowering, source, own(), dtype)};")
    with lowering.scope("else"):
        lowering.statements.append(f"{name} = {outside()};")
    return name


def _slice_or(lowering, node, source, outside: Callable[[], str], arguments, at, shape):
    """Returns the element of what lies in a slice, and another one elsewhere."""
    dtype, dim = result_dtype(node), dimension(node, arguments["dim"])
    start, step = bounds(arguments, shape[dim])
    count = fake(source).shape[dim]
    place = lowering.index(f"{at[dim]} - {start}")
    inside = f"{place} >= 0 && {place} < {count * step}" + (f" && {place} % {step} == 0" if step > 1 else "")  # pyright: ignore[reportOperatorIssue]

    def own():
        return replaced(at, dim, lowering.index(f"{place} / {step}") if step > 1 else place)  # pyright: ignore[reportOperatorIssue]

    return _either(lowering, inside, source, own, outside, dtype)


@reads("slice_scatter")
def _slice_scatter(lowering, node, arguments, at):
    def outside():
        return lowering.value(arguments["self"], at).text

    return _slice_or(lowering, node, arguments["src"], outside, arguments, at, fake(node).shape)


@reads("slice_backward")
def _slice_backward(lowering, node, arguments, at):
    nothing = zero(result_dtype(node))
    return _slice_or(lowering, node, arguments["grad_output"], lambda: nothing, arguments, at, fake(node).shape)


def _selected(lowering, node, source, outside, arguments, at):
    dtype, dim, index = result_dtype(node), dimension(node, arguments["dim"]), plain(arguments["index"])
    index += fake(node).shape[dim] if index < 0 else 0
    own = at[:dim] + at[dim + 1 :]
    return _either(lowering, f"{at[dim]} == {index}", source, lambda: own, outside, dtype)


@reads("select_scatter")
def _select_scatter(lowering, node, arguments, at):
    def outside():
        return lowering.value(arguments["self"], at).text

    return _selected(lowering, node, arguments["src"], outside, arguments, at)


@reads("select_backward")
def _select_backward(lowering, node, arguments, at):
    nothing = zero(result_dtype(node))
    return _selected(lowering, node, arguments["grad_output"], lambda: nothing, arguments, at)


@reads("constant_pad_nd", "pad")
@reads(*(f"{name}_pad{n}d" for name in ("reflection", "replication") for n in (1, 2, 3)))
def _pad(lowering, node, arguments, at):
    source, name = node.args[0], node.target.overloadpacket.__name__
    shape, dtype = fake(source).shape, result_dtype(node)
    pads = arguments["pad"] if "pad" in arguments else arguments["padding"]
    mode = arguments.get("mode") or {"reflection": "reflect", "replication": "replicate"}.get(
        name.split("_")[0], "constant"
    )
    coordinates, inside = list(at), []
    for k in range(len(pads) // 2):
        d, left, right = len(shape) - 1 - k, plain(pads[2 * k]), plain(pads[2 * k + 1])
        if left == right == 0:
            continue
        size, place = shape[d], plus(lowering, at[d], -left)  # pyright: ignore[reportArgumentType]
        if mode == "constant":
            inside.append(within(place, size)) if left > 0 or right > 0 else None  # pyright: ignore[reportOperatorIssue]
        elif mode == "replicate":
            place = lowering.index(f"min(max({place}, 0), {size - 1})")
        elif mode == "reflect":
            place = lowering.index(f"{size - 1} - abs({size - 1} - abs({place}))")
        elif mode == "circular":
            place = lowering.index(f"int(uint({place} + {size}) % {size}u)")
        else:
            raise Unsupported(f"padding of mode {mode!r}")
        coordinates[d] = place
    if not inside:
        return lowering.value(source, tuple(coordinates)).text
    filling = lowering.operand(arguments.get("value") or 0, dtype)
    return lowering.when(" && ".join(inside), dtype, filling, lambda: lowering.value(source, tuple(coordinates)).text)


def _nearest(lowering, node, arguments, at):
    source, exact = node.args[0], "exact" in node.target.overloadpacket.__name__
    spatial = len(at) - 2
    scales = arguments.get("scale_factors") or [
        arguments.get(name)
        for name in {1: ("scales",), 2: ("scales_h", "scales_w")}.get(spatial, ("scales_d", "scales_h", "scales_w"))
    ]
    coordinates = list(at)
    for d, scale in zip(range(2, len(at)), scales):
        size, new = fake(source).shape[d], fake(node).shape[d]
        step = literal(1.0 / scale if scale else size / new, torch.float32)
        place = f"(float({at[d]}) + 0.5f) * {step}" if exact else f"float({at[d]}) * {step}"
        coordinates[d] = (
            lowering.index(f"min(int(floor({place})), {size - 1})")
            if size != new or scale not in (None, 1.0)
            else at[d]
        )
    return lowering.value(source, tuple(coordinates)).text


for _n in (1, 2, 3):
    for _overload in ("default", "vec"):
        reads(f"upsample_nearest{_n}d.{_overload}", f"_upsample_nearest_exact{_n}d.{_overload}")(_nearest)
