"""The MSL of kernels: their buffers, indices, vectors, and the kernel whose operations read other elements."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch.fx import Node

from ..._core.generated_kernels import MARK
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
# Whole vectors move at once; behind the last whole one, single elements do. Elements below 4 bytes are loaded as words:
# if a load has a condition, a compiler takes elements apart where they are loaded, and a thread waits there.
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
template <typename Words, typename Vector, uint N, typename T>
inline Words load_words(device const T* from, ulong count) {
  if (count >= N) return *reinterpret_cast<device const Words*>(from);
  const Vector values = load<Vector, N>(from, count);
  Words found;
#pragma unroll
  for (uint p = 0; p < N / Vector::width; ++p) found.words[p] = as_type<typename Words::Word>(values.part[p]);
  return found;
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

    def from_number(self, number: str, begin: int = 0) -> list[str]:
        """Returns statements that find the indices of the dimensions from `begin` on by the place in their order."""
        if self.dimensions == begin + 1:
            return [f"const {self.type} {self._prefix}{begin} = {number};"]
        rest = f"{self._prefix}_rest"
        lines = [f"{self.type} {rest} = {number};"]
        for d in range(begin, self.dimensions - 1):
            lines.append(f"const {self.type} {self._prefix}{d} = {rest} % n[{self._first + d}];")
            lines.append(f"{rest} /= n[{self._first + d}];")
        return [*lines, f"const {self.type} {self._prefix}{self.dimensions - 1} = {rest};"]

    def offset(self, tensor: int, *, without_rows: bool = False) -> str:
        """Returns the place of a tensor's element, or of the first of the vector. Without rows, dimension 1 does not
        count."""
        base = self._first + self.dimensions * (tensor + 1)
        inner = self.layout.strides[tensor][0]
        index = f"{self._prefix}0"
        terms = [] if inner == 0 else [index if inner == 1 else f"{index} * n[{base}]"]
        terms += [f"{self._prefix}{d} * n[{base + d}]" for d in range(2 if without_rows else 1, self.dimensions)]
        return " + ".join(terms) or "0"


def indexed(
    outputs: Sequence[Node],
    inputs: Sequence[Node],
    strides: Sequence[Sequence[int]],
    *,
    kernel_nodes: Collection[Node] = (),
    keep_float32: bool = False,
) -> str:
    """Returns the kernel that computes some nodes of one shape, of which some read operands at other elements than
    their own.

    Args:
        strides: of the outputs, then of the inputs as they are. The kernel is for these alone.
        kernel_nodes: the outputs that are computed here although they are leaves.
    """
    load = loader(inputs, strides[len(outputs) :])
    lowering = Lowering(load, keep_float32=keep_float32, kernel_nodes=kernel_nodes)
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
    """Returns the `load` of a Lowering with coordinates."""
    names = {node: (f"in{k}", of) for k, (node, of) in enumerate(zip(inputs, strides))}

    def load(node, at):
        name, of = names[node]
        return from_memory(f"{name}[{place_at(at, of)}]", result_dtype(node))

    return load


def coordinates(shape: Sequence[int], strides: Sequence[int]) -> tuple[list[str], tuple[str, ...]]:
    """Returns statements that find a thread's element, in the order of memory, and its coordinates."""
    order = sorted((d for d in range(len(shape)) if shape[d] != 1), key=lambda d: (strides[d], -d))
    lines, names, rest = [], ["0"] * len(shape), "at.x"
    for d in order[:-1]:
        lines += [f"const int c{d} = int({rest} % {shape[d]}u);", f"const uint r{d} = {rest} / {shape[d]}u;"]
        rest = f"r{d}"
    if order:
        lines.append(f"const int c{order[-1]} = int({rest});")
    for d in order:
        names[d] = f"c{d}"
    return lines, tuple(names)


def place_at(at: Sequence[str], strides: Sequence[int]) -> str:
    """Returns the place of a tensor's element."""
    terms = [c if stride == 1 else f"{c} * {stride}" for c, stride in zip(at, strides) if c != "0" and stride]
    return " + ".join(terms) or "0"


def parameters(outputs: Sequence[Node], inputs: Sequence[Node], index: str) -> str:
    """Returns the declarations of a kernel's buffers, as _run_generated binds them."""
    declared = [f"device {memory(node)}* out{k}" for k, node in enumerate(outputs)]
    declared += [f"device const {memory(node)}* in{k}" for k, node in enumerate(inputs)]
    declared.append(f"constant {index}* n")
    return ", ".join(f"{text} [[buffer({k})]]" for k, text in enumerate(declared))


def memory(node: Node) -> str:
    return MEMORY[result_dtype(node)]


def from_memory(text: str, dtype: torch.dtype) -> str:
    """Returns the register for an element."""
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
    """Returns how many elements a part of a vector has: addresses are multiples of 16 bytes at most, and so are
    parts'."""
    return min(4, 16 // _SIZES[type_])


def element_of(vector: str, type_: str) -> str:
    """Returns element j of a vector."""
    return f"{vector}.part[j / {_width(type_)}][j % {_width(type_)}]"


def loaded_element_of(vector: str, type_: str) -> str:
    """Returns element j of a vector as it is loaded."""
    if _SIZES[type_] >= 4:
        return element_of(vector, type_)
    return f"as_type<vec<{type_}, {_width(type_)}>>({vector}.words[j / {_width(type_)}])[j % {_width(type_)}]"


def loaded_type(type_: str, count: int) -> str:
    """Returns the type that a vector is loaded as."""
    return f"{type_}_x{count}" if _SIZES[type_] >= 4 else f"{type_}_x{count}_words"


def loaded(place: str, type_: str, count: int, elements: str = "count") -> str:
    """Returns the text that loads a vector, or so many of its elements."""
    vector, loaded = f"{type_}_x{count}", loaded_type(type_, count)
    function = f"load<{vector}, {count}>" if loaded == vector else f"load_words<{loaded}, {vector}, {count}>"
    return f"{function}({place}, {elements})"


def vector_type(type_: str, count: int) -> str:
    alignment, width = min(16, _SIZES[type_] * count), _width(type_)
    text = (
        f"struct alignas({alignment}) {type_}_x{count} {{\n"
        f"  static constexpr constant uint width = {width};\n"
        f"  vec<{type_}, {width}> part[{count // width}];\n}};\n"
    )
    if _SIZES[type_] < 4:
        text += (
            f"struct alignas({alignment}) {loaded_type(type_, count)} {{\n"
            f"  typedef {'uint2' if _SIZES[type_] == 2 else 'uint'} Word;\n  Word words[{count // width}];\n}};\n"
        )
    return text
