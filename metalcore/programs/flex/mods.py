"""The caller's functions as MSL: a struct with what they capture and a method for each of them.

Numbers that a function uses come in a buffer, with the sizes and strides of captured tensors: the same function with
other numbers is the same kernel.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.fx import Node

from ..pointwise.nodes import Value, result_dtype
from ..pointwise.numbers import MEMORY, Unsupported, kind
from .captured import KINDS, Plan
from .graphs import Captured, returned_by
from .lowering import ARGUMENTS, ModLowering
from .masks import mask_methods

__all__ = ["Mods"]

# A method with a loop is a function that a kernel calls: compilers would have a copy of it, with steps of its loop, for
# each of a thread's scores, and take half a minute for these.
_APART = "__attribute__((noinline)) "


class Mods:
    """Collects what the methods need.

    Args:
        packed: heads, and queries of each, that are rows of a head of the kernel's, or nothing.

    Attributes:
        numbers: what the kernel finds in its buffer of numbers.
        tensors: the buffers.
        large: the numbers of those whose elements 32 bits do not count.
    """

    def __init__(self, packed: Sequence[int] = ()):
        self.numbers: list[int] = []
        self._unpacked: list[str] = []
        if packed:
            group, length = map(self.number, packed)
            within = ("0", "q") if packed[1] == 1 else (f"q % int({length})", f"q / int({length})")
            self._unpacked = [f"h = h * int({group}) + {within[1]};", f"q = {within[0]};"]
        self.tensors: list[Tensor] = []
        self.large: set[int] = set()
        self._buffers: dict[int, tuple[int, list[str], list[str]]] = {}
        self._methods: list[str] = []
        self._outputs: list[str] = []
        self._is_plain = True

    def number(self, value: int) -> str:
        """Returns the text of a number of the buffer."""
        self.numbers.append(int(value))
        return f"n[{len(self.numbers) - 1}]"

    def buffer(self, tensor: Tensor) -> tuple[int, list[str], list[str]]:
        """Returns the number of a captured tensor, and the texts of its sizes and strides."""
        if id(tensor) not in self._buffers:
            sizes, strides = ([self.number(n) for n in of] for of in (tensor.shape, tensor.stride()))
            self._buffers[id(tensor)] = len(self.tensors), sizes, strides
            last = sum((size - 1) * abs(stride) for size, stride in zip(tensor.shape, tensor.stride()))
            if last >= 1 << 32:
                self.large.add(len(self.tensors))
            self.tensors.append(tensor)
        return self._buffers[id(tensor)]

    def method(
        self, name: str, mod: Captured | None, result: str, returned: Node | None = None, more: Sequence[str] = ()
    ):
        """Adds a method that computes what a graph returns, or its argument `score`, or true.

        Args:
            result: "float".
            returned: the node that is computed; by default the graph's only one.
            more: arguments before the four indices.
        """
        arguments = [*(f"float {argument}" for argument in more), *(f"int {argument}" for argument in ARGUMENTS)]
        lines = ["return score;" if result == "float" else "return true;"]
        if mod is not None:
            try:
                lines = self._lines(mod, returned, more, result)
            except Unsupported as reason:
                of = "score_mod" if name == "score" else "the derivative of score_mod"
                raise Unsupported(f"metalcore.flex_attention: {of}: {reason}") from None
        if mod is not None:
            lines = [*self._unpacked, *lines]
        body = "\n".join(f"    {line}" for line in lines)
        self._methods.append(f"  {result} {name}({', '.join(arguments)}) const {{\n{body}\n  }}\n")

    def mask(self, mod: Captured | None, variable: str) -> None:
        """Adds the methods of a mask_mod: see masks.py.

        Args:
            variable: "k" for the keys of a query, "q" for the queries of a key.
        """
        try:
            lowering = functools.partial(self._lowering, mod, ())
            self._methods += mask_methods(mod, variable, ARGUMENTS, lowering, self._unpacked)
        except Unsupported as reason:
            raise Unsupported(f"metalcore.flex_attention: mask_mod: {reason}") from None

    def plain_derivative(self, text: str) -> None:
        """Adds the derivative of a function that leaves scores as they are, or does not read them."""
        self._is_plain &= text == "gradient"
        arguments = ", ".join(f"int {argument}" for argument in ARGUMENTS)
        self._methods.append(
            f"  float derivative(float score, float gradient, {arguments}) const {{ return {text}; }}\n"
        )

    def no_sums(self) -> None:
        self._methods.append("  static constexpr constant bool kCaptured = false;\n")
        self._methods.append("  static constexpr constant uint kRows = 0, kKeys = 0, kDiagonals = 0;\n")

    def sums(self, joint: Captured, plan: Plan, rows: int) -> None:
        """Adds what scores give to the gradients of captured tensors: sums of `rows` rows, and by places of tables."""
        arguments = ", ".join(f"int {argument}" for argument in ARGUMENTS)
        scores = f"float score, float gradient, {arguments}"
        bases = iter(plan.bases())
        values: dict[str, list[list[str]]] = {kind: [] for kind in KINDS}
        places: dict[str, list[list[str]]] = {kind: [] for kind in KINDS[1:]}
        elements, is_plain = [], self._is_plain
        for scatter, place in zip(plan.scatters, plan.places):
            try:
                values[place.kind].append(self._value(joint, scatter))
                if not place.is_row:
                    places[place.kind].append(self._place(joint, scatter, place, *next(bases)))
            except Unsupported as reason:
                raise Unsupported(f"metalcore.flex_attention: the derivative of score_mod: {reason}") from None
            if place.kind == "vector":
                elements.append([f"return {place.elements};"])
        self._is_plain = is_plain
        counts = ", ".join(f"k{kind.capitalize()}s = {len(bodies)}" for kind, bodies in values.items())
        in_memory, once = (str(bool(x)).lower() for x in (plan.tables, plan.is_once))
        flags = f"kCaptured = true, kInMemory = {in_memory}, kOnce = {once}"
        self._methods.append(f"  static constexpr constant bool {flags};\n")
        self._methods.append(f"  static constexpr constant uint {counts};\n")
        self._outputs = ["row_sums"] * bool(plan.rows) + ["tables"] * bool(plan.tables)
        for of, bodies in values.items():
            element = ", uint e" if of == "vector" else ""
            self._cases("float", f"{of}_value", f"{element}, {scores}", bodies, "0.0f")
        for of, bodies in places.items():
            self._cases("uint", f"{of}_place", f", uint of_head, uint of_simd, {arguments}", bodies, "0")
        self._cases("uint", "vector_elements", "", elements, "0")
        self._methods.append(f"  ulong rows() const {{ return {self.number(rows)}; }}\n")
        heads = self.number(math.prod(plan.shared_items))
        self._methods.append(f"  uint heads_with_tables() const {{ return uint({heads}); }}\n")

    def _cases(self, result, name, more, bodies, otherwise):
        """Adds a method with a text for each number `which`."""
        texts = []
        for i, body in enumerate(bodies):
            lines = "".join(f"      {line}\n" for line in body)
            texts.append(f"    if (which == {i}) {{\n{lines}    }}\n")
        text = f"  {result} {name}(uint which{more}) const {{\n{''.join(texts)}    return {otherwise};\n  }}\n"
        self._methods.append(text)

    def _value(self, joint, scatter):
        """Returns the statements of a number that a score adds, for a vector that of its element `e`."""
        lowering = self._lowering(joint, ("score", "gradient"))
        free, below = [], scatter.elements
        for size in scatter.free:
            rest, below = ("e" if below == scatter.elements else f"e % {below}"), below // max(size, 1)
            free.append("0" if size == 1 else lowering.index(f"int({rest}) / {below}" if below > 1 else f"int({rest})"))
        return self._lines(joint, scatter.value, ("score", "gradient"), "float", scatter.value_at(free), lowering)

    def _place(self, joint, scatter, place, first, copies):
        """Returns the statements of the first element that a score adds to, and -1 for one outside."""
        lowering = self._lowering(joint, ("score", "gradient"))
        slot = "of_head" if place.is_shared else "of_simd"
        base = f"uint({self.number(first)}) + {slot} * uint({self.number(copies)})"
        at, inside = "0", []
        if place.kind == "diagonal":  # the kernel adds a score's own
            return [f"return {base};"]
        for d, extent in zip(place.dims, place.extents):
            size = f"uint({self.number(extent)})"
            if isinstance(d, str):
                number = d
            else:
                index = scatter.indices[d]
                number = lowering.value(index, tuple(map(str, scatter.index_at(index)))).text
                number = lowering.from_begin(number, size)
                inside.append(f"ulong({number}) < {size}")
            at = f"({at}) * {size} + uint({number})"
        place = f"{base} + ({at}) * {place.elements}"
        return [*lowering.statements, f"return {' && '.join(inside) or 'true'} ? {place} : 0xffffffff;"]

    def _lowering(self, mod, more):
        lowering = ModLowering(self)
        nodes = [node for node in mod.graph.graph.nodes if node.op == "placeholder"]
        # A derivative's graph has the gradient behind the indices.
        order = [*more[:1], *ARGUMENTS, *more[1:]] if more else list(ARGUMENTS)
        for name, node in zip(order, nodes):
            lowering.bind({node: Value(name, result_dtype(node))})
        lowering.bind_captures(nodes[len(order) :], mod.captures)
        lowering.module = mod.graph
        return lowering

    def _lines(self, mod, returned, more, result, at=(), lowering=None):
        lowering = lowering or self._lowering(mod, more)
        if returned is None:
            returned = returned_by(mod.graph)
        value = lowering.value(returned, at)
        text = value.text if result == "float" or value.dtype == torch.bool else f"({value.text} != 0)"
        if result == "float":
            self._is_plain &= text == more[-1]
            if kind(value.dtype) != "f":
                text = f"float({text})"
        return [*lowering.statements, f"return {text};"]

    def members(self) -> list[str]:
        return [*(f"device const {MEMORY[t.dtype]}* c{i}" for i, t in enumerate(self.tensors)), "constant ulong* n"]

    def text(self) -> str:
        """Returns the struct."""
        members = [*self.members(), *(f"device float* {output}" for output in self._outputs)]
        members = "".join(f"  {member};\n" for member in members)
        plain = (
            f"  static constexpr constant bool kPlain = {str(self._is_plain).lower()};  // scores stay as they are\n"
        )
        methods = (f"  {_APART}{text.lstrip()}" if "for (" in text else text for text in self._methods)
        return f"struct Mods {{\n{plain}{members}\n{''.join(methods)}}};\n"
