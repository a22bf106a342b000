"""The MSL of a kernel of pointwise operations, for one kind of layout."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch.fx import Node

from ..._core.generated import MARK
from .functions import used
from .layout import Layout
from .lowering import Lowering
from .nodes import fake, result_dtype
from .numbers import MEMORY, converted, kind

HEAD = """\
#include <metal_stdlib>
using namespace metal;
#pragma METAL fp contract(off)
"""
# Whole vectors move at once; behind the last whole one, single elements do.
MOVES = """
template <typename Vector, uint N, typename T>
inline Vector load(device const T* from, ulong count) {
  if (count >= N) return *reinterpret_cast<device const Vector*>(from);
  Vector values = {};
#pragma unroll
  for (uint j = 0; j < N; ++j)
    if (j < count) values.part[j / Vector::width][j % Vector::width] = from[j];
  return values;
}
template <typename Vector, uint N, typename T>
inline void store(Vector values, device T* to, ulong count) {
  if (count >= N) {
    *reinterpret_cast<device Vector*>(to) = values;
    return;
  }
#pragma unroll
  for (uint j = 0; j < N; ++j)
    if (j < count) to[j] = values.part[j / Vector::width][j % Vector::width];
}
"""


class Indices:
    """The texts of a layout's indices. Kernels of layouts that differ in numbers alone have the same text.

    Args:
        first: where the layout's numbers begin.
        prefix: of the indices' names.
    """

    def __init__(self, layout: Layout, first: int = 0, prefix: str = "i"):
        self.layout = layout
        self.type = "ulong" if layout.wide else "uint"
        self.dimensions = len(layout.sizes)
        self._first, self._prefix = first, prefix

    def from_grid(self) -> list[str]:
        """Statements that find the indices of a thread: the third side of the grid has all but two dimensions."""
        lines = [f"const {self.type} i0 = {self.type}(at.x) * {self.layout.vector};"]
        if self.dimensions > 1:
            lines.append(f"const {self.type} i1 = at.y;")
        return lines + (self.from_number("at.z", 2) if self.dimensions > 2 else [])

    def from_number(self, number: str, begin: int = 0) -> list[str]:
        """Statements that find the indices of the dimensions from `begin` on by the place in their order."""
        if self.dimensions == begin + 1:
            return [f"const {self.type} {self._prefix}{begin} = {number};"]
        rest = f"{self._prefix}_rest"
        lines = [f"{self.type} {rest} = {number};"]
        for d in range(begin, self.dimensions - 1):
            lines.append(f"const {self.type} {self._prefix}{d} = {rest} % n[{self._first + d}];")
            lines.append(f"{rest} /= n[{self._first + d}];")
        return [*lines, f"const {self.type} {self._prefix}{self.dimensions - 1} = {rest};"]

    def offset(self, tensor: int) -> str:
        """The place of a tensor's element, or of the first of the vector."""
        base = self._first + self.dimensions * (tensor + 1)
        inner = self.layout.strides[tensor][0]
        index = f"{self._prefix}0"
        terms = [] if inner == 0 else [index if inner == 1 else f"{index} * n[{base}]"]
        terms += [f"{self._prefix}{d} * n[{base + d}]" for d in range(1, self.dimensions)]
        return " + ".join(terms) or "0"


def elementwise(
    outputs: Sequence[Node],
    inputs: Sequence[Node],
    layout: Layout,
    *,
    made: Collection[Node] = (),
    keep_float32: bool = False,
) -> str:
    """The kernel that computes some nodes of one shape.

    Args:
        outputs: the nodes.
        inputs: the placeholders that they need.
        layout: of the outputs, then the inputs. Numbers in it are left to the dispatch.
        made: the outputs that are computed here although they are leaves.
    """
    vector, indices = layout.vector, Indices(layout)
    names = {node: f"in{k}" for k, node in enumerate(inputs)}
    moved = {node: layout.strides[len(outputs) + k][0] != 0 for k, node in enumerate(inputs)}

    def load(node, at):
        name = f"{names[node]}_value"
        held = element_of(f"{name}s", memory(node)) if vector > 1 and moved[node] else name
        return from_memory(held, result_dtype(node))

    lowering = Lowering(load, keep_float32=keep_float32, made=made)
    values = [lowering.value(node) for node in outputs]
    before, after, element = indices.from_grid(), [], lowering.statements
    if vector > 1:
        before.append(f"const ulong count = {'n[0] - i0' if indices.dimensions == 1 else vector};")
    for k, node in enumerate(inputs):
        place, held = indices.offset(len(outputs) + k), f"{names[node]}_value"
        if vector > 1 and moved[node]:
            type_ = f"{memory(node)}_x{vector}"
            before.append(f"const {type_} {held}s = load<{type_}, {vector}>({names[node]} + {place}, count);")
        else:
            before.append(f"const {memory(node)} {held} = {names[node]}[{place}];")
    for k, (node, value) in enumerate(zip(outputs, values)):
        text, type_ = to_memory(lowering.stored(value), result_dtype(node)), f"{memory(node)}_x{vector}"
        if vector > 1:
            before.append(f"{type_} out{k}_values;")
            element.append(f"{element_of(f'out{k}_values', memory(node))} = {text};")
            after.append(f"store<{type_}, {vector}>(out{k}_values, out{k} + {indices.offset(k)}, count);")
        else:
            element.append(f"out{k}[{indices.offset(k)}] = {text};")
    if vector > 1:
        element = ["#pragma unroll", f"for (uint j = 0; j < {vector}; ++j) {{", *(f"  {s}" for s in element), "}"]
    types = dict.fromkeys(memory(node) for node in (*outputs, *inputs)) if vector > 1 else {}
    body = "\n".join(line if line.startswith("#") else f"  {line}" for line in (*before, *element, *after))
    structs = "".join(vector_type(type_, vector) for type_ in types)
    signature = parameters(outputs, inputs, indices.type)
    return (
        f"{HEAD}{structs}{MOVES if vector > 1 else ''}{used(body)}\n"
        f"kernel void {MARK}({signature}, uint3 at [[thread_position_in_grid]]) {{\n{body}\n}}\n"
    )


def indexed(
    outputs: Sequence[Node],
    inputs: Sequence[Node],
    strides: Sequence[Sequence[int]],
    *,
    made: Collection[Node] = (),
    keep_float32: bool = False,
) -> str:
    """The kernel that computes some nodes of one shape, of which some read operands at other elements than their own.

    Args:
        strides: of the outputs, then of the inputs as they are. The kernel is for these alone.
        made: the outputs that are computed here although they are leaves.
    """
    load = loader(inputs, strides[len(outputs) :])
    lowering = Lowering(load, keep_float32=keep_float32, made=made)
    before, at = coordinates(fake(outputs[0]).shape, strides[0])
    values = [lowering.value(node, at) for node in outputs]
    after = [
        f"out{k}[{place_at(at, strides[k])}] = {to_memory(lowering.stored(value), result_dtype(node))};"
        for k, (node, value) in enumerate(zip(outputs, values))
    ]
    body = "\n".join(f"  {line}" for line in (*before, *lowering.statements, *after))
    return one_thread_an_element(parameters(outputs, inputs, "uint"), body)


def one_thread_an_element(signature: str, body: str) -> str:
    grid = "uint3 at [[thread_position_in_grid]]"
    return f"{HEAD}{used(body)}\nkernel void {MARK}({signature}, {grid}) {{\n{body}\n}}\n"


def loader(inputs: Sequence[Node], strides: Sequence[Sequence[int]]) -> Callable[[Node, tuple[str, ...] | None], str]:
    """The `load` of a Lowering with coordinates."""
    names = {node: (f"in{k}", of) for k, (node, of) in enumerate(zip(inputs, strides))}

    def load(node, at):
        name, of = names[node]
        return from_memory(f"{name}[{place_at(at, of)}]", result_dtype(node))

    return load


def coordinates(shape: Sequence[int], strides: Sequence[int]) -> tuple[list[str], tuple[str, ...]]:
    """Statements that find a thread's element, in the order of memory, and its coordinates."""
    order = sorted((d for d in range(len(shape)) if shape[d] != 1), key=lambda d: (strides[d], -d))
    lines, found, rest = [], ["0"] * len(shape), "at.x"
    for d in order[:-1]:
        lines += [f"const int c{d} = int({rest} % {shape[d]}u);", f"const uint r{d} = {rest} / {shape[d]}u;"]
        rest = f"r{d}"
    if order:
        lines.append(f"const int c{order[-1]} = int({rest});")
    for d in order:
        found[d] = f"c{d}"
    return lines, tuple(found)


def place_at(at: Sequence[str], strides: Sequence[int]) -> str:
    """The place of a tensor's element."""
    terms = [c if stride == 1 else f"{c} * {stride}" for c, stride in zip(at, strides) if c != "0" and stride]
    return " + ".join(terms) or "0"


def parameters(outputs: Sequence[Node], inputs: Sequence[Node], index: str) -> str:
    """The declarations of a kernel's buffers, as _run_generated binds them."""
    declared = [f"device {memory(node)}* out{k}" for k, node in enumerate(outputs)]
    declared += [f"device const {memory(node)}* in{k}" for k, node in enumerate(inputs)]
    declared.append(f"constant {index}* n")
    return ", ".join(f"{text} [[buffer({k})]]" for k, text in enumerate(declared))


def memory(node: Node) -> str:
    return MEMORY[result_dtype(node)]


def from_memory(text: str, dtype: torch.dtype) -> str:
    """The register for an element."""
    return f"({text} != 0)" if kind(dtype) == "b" else f"float({text})" if kind(dtype) == "f" else text


def to_memory(text: str, dtype: torch.dtype) -> str:
    return (
        f"{MEMORY[dtype]}({text})"
        if kind(dtype) == "f"
        else converted(text, dtype, torch.uint8)
        if kind(dtype) == "b"
        else text
    )


_SIZES = {"uchar": 1, "char": 1, "half": 2, "bfloat": 2, "short": 2, "float": 4, "int": 4, "long": 8}


def _width(type_):
    """How many elements a part of a vector has: addresses are multiples of 16 bytes at most, and so are parts'."""
    return min(4, 16 // _SIZES[type_])


def element_of(vector: str, type_: str) -> str:
    """Element j of a vector."""
    return f"{vector}.part[j / {_width(type_)}][j % {_width(type_)}]"


def vector_type(type_: str, count: int) -> str:
    alignment, width = min(16, _SIZES[type_] * count), _width(type_)
    return (
        f"struct alignas({alignment}) {type_}_x{count} {{\n"
        f"  static constexpr constant uint width = {width};\n"
        f"  vec<{type_}, {width}> part[{count // width}];\n}};\n"
    )
