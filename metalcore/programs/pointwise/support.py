"""What the generator takes."""

from __future__ import annotations

import operator

import torch
from torch.fx import Node

from .accumulators import check_reduction, results_of
from .formulas import FORMULAS
from .lowering import INDEXED, OPERATIONS, Lowering
from .nodes import REDUCTIONS, SCANS, WRITES, Value, fake, name_of, result_dtype
from .numbers import Unsupported
from .parts import check_reach
from .scan import threads_of
from .writes import statements

__all__ = ["OPERATIONS", "REDUCTIONS", "check", "is_elementwise", "supports", "tables"]

_KINDS = {"f": "floating point", "i": "whole numbers", "b": "bool"}


def supports(node: Node) -> str | None:
    """Returns why the generator does not take a node of a graph, or None where it takes it.

    The node and its operands must have their fake tensors as meta["val"].
    """
    try:
        check(node)
    except Unsupported as reason:
        return str(reason)
    return None


def is_elementwise(node: Node) -> bool:
    """Returns whether an operation reads its operands at the place of the element that it makes."""
    return name_of(node) in OPERATIONS


def check(node: Node) -> None:
    """Raises Unsupported where the generator does not take a node."""
    if node.target is operator.getitem and name_of(node.args[0]) in (*REDUCTIONS, *INDEXED):  # pyright: ignore[reportArgumentType]
        return
    if node.op == "call_function" and name_of(node) in REDUCTIONS:
        check_reduction(node)
        return
    if node.op != "call_function" or name_of(node) not in (*OPERATIONS, *INDEXED, *WRITES, *SCANS):
        raise Unsupported(f"{node.target} is no operation that the generator knows")
    is_indexed = name_of(node) not in OPERATIONS
    results = results_of(node)
    device = results[0].device
    for operand in node.all_input_nodes:
        result_dtype(operand)
        if fake(operand).device != device and fake(operand).dim():
            raise Unsupported(f"its operand {operand} is on {fake(operand).device}, and its result on {device}")
        if is_indexed:
            check_reach(fake(operand))
        else:
            _check_shape(node, operand)
    if is_indexed:
        check_reach(results[0])
    leaves = {operand: f"x{index}" for index, operand in enumerate(node.all_input_nodes)}
    alone = Lowering(lambda leaf, at: leaves[leaf])
    alone.bind({operand: Value(name, result_dtype(operand)) for operand, name in leaves.items()})
    if name_of(node) in WRITES:
        statements(alone, node, results[0].stride())
        return
    if name_of(node) in SCANS:
        threads_of(node)
        return
    alone.value(node, tuple(f"c{d}" for d in range(results[0].dim())) if is_indexed else None)


def _check_shape(node, operand):
    try:
        fits = torch.broadcast_shapes(fake(operand).shape, fake(node).shape) == fake(node).shape
    except RuntimeError:
        fits = False
    if not fits and not name_of(node).startswith(("full_like", "ones_like", "zeros_like", "new_")):
        shapes = f"{tuple(fake(operand).shape)} to {tuple(fake(node).shape)}"
        raise Unsupported(f"its operand {operand} does not broadcast from {shapes}")


def tables() -> list[str]:
    """Returns the lines of Markdown tables of all operators that the generator takes."""
    lines = ["| pointwise | overloads | dtypes |", "| --- | --- | --- |"]
    overloads: dict[str, list[str]] = {}
    for name in OPERATIONS:
        packet, overload = name.rsplit(".", 1)
        overloads.setdefault(packet, []).append(overload)
    for packet, names in overloads.items():
        kinds = {kind for name in names for kind in _kinds(f"{packet}.{name}")}
        dtypes = ", ".join(words for kind, words in _KINDS.items() if kind in kinds)
        lines.append(f"| `{packet}` | {', '.join(f'`{name}`' for name in names)} | {dtypes} |")
    for title, operators in {
        "reduction": REDUCTIONS,
        "reads other elements": INDEXED,
        "writes by indices": WRITES,
        "scan": SCANS,
    }.items():
        lines += ["", f"| {title} | overloads |", "| --- | --- |"]
        overloads_of: dict[str, list[str]] = {}
        for name in operators:
            packet, overload = name.rsplit(".", 1)
            overloads_of.setdefault(packet, []).append(overload)
        lines += [f"| `{packet}` | {', '.join(f'`{n}`' for n in names)} |" for packet, names in overloads_of.items()]
    return lines


def _kinds(name):
    formula = FORMULAS.get(name)
    if formula is None:
        return "fi" if name.startswith("clamp") else "fib"
    return "fib" if formula.makes_float else "".join(formula.text)
