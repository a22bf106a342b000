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


def mask_methods(
    mod: Captured | None,
    variable: str,
    arguments: Sequence[str],
    lowering_of: Callable[[], Lowering],
    unpacked: Sequence[str],
) -> list[str]:
    """Returns the methods: the first number of a variable that a mask_mod may show and the one behind the last, what it
    finds in captured tensors for such a number, and what else is true of a score that it shows.

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
    columns, is_all = [], False
    if mod is not None and not unpacked:  # there the number of a head is also that of a query
        columns, is_all = columns_of(mod.graph, others, of_column, of_row)
    lowering = lowering_of() if others else None
    fields, found, lines = [], ["return {};"], ["return true;"]
    if lowering and columns:
        values = [lowering.value(node, ()) for node in columns]
        fields = [f"{register(value.dtype)} v{i};" for i, value in enumerate(values)]
        found = [*lowering.statements, f"return {{{', '.join(value.text for value in values)}}};"]
        lowering = lowering_of()
        lowering.bind({node: Value(f"found.v{i}", x.dtype) for i, (node, x) in enumerate(zip(columns, values))})
    if lowering:
        values = [lowering.value(node, ()) for node in others]
        texts = [x.text if x.dtype == torch.bool else f"({x.text} != 0)" for x in values]
        lines = [*unpacked, *lowering.statements, f"return {' & '.join(texts)};"]
    equal = " & ".join(f"(a.v{i} == b.v{i})" for i in range(len(fields)))
    every = ", ".join(f"int {argument}" for argument in arguments)
    methods = (
        ("metal::int2", "ends", f"int b, int h, int {row}", ends),
        ("Column", "column", f"int b, int h, int {variable}", found),
        ("bool", "alike", "Column a, Column b", [f"return {equal or 'true'};"]),
        ("bool", "mask", f"{every}, Column found", lines),
    )
    constants = (("kEnds", bounds), ("kMask", others), ("kColumns", columns), ("kByColumn", is_all))
    text = [f"  struct Column {{\n    {' '.join(fields)}\n  }};\n"]
    for result, name, of, body in methods:
        body = "".join(f"    {line}\n" for line in body)
        text.append(f"  {result} {name}({of}) const {{\n{body}  }}\n")
    text += [f"  static constexpr constant bool {name} = {str(bool(has)).lower()};\n" for name, has in constants]
    return text


def _ends(mod: Captured, bounds: Sequence[Bound], variable: int, lowering: Lowering) -> list[str]:
    """Returns the statements of the two numbers of a row."""
    placeholders = [node for node in mod.graph.graph.nodes if node.op == "placeholder"]
    lowering.bind({placeholders[variable]: Value("0", torch.int32)})
    first, end = "0l", "0x7fffffffl"
    for bound in bounds:
        left, right = (
            lowering.value(x, ()).text if isinstance(x, Node) else lowering.operand(x, torch.int64)
            for x in (bound.left, bound.right)
        )
        rises, is_end = bound.rises, bound.is_end
        number = f"long({right}) - long({left})" if rises else f"long({left}) - long({right})"
        # A number that equals this one is shown, except by a strict comparison.
        number = lowering.statement("long", f"{number} + {int(is_end != bound.is_strict)}")
        if is_end:
            end = lowering.statement("long", f"metal::min({end}, {number})")
        else:
            first = lowering.statement("long", f"metal::max({first}, {number})")
    ends = (f"int(metal::clamp({x}, 0l, 0x7fffffffl))" for x in (first, end))
    return [*lowering.statements, f"return metal::int2({', '.join(ends)});"]
