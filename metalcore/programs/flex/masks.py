"""A mask_mod as methods of the struct that kernels have of the caller's functions: see kernels/attention/flex.h."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.fx import Node

from ..pointwise.lowering import Lowering
from ..pointwise.nodes import Value
from ..pointwise.numbers import register
from .bounds import Bound, columns_of, parts_of
from .graphs import Captured

__all__ = ["mask_methods"]

_FAR = 1 << 61  # what is further away shows, or hides, all places there are


def mask_methods(
    mod: Captured | None,
    variable: str,
    arguments: Sequence[str],
    lowering_of: Callable[[], Lowering],
    unpacked: Sequence[str],
) -> list[str]:
    """Returns the methods: the first number of a variable that a mask_mod may show and the one behind the last, what it
    finds in captured tensors for such a number and for a row, and what else is true of a score that it shows.

    Args:
        variable: "k" for the keys of a query, "q" for the queries of a key.
        arguments: the names of the mask_mod's arguments.
        lowering_of: makes a lowering of its graph.
        unpacked: statements that make a head and a query of a row, where rows of one head are those of several.

    Raises:
        Unsupported: the mask_mod does what no kernel can.
    """
    row = "q" if variable == "k" else "k"
    of_column, of_row = arguments.index(variable), arguments.index(row)
    bounds, others = ([], []) if mod is None else parts_of(mod.graph, of_column)
    ends = ["return metal::int2(0, 0x7fffffff);"]
    if mod is not None and bounds:
        ends = [*unpacked, *_ends(mod, bounds, of_column, lowering_of())]
    columns, rows, is_all = [], [], False
    if mod is not None and not unpacked:  # there the number of a head is also that of a query
        columns, is_all = columns_of(mod.graph, others, of_column, of_row)
        rows, _ = columns_of(mod.graph, others, of_row, of_column)
    column_fields, column_lines, of_columns = _found(columns, "found", lowering_of)
    row_fields, row_lines, of_rows = _found(rows, "of_row", lowering_of)
    lines = ["return true;"]
    if others:
        lowering = lowering_of()
        lowering.bind({**of_columns, **of_rows})
        values = [lowering.value(node, ()) for node in others]
        texts = [x.text if x.dtype == torch.bool else f"({x.text} != 0)" for x in values]
        lines = [*unpacked, *lowering.statements, f"return {' & '.join(texts)};"]
    equal = " & ".join(f"(a.v{i} == b.v{i})" for i in range(len(column_fields)))
    every = ", ".join(f"int {argument}" for argument in arguments)
    methods = (
        ("metal::int2", "ends", f"int b, int h, int {row}", ends),
        ("Column", "column", f"int b, int h, int {variable}", column_lines),
        ("Row", "row", f"int b, int h, int {row}", row_lines),
        ("bool", "alike", "Column a, Column b", [f"return {equal or 'true'};"]),
        ("bool", "mask", f"{every}, Column found, Row of_row", lines),
    )
    constants = (("kEnds", bounds), ("kMask", others), ("kColumns", columns), ("kByColumn", is_all))
    structs = (("Column", column_fields), ("Row", row_fields))
    text = [f"  struct {name} {{\n    {' '.join(fields)}\n  }};\n" for name, fields in structs]
    for result, name, of, body in methods:
        body = "".join(f"    {line}\n" for line in body)
        text.append(f"  {result} {name}({of}) const {{\n{body}  }}\n")
    text += [f"  static constexpr constant bool {name} = {str(bool(has)).lower()};\n" for name, has in constants]
    return text


def _found(
    nodes: Sequence[Node], name: str, lowering_of: Callable[[], Lowering]
) -> tuple[list[str], list[str], dict[Node, Value]]:
    """Returns the fields of a struct that holds nodes, the statements that fill it, and the nodes' values in a struct
    that has a name."""
    if not nodes:
        return [], ["return {};"], {}
    lowering = lowering_of()
    values = [lowering.value(node, ()) for node in nodes]
    fields = [f"{register(value.dtype)} v{i};" for i, value in enumerate(values)]
    lines = [*lowering.statements, f"return {{{', '.join(value.text for value in values)}}};"]
    return fields, lines, {node: Value(f"{name}.v{i}", x.dtype) for i, (node, x) in enumerate(zip(nodes, values))}


def _ends(mod: Captured, bounds: Sequence[Bound], variable: int, lowering: Lowering) -> list[str]:
    """Returns the statements of the two numbers of a row."""
    placeholders = [node for node in mod.graph.graph.nodes if node.op == "placeholder"]
    lowering.bind({placeholders[variable]: Value("0", torch.int32)})
    first, end = "0l", "0x7fffffffl"
    for bound in bounds:
        left, right = (_number(lowering, x) for x in (bound.left, bound.right))
        rises, is_end = bound.rises, bound.is_end
        number = f"{right} - {left}" if rises else f"{left} - {right}"
        # A number that equals this one is shown, except by a strict comparison.
        number = lowering.statement("long", f"{number} + {int(is_end != bound.is_strict)}")
        if is_end:
            end = lowering.statement("long", f"metal::min({end}, {number})")
        else:
            first = lowering.statement("long", f"metal::max({first}, {number})")
    ends = (f"int(metal::clamp({x}, 0l, 0x7fffffffl))" for x in (first, end))
    return [*lowering.statements, f"return metal::int2({', '.join(ends)});"]


def _number(lowering: Lowering, operand: Node | int) -> str:
    """Returns a side of a comparison, such that differences of two of them do not overflow."""
    if not isinstance(operand, Node):
        return lowering.operand(operand, torch.int64)
    value = lowering.value(operand, ())
    return f"metal::clamp({value.text}, {-_FAR}l, {_FAR}l)" if value.dtype == torch.int64 else f"long({value.text})"
