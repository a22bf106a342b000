"""Operations that compute an element from several of their operand: pooling, and norms with statistics that are given.

A function of the table gets what those of `reads` get, and returns the registers of all results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch.fx import Node

from .nodes import Value, arguments_of, fake, name_of, plain, shape_of
from .numbers import Unsupported, kind, literal, register

MEASURED: dict[str, Callable] = {}
MOST_ELEMENTS = 256  # of a window. Reductions share longer ones among threads
F32 = torch.float32


class Window(NamedTuple):
    """The elements of one dimension from which a result is computed: for each result a loop's head, in which `place` is
    the coordinate, and the first and the last but one of the window as it is before padding is cut off.

    Attributes:
        stride: from one result's window to that of the next.
        most: how many there are at most.
    """

    begin: str
    end: str
    step: int
    size: int
    padding: int
    stride: int
    most: int


def windows_of(node: Node, at: Sequence[str]) -> list[Window]:
    """Returns the windows of a pooling operation in each of its last dimensions, for a result's coordinates."""
    name, arguments = name_of(node).split(".")[0], arguments_of(node)
    spatial = int(name.split("pool")[1][0])
    source, shape = fake(node.args[0]), shape_of(node)
    sizes, outputs = source.shape[-spatial:], shape[-spatial:]
    own = at[len(at) - spatial :]
    if "adaptive" in name:
        return [_adaptive(c, size, new) for c, size, new in zip(own, sizes, outputs)]

    def each(key, default):
        numbers = arguments.get(key, default)
        numbers = numbers if isinstance(numbers, Sequence) else [numbers]
        numbers = [plain(number) for number in numbers] or each("kernel_size", 1)
        return list(numbers) * (spatial if len(numbers) == 1 else 1)

    kernels, strides = each("kernel_size", 1), each("stride", [])
    return [
        Window(
            f"{c} * {stride} - {padding}",
            f"{c} * {stride} - {padding} + {(kernel - 1) * dilation + 1}",
            *(dilation, size, padding, stride, kernel),
        )
        for c, size, kernel, stride, padding, dilation in zip(
            own, sizes, kernels, strides, each("padding", 0), each("dilation", 1)
        )
    ]


def _adaptive(c, size, new):
    """Returns the window from floor(c size / new) to ceil((c + 1) size / new)."""
    if size % new == 0:
        step = size // new
        return Window(f"{c} * {step}", f"{c} * {step} + {step}", 1, size, 0, step, step)
    begin, end = f"{c} * {size} / {new}", f"(({c} + 1) * {size} + {new - 1}) / {new}"
    return Window(begin, end, 1, size, 0, 0, size // new + 2)


def elements_of(node: Node) -> int:
    """Returns how many elements of its operand an operation reads for one of its results."""
    if "pool" not in name_of(node):
        return 1
    return math.prod(window.most for window in windows_of(node, ("0",) * len(shape_of(node))))


def _checked(node, at):
    windows = windows_of(node, at)
    if elements_of(node) > MOST_ELEMENTS:
        raise Unsupported(f"windows of {elements_of(node)} elements; more than {MOST_ELEMENTS} are for reductions")
    return windows


def _walk(lowering, node, at, windows, body: Callable[[list[str], str], None]):
    """Returns statements that run for each element of a window."""
    begins = [lowering.index(window.begin) for window in windows]
    ends = [lowering.index(window.end) for window in windows]
    names = [f"w{lowering.next()}" for _ in windows]

    def inner(k):
        if k == len(windows):
            value = lowering.value(node.args[0], (*at[: len(at) - len(windows)], *names))
            body(names, value)
            return
        window, name = windows[k], names[k]
        with lowering.scope(f"for (int {name} = {begins[k]}; {name} < {ends[k]}; {name} += {window.step})"):
            if window.padding or not _fits(node, window, k - len(windows)):
                lowering.statements.append(f"if (uint({name}) >= {window.size}u) continue;")
            inner(k + 1)

    inner(0)
    return begins, ends


def _fits(node, window, dim):
    """Returns whether the last window ends within the operand, which it may not with ceil_mode."""
    if "adaptive" in name_of(node):
        return True
    last = shape_of(node)[dim] - 1
    return last * window.stride - window.padding + (window.most - 1) * window.step < window.size


def _largest(lowering, node, arguments, at):
    windows, source = _checked(node, at), fake(node.args[0])
    dtype = source.dtype
    if kind(dtype) == "b":
        raise Unsupported("PyTorch has no pooling of bools")
    start = "-INFINITY" if kind(dtype) == "f" else literal(torch.iinfo(dtype).min, dtype)
    best, place = lowering.variable(register(dtype), start), lowering.variable("int", "-1")
    sizes = source.shape[-len(windows) :]

    def body(names, value):
        here = names[0]
        for name, size in zip(names[1:], sizes[1:]):
            here = f"({here}) * {size} + {name}"
        lowering.statements.append(
            f"if ({place} < 0 || {value.text} > {best} || {value.text} != {value.text}) "
            f"{{ {best} = {value.text}; {place} = {here}; }}"
        )

    _walk(lowering, node, at, windows, body)
    return [Value(best, dtype), Value(lowering.statement("long", place), torch.int64)]


def _mean(lowering, node, arguments, at):
    windows, dtype = _checked(node, at), fake(node.args[0]).dtype
    if kind(dtype) != "f":
        raise Unsupported("means of whole numbers")
    total = lowering.variable("float", "0.0f")

    def body(names, value):
        lowering.statements.append(f"{total} += {value.text};")

    begins, ends = _walk(lowering, node, at, windows, body)
    divisor = plain(arguments.get("divisor_override"))
    if divisor is None:
        # What lies beyond the padding counts in no mode, and padding only where it is wanted.
        cut = 0 if arguments.get("count_include_pad", True) else 1
        lengths = []
        for window, begin, end in zip(windows, begins, ends):
            edge = window.size if cut else window.size + window.padding
            first = f"max({begin}, 0)" if cut else begin
            lengths.append(f"(min({end}, {edge}) - {first})")
        divisor = f"float({' * '.join(lengths)})"
    else:
        divisor = literal(divisor, F32)  # pyright: ignore[reportArgumentType]
    return [lowering.rounded(f"{total} / {divisor}", dtype, dtype)]


for _n in (1, 2, 3):
    MEASURED |= {f"max_pool{_n}d.default": _largest, f"max_pool{_n}d_with_indices.default": _largest}
    MEASURED |= {f"adaptive_max_pool{_n}d.default": _largest, f"avg_pool{_n}d.default": _mean}
    MEASURED |= {f"adaptive_avg_pool{_n}d.default": _mean, f"_adaptive_avg_pool{_n}d.default": _mean}
del MEASURED["_adaptive_avg_pool1d.default"]


def _batch_norm(lowering, node, arguments, at):
    """Returns (x - mean) / sqrt(variance + eps) * weight + bias, with statistics of each channel that are given."""
    if arguments.get("training"):
        raise Unsupported("it computes statistics")
    source, dtype = arguments["input"], fake(arguments["input"]).dtype
    names = ("running_mean", "running_var", "weight", "bias")
    if arguments["running_mean"] is None or arguments["running_var"] is None:
        raise Unsupported("it has no statistics")
    mean, variance, weight, bias = (
        lowering.value(arguments[name], (at[1],)).text if arguments.get(name) is not None else None for name in names
    )
    scale = lowering.statement("float", f"1.0f / sqrt({variance} + {literal(arguments['eps'], F32)})")
    if weight is not None:
        scale = lowering.statement("float", f"{scale} * {weight}")
    text = f"({lowering.value(source, at).text} - {mean}) * {scale}"
    normalized_text = lowering.rounded(f"{text} + {bias}" if bias is not None else text, dtype, dtype)
    if isinstance(node.meta["val"], torch.Tensor):
        return [normalized_text]
    raise Unsupported("its results with the statistics of a batch")


MEASURED |= {"batch_norm.default": _batch_norm}
