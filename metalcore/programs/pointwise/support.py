"""What the generator takes."""

from __future__ import annotations

import operator

import torch
from torch.fx import Node

from .accumulators import check_reduction
from .formulas import FORMULAS
from .lowering import OPERATIONS, REDUCTIONS, Lowering, Value, fake, name_of, result_dtype
from .numbers import Unsupported

__all__ = ["OPERATIONS", "REDUCTIONS", "check", "supports", "tables"]

_KINDS = {"f": "floating point", "i": "whole numbers", "b": "bool"}


def supports(node: Node) -> str | None:
    """The reason why the generator does not take a node of a graph, or None where it takes it.

    The node and its operands must have their fake tensors as meta["val"].
    """
    try:
        check(node)
    except Unsupported as reason:
        return str(reason)
    return None


def check(node: Node) -> None:
    """Raises Unsupported where the generator does not take a node."""
    if node.target is operator.getitem and name_of(node.args[0]) in REDUCTIONS:  # pyright: ignore[reportArgumentType]
        return
    if node.op == "call_function" and name_of(node) in REDUCTIONS:
        check_reduction(node)
        return
    if node.op != "call_function" or name_of(node) not in OPERATIONS:
        raise Unsupported(f"{node.target} is no operation that the generator knows")
    device = fake(node).device
    for operand in node.all_input_nodes:
        result_dtype(operand)
        if fake(operand).device != device and fake(operand).dim():
            raise Unsupported(f"its operand {operand} is on {fake(operand).device}, and its result on {device}")
        _check_shape(node, operand)
    leaves = {operand: f"x{index}" for index, operand in enumerate(node.all_input_nodes)}
    alone = Lowering(leaves.__getitem__)
    alone.bind({operand: Value(name, result_dtype(operand)) for operand, name in leaves.items()})
    alone.value(node)


def _check_shape(node, operand):
    try:
        fits = torch.broadcast_shapes(fake(operand).shape, fake(node).shape) == fake(node).shape
    except RuntimeError:
        fits = False
    if not fits and not name_of(node).startswith(("full_like", "ones_like", "zeros_like", "new_")):
        shapes = f"{tuple(fake(operand).shape)} to {tuple(fake(node).shape)}"
        raise Unsupported(f"its operand {operand} does not broadcast from {shapes}")


def tables() -> list[str]:
    """The lines of Markdown tables of all operators that the generator takes."""
    lines = ["| pointwise | overloads | dtypes |", "| --- | --- | --- |"]
    overloads: dict[str, list[str]] = {}
    for name in OPERATIONS:
        packet, overload = name.rsplit(".", 1)
        overloads.setdefault(packet, []).append(overload)
    for packet, names in overloads.items():
        kinds = {kind for name in names for kind in _kinds(f"{packet}.{name}")}
        dtypes = ", ".join(words for kind, words in _KINDS.items() if kind in kinds)
        lines.append(f"| `{packet}` | {', '.join(f'`{name}`' for name in names)} | {dtypes} |")
    lines += ["", "| reduction | overloads |", "| --- | --- |"]
    reductions: dict[str, list[str]] = {}
    for name in REDUCTIONS:
        packet, overload = name.split(".")
        reductions.setdefault(packet, []).append(overload)
    return lines + [f"| `{packet}` | {', '.join(f'`{n}`' for n in names)} |" for packet, names in reductions.items()]


def _kinds(name):
    formula = FORMULAS.get(name)
    if formula is None:
        return "fi" if name.startswith("clamp") else "fib"
    return "fib" if formula.makes_float else "".join(formula.text)
