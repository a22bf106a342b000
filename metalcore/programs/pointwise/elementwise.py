"""The MSL of a kernel whose operations read their operands at the place of the element that they make.

A thread takes a vector of elements, or one. It may take them from several rows: what is the same for all rows is then
read once. A threadgroup may read operands that lie across into tiles first.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from torch.fx import Node

from ..._core.generated_kernels import MARK
from .functions import used
from .layout import Layout, Tile
from .lowering import SIXTEEN_BITS, At, Lowering
from .nodes import result_dtype
from .source import (
    HEAD,
    MOVES,
    Indices,
    element_of,
    from_memory,
    loaded,
    loaded_element_of,
    loaded_type,
    memory,
    parameters,
    to_memory,
    vector_type,
)
from .stages import WIDTH, Stored, can_be_staged, loop, staged
from .storing import names_of

_NUMBER = re.compile(r"\bn\[(\d+)\]")


def elementwise(
    outputs: Sequence[Node],
    inputs: Sequence[Node],
    operands: Sequence[tuple[Node, At]],
    layout: Layout,
    *,
    kernel_nodes: Collection[Node] = (),
    keep_float32: bool = False,
) -> str:
    """Returns the kernel that computes some nodes of one shape.

    Args:
        outputs: the nodes.
        inputs: the leaves that they need.
        operands: what is read of them, as operands_of() gives it.
        layout: of the outputs, then the operands. Numbers in it are left to the dispatch.
        kernel_nodes: the outputs that are computed here although they are leaves.
    """
    indices, tile = Indices(layout), layout.tile
    reads = {
        (node, at): _Read(k, f"in{inputs.index(node)}", memory(node), indices, len(outputs) + k)
        for k, (node, at) in enumerate(operands)
    }

    def load(node, at):
        return from_memory(reads[node, at].element, result_dtype(node))

    lowering = Lowering(load, keep_float32=keep_float32, kernel_nodes=kernel_nodes)
    at = None if all(at is None for _, at in operands) else names_of(outputs[0])
    computed, of_row, stored = _computed(outputs, [lowering.value(node, at) for node in outputs], lowering, indices)
    tiled = [read for read in reads.values() if read.in_tile]
    once = [read for read in reads.values() if not read.in_tile and not read.of_row]
    each = [read for read in reads.values() if read.of_row]
    lines = indices.from_number("at.z", 2) if indices.dimensions > 2 else []
    lines += _filled(tiled, tile, indices) if tile else []
    lines += _place(indices)
    if layout.vector > 1:
        lines.append(f"const ulong count = {'n[0] - i0' if indices.dimensions == 1 else layout.vector};")
    for read in once:
        guarded = [f"{read.held} {read.name} = {{}};", f"if (i0 < n[0]) {read.moved}"]
        lines += guarded if tile else [f"const {read.held} {read.moved}"]
    lines += [f"{read.held} {read.name}[{layout.rows}]{' = {}' if tile else ''};" for read in each]
    lines += _each_row_read(indices, [read.moved for read in each]) if each else []
    lines += _columns(tiled, tile) if tile else []
    lines += [*computed, *_each_row(indices, of_row, stored)]
    lines = _with_numbers(lines, indices.type)
    body = "\n".join(line if line.startswith("#") else f"  {line}" for line in lines)
    kinds = [(memory(node), layout.vector) for node in outputs] + [(read.type, read.vector) for read in reads.values()]
    structs = "".join(vector_type(*kind) for kind in dict.fromkeys(kinds) if kind[1] > 1)
    place = "uint3 at [[thread_position_in_grid]]"
    if tile:
        place = "uint3 at [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]]"
    return (
        f"{HEAD}{structs}{MOVES if structs else ''}{used(body)}\n"
        f"kernel void {MARK}({parameters(outputs, inputs, indices.type)}, {place}) {{\n{body}\n}}\n"
    )


class _Read:
    """How an input is read.

    Attributes:
        in_tile: whether through a tile.
        of_row: whether for each row, into an array of as many.
        vector: how many elements at once.
        held: the type of what is read at once; `name` holds it.
        moved: the statement that reads it, for row r where there are several.
        tile: the tile's name.
        element: the text of element j of a thread's vector, in memory's type.
    """

    def __init__(self, k: int, buffer: str, type_: str, indices: Indices, number: int):
        layout, strides = indices.layout, indices.layout.strides[number]
        tile = layout.tile if layout.tile and number in layout.tile.tensors else None
        self.type, self.in_tile = type_, tile is not None
        self.of_row = layout.in_rows and not tile and strides[1] != 0
        self.vector = tile.vector if tile else layout.vector if strides[0] else 1
        self.name = f"x{k}_value{'s' if self.vector > 1 else ''}"
        self.held = loaded_type(type_, self.vector) if self.vector > 1 else type_
        held = f"{self.name}[r]" if tile or self.of_row else self.name
        place = f"{buffer} + ({indices.offset(number, without_rows=layout.in_rows and strides[1] == 0)})"
        self.moved = f"{held} = {loaded(place, type_, self.vector) if self.vector > 1 else f'*({place})'};"
        self.element = loaded_element_of(held, type_) if self.vector > 1 else held
        self.tile = f"x{k}_tile"
        if tile:
            j = f"j * {tile.pitch} + " if layout.vector > 1 else ""
            self.element = f"{self.tile}_column[{j}r * {tile.rows_apart(layout.vector)}]"


def _with_numbers(lines, type_):
    """Returns statements that read the layout's numbers once, before those that use them. What is stored might be the
    numbers, as far as a compiler knows: it would read them again behind that."""
    used = sorted({int(number) for line in lines for number in _NUMBER.findall(line)})
    return [*(f"const {type_} n{k} = n[{k}];" for k in used), *(_NUMBER.sub(r"n\1", line) for line in lines)]


def _place(indices):
    """Returns statements that find a thread's elements, and its first row."""
    layout, type_ = indices.layout, indices.type
    if tile := layout.tile:
        return [
            *_in_tile(tile, layout.vector),
            f"const {type_} i0 = {type_}(at.x) * {tile.side} + column;",
            f"const {type_} first = {type_}(at.y) * {tile.side} + row;",
        ]
    lines = [f"const {type_} i0 = {type_}(at.x) * {layout.vector};"]
    if layout.rows > 1:
        return [*lines, f"const {type_} first = {type_}(at.y) * {layout.rows};"]
    return lines + ([f"const {type_} i1 = at.y;"] if indices.dimensions > 1 else [])


def _in_tile(tile: Tile, vector: int) -> list[str]:
    """Returns statements that find a thread's first vector in a tile."""
    lanes = tile.side // vector
    return [f"const uint column = thread_index % {lanes} * {vector};", f"const uint row = thread_index / {lanes};"]


def _each_row(indices, computed, moved):
    """Returns a loop over a thread's rows. What moves elements must not run outside of the tensors; the rest may:
    without branches, the compiler does once what is the same for all rows."""
    layout = indices.layout
    if not layout.in_rows:
        return [*computed, *moved]
    step = f" * {layout.tile.rows_apart(layout.vector)}" if layout.tile else ""
    inside = "i0 < n[0] && i1 < n[1]" if layout.tile else "i1 < n[1]"
    place = f"const {indices.type} i1 = first + r{step};"
    return loop("r", layout.rows, [*computed, place, f"if ({inside}) {{", *(f"  {line}" for line in moved), "}"])


def _each_row_read(indices, moved):
    """Returns a loop that reads a thread's rows. A thread behind the last row reads that one again: under a condition,
    elements of 16 bits would be taken apart where they are read."""
    if indices.layout.tile:
        return _each_row(indices, [], moved)
    return loop("r", indices.layout.rows, [f"const {indices.type} i1 = min(first + r, n[1] - 1);", *moved])


def _filled(reads, tile, indices):
    """Returns statements that read tiles along dimension 1."""
    type_, step = indices.type, tile.rows_apart(tile.vector)
    rows = tile.side // step
    lines = [f"threadgroup {read.type} {read.tile}[{tile.side * tile.pitch}];" for read in reads]
    lines += ["{", *_in_tile(tile, tile.vector), f"const {type_} i1 = {type_}(at.y) * {tile.side} + column;"]
    lines += [f"const ulong count = {tile.vector};"] if tile.vector > 1 else []
    lines += [f"{read.held} {read.name}[{rows}] = {{}};" for read in reads]
    place = f"const {type_} i0 = {type_}(at.x) * {tile.side} + row + r * {step};"
    inside = ["if (i0 < n[0] && i1 < n[1]) {", *(f"  {read.moved}" for read in reads), "}"]
    lines += loop("r", rows, [place, *inside])
    for read in reads:
        lines.append(f"threadgroup {read.type}* {read.tile}_row = {read.tile} + row * {tile.pitch} + column;")
        place, held = f"{read.tile}_row[r * {step * tile.pitch}", f"{read.name}[r]"
        one, several = f"{place}] = {held};", f"{place} + j] = {loaded_element_of(held, read.type)};"
        lines += loop("r", rows, loop("j", tile.vector, [several]) if tile.vector > 1 else [one])
    return [*lines, "}"]


def _columns(reads, tile):
    """Returns statements that wait for the tiles, and find a thread's elements in them."""
    place = f"column * {tile.pitch} + row"
    return [
        "threadgroup_barrier(mem_flags::mem_threadgroup);",
        *(f"threadgroup const {read.type}* {read.tile}_column = {read.tile} + {place};" for read in reads),
    ]


def _computed(outputs, values, lowering, indices):
    """Returns statements that compute a thread's elements: of all rows, and of one row. Then those that store a
    row's."""
    layout, statements = indices.layout, lowering.statements
    vector, before, stored, after = layout.vector, [], [], []
    is_rounded = lowering.roundings or any(result_dtype(node) in SIXTEEN_BITS for node in outputs)
    in_stages = vector > 1 and is_rounded and can_be_staged(statements)
    rows = layout.rows if in_stages and not layout.tile else 1
    for k, (node, value) in enumerate(zip(outputs, values)):
        register, dtype, type_ = lowering.stored(value), result_dtype(node), f"{memory(node)}_x{vector}"
        text = to_memory(register, dtype)
        if vector == 1:
            after.append(f"out{k}[{indices.offset(k)}] = {text};")
            continue
        before.append(f"{type_} out{k}_values{f'[{rows}]' if rows > 1 else ''};")
        name = f"out{k}_values{'[r]' if rows > 1 else ''}"
        part = f"{name}.part[part]" if dtype in SIXTEEN_BITS else ""
        stored.append(Stored(part, memory(node), register, f"{element_of(name, memory(node))} = {text};"))
        after.append(f"store<{type_}, {vector}>({name}, out{k} + ({indices.offset(k)}), count);")
    if vector == 1:
        return [], statements, after
    if not in_stages:
        return [], [*before, *loop("j", vector, [*statements, *(store.element for store in stored)])], after
    computed = [*before, *loop("part", vector // WIDTH, staged(statements, lowering.roundings, stored, rows))]
    return (computed, [], after) if rows > 1 else ([], computed, after)
