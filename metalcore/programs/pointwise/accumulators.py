"""What reductions keep while they walk over elements, and how two of these become one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from .nodes import arguments_of, fake, name_of
from .numbers import Unsupported, check_dtype, kind, literal, register


class Accumulator(NamedTuple):
    """A reduction's state.

    Attributes:
        operand: the dtype that elements are converted to.
        fields: (dtype, name, the value before the first element) of each register.
        add: the statement that takes in the element `x` at `index`.
        merge: the statement that takes in the state `o`.
        results: the text of each result; `count` is the number of elements.
    """

    operand: torch.dtype
    fields: tuple[tuple[torch.dtype, str, str], ...]
    add: str
    merge: str
    results: tuple[str, ...]
    is_ordered: bool = False  # whether an element's index counts in the order of the tensor's dimensions


def accumulator(node: Node) -> Accumulator:
    """Returns the state of a reduction node."""
    return _MAKERS[name_of(node).split(".")[0]](node, fake(node.args[0]).dtype)


def reduced_dimensions(node: Node) -> tuple[int, ...]:
    """Returns the dimensions that a reduction node removes, in order."""
    arguments, rank = arguments_of(node), fake(node.args[0]).dim()
    dims = arguments.get("dim")
    if dims is None or (isinstance(dims, Sequence) and not dims):
        return tuple(range(rank))
    dims = dims if isinstance(dims, Sequence) else (dims,)
    return tuple(sorted({dim % rank for dim in dims})) if rank else ()


def results_of(node: Node) -> list[torch.Tensor]:
    """Returns the fake tensors of a reduction's results: var_mean has two."""
    value = node.meta.get("val")
    tensors = list(value) if isinstance(value, (tuple, list)) else [fake(node)]
    for result in tensors:
        check_dtype(result.dtype)
    return tensors


def check_reduction(node: Node) -> None:
    """Raises Unsupported where the generator does not take a reduction node."""
    check_dtype(fake(node.args[0]).dtype)
    for result in results_of(node):
        if not all(isinstance(size, int) for size in result.shape):
            raise Unsupported(f"its shape {tuple(result.shape)} is symbolic")
    accumulator(node)


def _summed(node, dtype, start, operator, scale=""):
    result = results_of(node)[0].dtype
    if kind(result) == "b":
        raise Unsupported("its result is a bool")
    held = torch.float32 if result.is_floating_point else torch.int64
    fields = ((held, "a", literal(start, held)),)
    return Accumulator(held, fields, f"s.a {operator}= x;", f"s.a {operator}= o.a;", (f"s.a{scale}",))


def _extreme(function, lowest):
    def make(node, dtype):
        held = torch.uint8 if kind(dtype) == "b" else torch.float32 if dtype.is_floating_point else dtype
        if held.is_floating_point:
            start = "-INFINITY" if lowest else "INFINITY"
        else:
            information = torch.iinfo(held)
            start = literal(information.min if lowest else information.max, held)
        fields = ((held, "a", start),)
        return Accumulator(held, fields, f"s.a = {function}(s.a, x);", f"s.a = {function}(s.a, o.a);", ("s.a",))

    return make


def _place(operator):
    def make(node, dtype):
        held = torch.uint8 if kind(dtype) == "b" else torch.float32 if dtype.is_floating_point else dtype
        fields = ((held, "a", f"{register(held)}(0)"), (torch.int64, "i", "-1"))
        # The first NaN, or the first of equal ones.
        better = f"o.a {operator} s.a || (o.a != o.a && s.a == s.a)"
        equal = "(o.a == s.a || (o.a != o.a && s.a != s.a)) && o.i < s.i"
        merge = f"if (o.i >= 0 && (s.i < 0 || {better} || ({equal}))) s = o;"
        return Accumulator(held, fields, "merge(s, State{x, long(index)});", merge, ("s.i",), is_ordered=True)

    return make


def _logical(start, operator):
    def make(node, dtype):
        text = f"s.a = s.a {operator} "
        fields = ((torch.bool, "a", "true" if start else "false"),)
        return Accumulator(torch.bool, fields, f"{text}x;", f"{text}o.a;", ("s.a",))

    return make


_CHAN = (
    "if (o.n > 0.0f) { const float total = s.n + o.n; const float delta = o.mean - s.mean; "
    "s.mean += delta * (o.n / total); s.m2 += o.m2 + delta * delta * (s.n * (o.n / total)); s.n = total; }"
)


def _variance(node, dtype):
    if not dtype.is_floating_point:
        raise Unsupported("PyTorch has no variance of whole numbers")
    correction = arguments_of(node).get("correction")
    correction = 1 if correction is None else correction
    fields = tuple((torch.float32, name, "0.0f") for name in ("mean", "m2", "n"))
    add = "s.n += 1.0f; const float delta = x - s.mean; s.mean += delta / s.n; s.m2 = fma(delta, x - s.mean, s.m2);"
    variance = f"s.m2 / max(count - {literal(correction, torch.float32)}, 0.0f)"
    names = name_of(node).split(".")[0]
    results = (f"sqrt({variance})" if "std" in names else variance, "(s.n > 0.0f ? s.mean : NAN)")
    return Accumulator(torch.float32, fields, add, _CHAN, results[: 2 if names.endswith("_mean") else 1])


_MAKERS: dict[str, Callable[[Node, Any], Accumulator]] = {
    "sum": lambda node, dtype: _summed(node, dtype, 0, "+"),
    "mean": lambda node, dtype: _summed(node, dtype, 0, "+", " / count"),
    "prod": lambda node, dtype: _summed(node, dtype, 1, "*"),
    "amax": _extreme("pw_max", True),
    "amin": _extreme("pw_min", False),
    "max": _extreme("pw_max", True),
    "min": _extreme("pw_min", False),
    "argmax": _place(">"),
    "argmin": _place("<"),
    "any": _logical(False, "||"),
    "all": _logical(True, "&&"),
    **dict.fromkeys(("var", "std", "var_mean", "std_mean"), _variance),
}
