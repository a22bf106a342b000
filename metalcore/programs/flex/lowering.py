"""A function's graph as statements of MSL, where captured tensors are read at indices that the graph computes."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import operator
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from ..pointwise.accumulators import Accumulator, accumulator, check_reduction, reduced_dimensions, results_of
from ..pointwise.lowering import Lowering
from ..pointwise.nodes import REDUCTIONS, Value, arguments_of, fake, name_of, plain, result_dtype, shape_of
from ..pointwise.numbers import Unsupported, converted, kind, literal, register
from ..pointwise.reads.views import missing
from ..pointwise.source import from_memory
from ..pointwise.support import check
from .graphs import place_of_node
from .scatters import SCATTER

__all__ = ["ARGUMENTS", "ModLowering", "float_bits"]

ARGUMENTS = ("b", "h", "q", "k")
# Operations whose numbers stay in the text, where they decide what a compiler makes: a division by 128 is a shift.
_FIXED = (
    *("div.Tensor_mode", "div.Scalar_mode", "floor_divide", "remainder", "fmod", "pow", "bitwise", "__"),
    *("full", "scalar_tensor", "zeros", "ones"),
)


def float_bits(number: float) -> int:
    """Returns the bits of the nearest float32, which may be infinite."""
    return ctypes.c_uint32.from_buffer(ctypes.c_float(number)).value


class ModLowering(Lowering):
    """A lowering of a graph of numbers.

    Args:
        mods: the Mods that have the captured tensors and numbers.
    """

    def __init__(self, mods: Any):
        super().__init__(self._element, keep_float32=True)
        self._mods = mods
        self._captured: dict[Node, tuple[int, list[str], list[str]]] = {}
        self._node: Node | None = None
        self.module: GraphModule

    def bind_captures(self, nodes: Sequence[Node], captures: Sequence) -> None:
        for node, captured in zip(nodes, captures, strict=True):
            if not isinstance(captured, Tensor):
                dtype = torch.float32 if isinstance(captured, float) else torch.int64
                self.bind({node: Value(self._lifted_number(captured, dtype), dtype)})
                continue
            self._captured[node] = self._mods.buffer(captured)

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
            if node.target is operator.getitem:  # whose operation says why it has no kernel
                return self.value(node.args[0], at)[node.args[1]]
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
                number = self.from_begin(number, size)
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

    def from_begin(self, number: str, size: str) -> str:
        """Returns an index of a dimension that counts from its begin: negative ones count from its end."""
        return self.statement("long", f"{number} < 0 ? long({number}) + long({size}) : long({number})")

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
        self._numbers_of(factors)
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

    def _numbers_of(self, nodes):
        """Makes the numbers that vectors are computed with, such as a norm, before a loop that would make each anew."""
        waiting, seen = list(nodes), set()
        while waiting:
            node = waiting.pop()
            if node in seen or node.op != "call_function":
                continue
            seen.add(node)
            value = node.meta["val"]
            if isinstance(value, Tensor) and value.numel() == 1 and name_of(node) != "lift_fresh_copy.default":
                self.value(node, ("0",) * value.dim())
            else:
                waiting += node.all_input_nodes

    def _element(self, leaf, at):
        if leaf not in self._captured:
            raise Unsupported("the generator does not know it")
        place, _, strides = self._captured[leaf]
        offset = " + ".join(f"ulong({c}) * {stride}" for c, stride in zip(at or (), strides)) or "0"
        return from_memory(f"c{place}[{offset}]", result_dtype(leaf))
