"""The caller's functions as MSL: a struct with what they capture and a method for each of them.

Numbers that a function uses come in a buffer, with the sizes and strides of captured tensors: the same function with
other numbers is the same kernel.
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
import struct
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.fx import Node

from ..pointwise.accumulators import Accumulator, accumulator, check_reduction, reduced_dimensions, results_of
from ..pointwise.lowering import Lowering
from ..pointwise.nodes import REDUCTIONS, Value, arguments_of, fake, name_of, plain, result_dtype, shape_of
from ..pointwise.numbers import MEMORY, Unsupported, converted, kind, literal, register
from ..pointwise.reads.views import missing
from ..pointwise.source import from_memory
from ..pointwise.support import check
from .bounds import parts_of
from .captured import Plan
from .graphs import Captured, place_of_node, returned_by
from .scatters import SCATTER

__all__ = ["Mods", "float_bits"]

ARGUMENTS = ("b", "h", "q", "k")
# Operations whose numbers stay in the text, where they decide what a compiler makes: a division by 128 is a shift.
_FIXED = (
    *("div.Tensor_mode", "div.Scalar_mode", "floor_divide", "remainder", "fmod", "pow", "bitwise", "__"),
    *("full", "scalar_tensor", "zeros", "ones"),
)


def float_bits(number: float) -> int:
    """Returns the bits of a float32."""
    return struct.unpack("<I", struct.pack("<f", number))[0]


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
        self._places: dict[int, int] = {}
        self._methods: list[str] = []
        self._outputs: list[str] = []
        self._is_plain = True

    def number(self, value: int) -> str:
        """Returns the text of a number of the buffer."""
        self.numbers.append(int(value))
        return f"n[{len(self.numbers) - 1}]"

    def buffer(self, tensor: Tensor) -> int:
        """Returns the number of a captured tensor."""
        place = self._places.setdefault(id(tensor), len(self.tensors))
        if place == len(self.tensors):
            self.tensors.append(tensor)
            last = sum((size - 1) * abs(stride) for size, stride in zip(tensor.shape, tensor.stride()))
            if last >= 1 << 32:
                self.large.add(place)
        return place

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
        """Adds the methods of a mask_mod: the first number of a variable that it may show and the one behind the last,
        and what else is true of a score that it shows.

        Args:
            variable: "k" for the keys of a query, "q" for the queries of a key.
        """
        row = "q" if variable == "k" else "k"
        bounds, others, ends = [], [], ["return metal::int2(0, 0x7fffffff);"]
        lines = ["return true;"]
        if mod is not None:
            try:
                bounds, others = parts_of(mod.graph, ARGUMENTS.index(variable))
                if bounds:
                    ends = [*self._unpacked, *self._ends(mod, bounds, variable)]
                if others:
                    lowering = self._lowering(mod, ())
                    values = [lowering.value(node, ()) for node in others]
                    texts = [x.text if x.dtype == torch.bool else f"({x.text} != 0)" for x in values]
                    lines = [*self._unpacked, *lowering.statements, f"return {' & '.join(texts)};"]
            except Unsupported as reason:
                raise Unsupported(f"metalcore.flex_attention: mask_mod: {reason}") from None
        arguments = ", ".join(f"int {argument}" for argument in ARGUMENTS)
        for result, name, of, body in (
            ("metal::int2", "ends", f"int b, int h, int {row}", ends),
            ("bool", "mask", arguments, lines),
        ):
            body = "\n".join(f"    {line}" for line in body)
            self._methods.append(f"  {result} {name}({of}) const {{\n{body}\n  }}\n")
        for name, has in (("kEnds", bounds), ("kMask", others)):
            self._methods.append(f"  static constexpr constant bool {name} = {str(bool(has)).lower()};\n")

    def _ends(self, mod, bounds, variable):
        """Returns the statements of the two numbers of a row."""
        lowering = self._lowering(mod, ())
        placeholders = [node for node in mod.graph.graph.nodes if node.op == "placeholder"]
        lowering.bind({placeholders[ARGUMENTS.index(variable)]: Value("0", torch.int32)})
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

    def plain_derivative(self, text: str) -> None:
        """Adds the derivative of a function that leaves scores as they are, or does not read them."""
        self._is_plain &= text == "gradient"
        arguments = ", ".join(f"int {argument}" for argument in ARGUMENTS)
        self._methods.append(
            f"  float derivative(float score, float gradient, {arguments}) const {{ return {text}; }}\n"
        )

    def no_sums(self) -> None:
        self._methods.append("  static constexpr constant uint kRows = 0, kTables = 0, kVectors = 0;\n")

    def sums(self, joint: Captured, plan: Plan, rows: int) -> None:
        """Adds what scores give to the gradients of captured tensors: sums of `rows` rows, and by places of tables."""
        arguments = ", ".join(f"int {argument}" for argument in ARGUMENTS)
        scores = f"float score, float gradient, {arguments}"
        bases = iter(plan.bases())
        values: dict[str, list[list[str]]] = {"row": [], "table": [], "vector": []}
        places: dict[str, list[list[str]]] = {"table": [], "vector": []}
        elements, is_plain = [], self._is_plain
        for scatter, place in zip(plan.scatters, plan.places):
            of = "row" if place.is_row else "table" if place.elements == 1 else "vector"
            try:
                values[of].append(self._value(joint, scatter))
                if of != "row":
                    places[of].append(self._place(joint, scatter, place, *next(bases)))
            except Unsupported as reason:
                raise Unsupported(f"metalcore.flex_attention: the derivative of score_mod: {reason}") from None
            if of == "vector":
                elements.append([f"return {place.elements};"])
        self._is_plain = is_plain
        counts = ", ".join(f"k{of.capitalize()}s = {len(bodies)}" for of, bodies in values.items())
        self._methods.append(f"  static constexpr constant uint {counts};\n")
        self._outputs = ["row_sums"] * bool(plan.rows) + ["tables"] * bool(plan.tables)
        for of, bodies in values.items():
            element = ", uint e" if of == "vector" else ""
            self._cases("float", f"{of}_value", f"{element}, {scores}", bodies, "0.0f")
        for of, bodies in places.items():
            self._cases("uint", f"{of}_place", f", uint of_head, uint of_simd, {arguments}", bodies, "0")
        self._cases("uint", "vector_elements", "", elements, "0")
        self._methods.append(f"  ulong rows() const {{ return {self.number(rows)}; }}\n")

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
        for d, extent in zip(place.dims, place.extents):
            size = f"uint({self.number(extent)})"
            if isinstance(d, str):
                number = d
            else:
                index = scatter.indices[d]
                number = lowering.value(index, tuple(map(str, scatter.index_at(index)))).text
                number = lowering.statement("long", f"{number} < 0 ? long({number}) + long({size}) : long({number})")
                inside.append(f"ulong({number}) < {size}")
            at = f"({at}) * {size} + uint({number})"
        place = f"{base} + ({at}) * {place.elements}"
        return [*lowering.statements, f"return {' && '.join(inside) or 'true'} ? {place} : 0xffffffff;"]

    def _lowering(self, mod, more):
        lowering = _ModLowering(self)
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
        return f"struct Mods {{\n{plain}{members}\n{''.join(self._methods)}}};\n"


class _ModLowering(Lowering):
    """A lowering of a graph of numbers. Captured tensors are read at indices that the graph computes."""

    def __init__(self, mods: Mods):
        super().__init__(self._element, keep_float32=True)
        self._mods = mods
        self._captured: dict[Node, tuple[int, list[str], list[str]]] = {}
        self._node: Node | None = None
        self.module: torch.fx.GraphModule

    def bind_captures(self, nodes: Sequence[Node], captures: Sequence) -> None:
        for node, captured in zip(nodes, captures, strict=True):
            if not isinstance(captured, Tensor):
                dtype = torch.float32 if isinstance(captured, float) else torch.int64
                self.bind({node: Value(self._lifted_number(captured, dtype), dtype)})
                continue
            place = self._mods.buffer(captured)
            sizes = [self._mods.number(size) for size in captured.shape]
            strides = [self._mods.number(stride) for stride in captured.stride()]
            self._captured[node] = place, sizes, strides

    def _lifted_number(self, value, dtype):
        if kind(dtype) == "f":
            return f"as_type<float>(uint({self._mods.number(float_bits(float(value)))}))"
        return f"{register(dtype)}(long({self._mods.number(int(value))}))"

    def operand(self, value, dtype, precise=False):
        fixed = self._node is not None and name_of(self._node).startswith(_FIXED)
        if isinstance(value, Node) or fixed or kind(dtype) == "b":
            return super().operand(value, dtype, precise)
        number = plain(value)
        if dtype in (torch.float16, torch.bfloat16) and not precise:
            number = torch.tensor(float(number)).to(dtype).item()
        return self.statement(f"const {register(dtype)}", self._lifted_number(number, dtype))

    def _make(self, node, at):
        outer, self._node = self._node, node
        try:
            if node.op == "get_attr":
                return self._constant(node)
            if name_of(node) == "lift_fresh_copy.default":
                return self.value(node.args[0], at)
            if node.target is SCATTER:
                return self._scattered(node, at)
            if node.op == "call_function":
                if read := self._indexed(node):
                    return read
                if name_of(node) in (*REDUCTIONS, "dot.default"):
                    return self._reduced(node, at)
                check(node)
            return super()._make(node, at)
        except Unsupported as reason:
            if getattr(reason, "placed", False):
                raise
            error = Unsupported(f"{name_of(node).split('.')[0] or node.target}: {reason}{place_of_node(node)}")
            error.placed = True  # pyright: ignore[reportAttributeAccessIssue]
            raise error from None
        finally:
            self._node = outer

    def _constant(self, node):
        tensor = getattr(self.module, node.target)
        dtype = tensor.dtype if tensor.dtype != torch.float64 else torch.float32
        return Value(literal(tensor.item(), dtype), dtype)

    def _indexed(self, node):
        """Returns the element of a captured tensor at numbers for all of its dimensions, as functions mostly read it.
        Its sizes are no part of the text."""
        if name_of(node) != "index.Tensor":
            return None
        arguments = arguments_of(node)
        source, indices = arguments["self"], list(arguments["indices"])
        if source not in self._captured or len(indices) != fake(source).dim():
            return None
        if any(
            index is None or fake(index).dim() or fake(index).dtype not in (torch.int32, torch.int64)
            for index in indices
        ):
            return None
        place, sizes, strides = self._captured[source]
        wide = "ulong" if place in self._mods.large else "uint"
        inside, terms = [], []
        for index, size, stride in zip(indices, sizes, strides):
            number = self.value(index, ()).text
            if number not in ARGUMENTS:  # which are never negative
                number = self.statement("long", f"{number} < 0 ? long({number}) + long({size}) : long({number})")
                inside.append(f"ulong({number}) < {size}")
            else:
                inside.append(f"uint({number}) < uint(metal::min({size}, ulong(0xffffffff)))")
            terms.append(f"{wide}({number}) * {wide}({stride})")
        inside, offset = " && ".join(inside), " + ".join(terms)
        dtype = result_dtype(node)
        if not all(fake(source).shape):
            return Value(missing(dtype), dtype)
        # Loads without a condition: a compiler makes one of those of a row, for all of its scores.
        exists, at = self.statement("bool", inside), self.statement(wide, offset)
        number = self.statement(register(dtype), from_memory(f"c{place}[{exists} ? {at} : 0]", dtype))
        return Value(self.statement(register(dtype), f"{exists} ? {number} : {missing(dtype)}"), dtype)

    def _scattered(self, node, at):
        """Returns an element of a tensor that has numbers at a place, and nothing elsewhere."""
        _, indices, value = node.args
        dtype, conditions = result_dtype(node), []
        for index, size, own in zip(indices, fake(node).shape, at):
            if fake(index).dim():
                raise Unsupported("a tensor of indices")
            number = self.value(index, ()).text
            conditions.append(f"({number} < 0 ? long({number}) + {size} : long({number})) == {own}")
        free = at[len(indices) :][-fake(value).dim() :] if fake(value).dim() else ()
        place = " && ".join(conditions)
        return Value(self.when(place, dtype, literal(0, dtype), lambda: self.value(value, free).text), dtype)

    def _reduced(self, node, at):
        """Returns the results of a reduction of captured vectors, such as a sum: a loop for each of its dimensions."""
        if name_of(node) == "dot.default":
            dims, factors = (0,), node.args
            held = torch.float32 if kind(result_dtype(node)) == "f" else torch.int64
            state = Accumulator(held, ((held, "a", "0"),), "s.a += x;", "s.a += o.a;", ("s.a",))
        else:
            check_reduction(node)
            dims, factors, state = reduced_dimensions(node), node.args[:1], accumulator(node)
        if state.is_ordered:
            raise Unsupported("no kernel has the place of an element")
        shape, keeps = shape_of(factors[0]), arguments_of(node).get("keepdim")
        own = iter(at)
        place = [next(own) if keeps or d not in dims else "0" for d in range(len(shape))]
        prefix = f"s{self.next()}_"
        own_names = functools.partial(re.sub, r"\bs\.", prefix)
        self.statements += [f"{register(dtype)} {prefix}{name} = {start};" for dtype, name, start in state.fields]
        with contextlib.ExitStack() as loops:
            for d in dims:
                place[d] = f"i{self.next()}"
                head = f"for (int {place[d]} = 0; {place[d]} < {shape[d]}; ++{place[d]})"
                loops.enter_context(self.scope(head))
            values = [self.value(factor, tuple(place)) for factor in factors]
            terms = [converted(value.text, value.dtype, state.operand, self._keep_float32) for value in values]
            self.statements += [f"const {register(state.operand)} x = {' * '.join(terms)};", own_names(state.add)]
        count = literal(math.prod(shape[d] for d in dims), torch.float32)
        dtypes = [result.dtype for result in results_of(node)]
        results = [
            self.statement(register(dtype), re.sub(r"\bcount\b", count, own_names(text)))
            for text, dtype in zip(state.results, dtypes)
        ]
        values = [Value(result, dtype) for result, dtype in zip(results, dtypes)]
        return values if isinstance(node.meta["val"], (tuple, list)) else values[0]

    def _element(self, leaf, at):
        if leaf not in self._captured:
            raise Unsupported("the generator does not know it")
        place, _, strides = self._captured[leaf]
        offset = " + ".join(f"ulong({c}) * {stride}" for c, stride in zip(at or (), strides)) or "0"
        return from_memory(f"c{place}[{offset}]", result_dtype(leaf))
