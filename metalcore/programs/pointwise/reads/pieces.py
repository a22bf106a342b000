"""Results that are put together of several tensors, or of one and zeros."""

from __future__ import annotations

from collections.abc import Callable

from ..nodes import fake, plain, result_dtype
from ..numbers import register
from .table import At, dimension, element_as, plus, reads, replaced, zero
from .views import bounds


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
