"""A graph of pointwise operations as statements of MSL that compute one element."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND as PROMOTION
from torch._prims_common import elementwise_dtypes
from torch.fx import Node

from .formulas import FORMULAS, Formula
from .functions import fast
from .nodes import Value, arguments_of, fake, is_leaf, name_of, plain, result_dtype, shape_of
from .numbers import MEMORY, Unsupported, check_dtype, converted, kind, literal, register, rounded, unsigned
from .reads import READS
from .stages import Rounding
from .windows import MEASURED

F32 = torch.float32
SIXTEEN_BITS = (torch.float16, torch.bfloat16)


At = tuple[str, ...] | None


class Lowering:
    """Makes statements from nodes, in the graph's order.

    Without coordinates (`at` is None), all operands are read at the element that a kernel is at. With them, an
    operation may read its operands at others: the statements have integers for coordinates, and `when` and `scope`
    hold those that must not run for each element.

    Args:
        load: called for a leaf and the coordinates, gives the register with its element.
        keep_float32: whether results of 16 bits keep float32's precision until they are stored.
        kernel_nodes: the leaves that are computed here.
    """

    def __init__(
        self, load: Callable[[Node, At], str], *, keep_float32: bool = False, kernel_nodes: Collection[Node] = ()
    ):
        self._load = load
        self._keep_float32 = keep_float32
        self._kernel_nodes = kernel_nodes
        self._values: dict[Any, Any] = {}
        self._bound: dict[Node, Value] = {}
        self._at: At = None  # of the node that is being made
        self._count = 0
        self.roundings: dict[str, Rounding] = {}  # by the register that has the result
        self.statements: list[str] = []

    def bind(self, values: dict[Node, Value]) -> None:
        """Gives nodes registers that exist already, wherever they are read."""
        self._bound |= values

    def value(self, node: Node, at: At = None) -> Any:
        """Returns the register of a node's element, or a list of them for several results."""
        if node in self._bound:
            return self._bound[node]
        if at is not None:
            at = tuple("0" if size == 1 else c for size, c in zip(shape_of(node), at, strict=True))
        if (node, at) not in self._values:
            before, self._at = self._at, at
            self._values[node, at] = self._make(node, at)
            self._at = before
        return self._values[node, at]

    def operand_value(self, node: Node) -> Value:
        """Returns the register of an operand at the element that is being made, to which the operand broadcasts."""
        return self.value(node, None if self._at is None else self._at[len(self._at) - fake(node).dim() :])

    def statement(self, type_: str, text: str) -> str:
        """Returns the name of a register with what a text says."""
        key = type_, text
        if key not in self._values:
            self._values[key] = self._declare(f"const {type_}", text)
        return self._values[key]

    def index(self, text: str) -> str:
        """Returns the name of a register with a coordinate, or the coordinate itself where it is a name or a number."""
        return text if text.isidentifier() or text.isdigit() else self.statement("int", text)

    def variable(self, type_: str, start: str) -> str:
        """Returns the name of a register that statements may change."""
        return self._declare(type_, start)

    def next(self) -> int:
        """Returns a number that no other name has."""
        self._count += 1
        return self._count

    def _declare(self, type_, text):
        name = f"v{self.next()}"
        self.statements.append(f"{type_} {name} = {text};")
        return name

    @contextmanager
    def scope(self, head: str) -> Iterator[None]:
        """Puts the statements that are made meanwhile into a block behind `head`."""
        self.statements.append(f"{head} {{")
        outside = dict(self._values)
        yield
        self._values = outside
        self.statements.append("}")

    def when(self, condition: str, dtype: torch.dtype, otherwise: str, make: Callable[[], str]) -> str:
        """Returns the register of what `make` makes where a condition holds, and of another text where it does not."""
        name = self.variable(register(dtype), otherwise)
        with self.scope(f"if ({condition})"):
            self.statements.append(f"{name} = {make()};")
        return name

    def _make(self, node, at):
        if is_leaf(node) and node not in self._kernel_nodes:
            dtype, text = result_dtype(node), self._load(node, at)
            return Value(text if at is None else self.statement(register(dtype), text), dtype)
        if node.target is operator.getitem:
            return self.value(node.args[0], at)[node.args[1]]
        if measured := MEASURED.get(name_of(node)):
            registers = measured(self, node, arguments_of(node), at)
            return registers if isinstance(node.meta["val"], (tuple, list)) else registers[0]
        dtype = result_dtype(node)
        if read := READS.get(name_of(node)):
            return Value(read(self, node, arguments_of(node), at), dtype)
        text, computed = self._computed(node, arguments_of(node), dtype)
        return self.rounded(text, computed, dtype, exact=_is_exact(node))

    def rounded(self, text: str, computed: torch.dtype, dtype: torch.dtype, *, exact: bool = False) -> Value:
        """Returns the register of a result that was computed in one dtype, as PyTorch gives it in another."""
        text = converted(text, computed, dtype, self._keep_float32)
        if computed == dtype and dtype in SIXTEEN_BITS and not self._keep_float32 and not exact:
            before = self._declare("const float", text)
            name = self._declare("const float", rounded(before, dtype))
            self.roundings[name] = Rounding(before, MEMORY[dtype])
            return Value(name, dtype)
        return Value(self._declare(f"const {register(dtype)}", text), dtype)

    def stored(self, value: Value) -> str:
        """Returns what is to be converted to a value's dtype in memory: that conversion rounds, so what is rounded for
        other operations need not be."""
        rounding = self.roundings.get(value.text)
        return rounding.before if rounding else value.text

    def _computed(self, node, arguments, dtype):
        """Returns the text of a node's result and its dtype before it is converted to the node's."""
        if special := _SPECIAL.get(name_of(node)):
            return special(self, node, arguments, dtype)
        return self.apply(FORMULAS[name_of(node)], node, arguments)

    def apply(self, formula: Formula, node: Node, arguments: dict[str, Any]) -> tuple[str, torch.dtype]:
        operands = {name: arguments.pop(name) for name in formula.operands}
        computed = promoted(operands.values(), formula.makes_float)
        template = formula.text.get(kind(computed))
        if template is None:
            raise Unsupported(f"there is no formula of it for {str(computed).removeprefix('torch.')}")
        if not isinstance(template, str):
            names = template.__code__.co_varnames[: template.__code__.co_argcount]
            template = template(**{name: plain(arguments[name]) for name in names})
        texts = {name: self.operand(value, computed, formula.precise) for name, value in operands.items()}
        if name_of(node).split(".")[0] in _OF_RANGES:
            texts = {name: self._in_range(text, operands[name]) for name, text in texts.items()}
        if computed in SIXTEEN_BITS:
            template = fast(template)
        text = template.format(T=register(computed), U=unsigned(computed), **texts)
        return text, torch.bool if formula.is_bool else computed

    def operand(self, value: Any, dtype: torch.dtype, precise: bool = False) -> str:
        """Returns a node's register, or a number, as one of a dtype."""
        if isinstance(value, Node):
            operand = self.operand_value(value)
            return converted(operand.text, operand.dtype, dtype, self._keep_float32)
        number = plain(value)
        if dtype in SIXTEEN_BITS and not precise:
            number = torch.tensor(float(number)).to(dtype).item()
        return literal(number, dtype)  # pyright: ignore[reportArgumentType]

    def _in_range(self, text: str, value: Any) -> str:
        """Returns an operand whose infinities count: those of its dtype, also where float32's precision is kept."""
        dtype = result_dtype(value) if isinstance(value, Node) else F32
        return self.statement("const float", rounded(text, dtype)) if dtype in SIXTEEN_BITS else text

    def nan_to_num(self, node: Node, arguments: dict[str, Any], dtype: torch.dtype) -> tuple[str, torch.dtype]:
        """Lowers nan_to_num. PyTorch's limits are those of the operand's dtype."""
        text = self.operand(arguments["self"], dtype)
        if not dtype.is_floating_point:
            return text, dtype
        text, limits = self._in_range(text, arguments["self"]), torch.finfo(dtype)
        defaults = {"nan": 0.0, "posinf": limits.max, "neginf": limits.min}
        values = {name: plain(arguments.get(name)) for name in defaults}
        nan, high, low = (
            self.operand(defaults[name] if value is None else value, dtype) for name, value in values.items()
        )
        return f"(isnan({text}) ? {nan} : {text} == INFINITY ? {high} : {text} == -INFINITY ? {low} : {text})", dtype


def promoted(operands, makes_float: bool) -> torch.dtype:
    """Returns the dtype to which PyTorch promotes operands."""
    values = [fake(value) if isinstance(value, Node) else plain(value) for value in operands]
    rule = PROMOTION.INT_TO_FLOAT if makes_float else PROMOTION.DEFAULT
    dtype = elementwise_dtypes(*values, type_promotion_kind=rule)[1]
    check_dtype(dtype)
    return dtype


# Operations that are no formula of their operands alone -----------------------------------------------------------


def _is_exact(node):
    """Returns whether the result is one of the operands."""
    return name_of(node).split(".")[0] in _EXACT


_EXACT = {
    *("where", "masked_fill", "clamp", "clamp_min", "clamp_max", "maximum", "minimum", "fmax", "fmin", "relu", "abs"),
    *("neg", "clone", "alias", "detach", "lift_fresh_copy", "expand", "contiguous", "sign", "sgn", "floor", "ceil"),
    *("trunc", "round", "threshold_backward", "copysign", "nan_to_num"),
}
# Operations that ask whether an operand is infinite.
_OF_RANGES = {"isinf", "isfinite", "isnan", "isposinf", "isneginf"}


def _convert(lowering, node, arguments, dtype):
    return lowering.operand(node.args[0], dtype), dtype


def _copy(lowering, node, arguments, dtype):
    return lowering.operand(arguments["src"], dtype), dtype


def _where(lowering, node, arguments, dtype):
    choices = arguments["self"], arguments["other"]
    computed = promoted(choices, makes_float=False)
    condition = lowering.operand(arguments["condition"], torch.bool)
    yes, no = (lowering.operand(choice, computed) for choice in choices)
    return f"({condition} ? {yes} : {no})", computed


def _masked_fill(lowering, node, arguments, dtype):
    mask, filling = lowering.operand(arguments["mask"], torch.bool), lowering.operand(arguments["value"], dtype)
    return f"({mask} ? {filling} : {lowering.operand(arguments['self'], dtype)})", dtype


def _clamp(lowering, node, arguments, dtype):
    names = [name for name in ("self", "min", "max") if arguments.get(name) is not None]
    computed = promoted([arguments[name] for name in names], makes_float=False)
    if kind(computed) == "b":
        raise Unsupported("PyTorch has no clamp of bools")
    text = lowering.operand(arguments["self"], computed)
    for name in names[1:]:
        text = f"pw_{'max' if name == 'min' else 'min'}({text}, {lowering.operand(arguments[name], computed)})"
    return text, computed


def _constant(lowering, node, arguments, dtype):
    name = name_of(node).split(".")[0]
    value = 1 if "ones" in name else 0 if "zeros" in name else arguments.get("fill_value")
    if value is None:
        value = arguments["s"] if name == "scalar_tensor" else arguments["value"]
    return lowering.operand(value, dtype), dtype


_POWERS = {
    2: "{self} * {self}",
    3: "{self} * {self} * {self}",
    0.5: "sqrt({self})",
    -0.5: "1.0f / sqrt({self})",
    -1: "1.0f / {self}",
    -2: "1.0f / ({self} * {self})",
}


def _power(lowering, node, arguments, dtype):
    exponent = plain(arguments["exponent"])
    if dtype.is_floating_point and exponent in _POWERS:
        return _POWERS[exponent].format(self=lowering.operand(arguments["self"], dtype)), dtype
    if not dtype.is_floating_point and exponent < 0:
        raise Unsupported("PyTorch refuses a negative power of whole numbers")
    return lowering.apply(FORMULAS[name_of(node)], node, arguments)


_SPECIAL: dict[str, Callable] = {
    "_to_copy.default": _convert,
    "prims.convert_element_type.default": _convert,
    "copy.default": _copy,
    "masked_fill.Scalar": _masked_fill,
    "nan_to_num.default": Lowering.nan_to_num,
    "masked_fill.Tensor": _masked_fill,
    "clamp.default": _clamp,
    "clamp.Tensor": _clamp,
    "clamp_min.default": _clamp,
    "clamp_min.Tensor": _clamp,
    "clamp_max.default": _clamp,
    "clamp_max.Tensor": _clamp,
    "pow.Tensor_Scalar": _power,
    **dict.fromkeys((f"where.{kind}" for kind in ("self", "ScalarSelf", "ScalarOther", "Scalar")), _where),
    **dict.fromkeys(
        (
            *("full.default", "full_like.default", "ones.default", "ones_like.default", "zeros.default"),
            *("zeros_like.default", "new_full.default", "new_ones.default", "new_zeros.default"),
            *("scalar_tensor.default", "fill.Scalar", "fill.Tensor"),
        ),
        _constant,
    ),
}

OPERATIONS = tuple(sorted({*FORMULAS, *_SPECIAL}))
INDEXED = tuple(sorted({*READS, *MEASURED}))
