"""A graph of pointwise operations as statements of MSL that compute one element."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND as PROMOTION
from torch._prims_common import elementwise_dtypes
from torch.fx import Node

from .formulas import FORMULAS, Formula
from .functions import fast
from .numbers import Unsupported, check_dtype, converted, kind, literal, register, rounded, unsigned

F32 = torch.float32
REDUCTIONS = (
    *("sum.default", "sum.dim_IntList", "mean.default", "mean.dim", "prod.default", "prod.dim_int"),
    *("amax.default", "amin.default", "max.default", "min.default", "argmax.default", "argmin.default"),
    *("any.default", "any.dim", "any.dims", "all.default", "all.dim", "all.dims"),
    *("var.correction", "std.correction", "var_mean.correction", "std_mean.correction"),
)
SIXTEEN_BITS = (torch.float16, torch.bfloat16)


class Value(NamedTuple):
    """A register, or a number of the graph."""

    text: str
    dtype: torch.dtype


class Lowering:
    """Makes statements from nodes, in the graph's order.

    Args:
        load: called for a leaf, gives the register with its element.
        keep_float32: whether results of 16 bits keep float32's precision until they are stored.
    """

    def __init__(self, load: Callable[[Node], str], *, keep_float32: bool = False):
        self._load = load
        self._keep_float32 = keep_float32
        self._values: dict[Node, Value] = {}
        self.statements: list[str] = []

    def bind(self, values: dict[Node, Value]) -> None:
        """Gives nodes registers that exist already."""
        self._values |= values

    def value(self, node: Node) -> Value:
        """The register of a node whose operands have theirs."""
        if node not in self._values:
            self._values[node] = self._make(node)
        return self._values[node]

    def _make(self, node):
        dtype = result_dtype(node)
        if is_leaf(node):
            return Value(self._load(node), dtype)
        arguments = arguments_of(node)
        text, computed = self._computed(node, arguments, dtype)
        text = converted(text, computed, dtype, self._keep_float32)
        if computed == dtype and dtype in SIXTEEN_BITS and not self._keep_float32 and not _is_exact(node):
            text = rounded(text, dtype)
        name = f"v{len(self._values)}"
        self.statements.append(f"const {register(dtype)} {name} = {text};")
        return Value(name, dtype)

    def _computed(self, node, arguments, dtype):
        """The text of a node's result and its dtype before it is converted to the node's."""
        if special := _SPECIAL.get(name_of(node)):
            return special(self, node, arguments, dtype)
        return self.apply(FORMULAS[name_of(node)], node, arguments)

    def apply(self, formula: Formula, node: Node, arguments: dict[str, Any]) -> tuple[str, torch.dtype]:
        operands = {name: arguments.pop(name) for name in formula.operands}
        computed = promoted(operands.values(), formula.makes_float)
        made = formula.text.get(kind(computed))
        if made is None:
            raise Unsupported(f"there is no formula of it for {str(computed).removeprefix('torch.')}")
        if not isinstance(made, str):
            names = made.__code__.co_varnames[: made.__code__.co_argcount]
            made = made(**{name: _plain(arguments[name]) for name in names})
        texts = {name: self.operand(value, computed, formula.precise) for name, value in operands.items()}
        if computed in SIXTEEN_BITS:
            made = fast(made)
        text = made.format(T=register(computed), U=unsigned(computed), **texts)
        return text, torch.bool if formula.is_bool else computed

    def operand(self, value: Any, dtype: torch.dtype, precise: bool = False) -> str:
        """A node's register, or a number, as one of a dtype."""
        if isinstance(value, Node):
            found = self.value(value)
            return converted(found.text, found.dtype, dtype, self._keep_float32)
        number = _plain(value)
        if dtype in SIXTEEN_BITS and not precise:
            number = torch.tensor(float(number)).to(dtype).item()
        return literal(number, dtype)  # pyright: ignore[reportArgumentType]


def is_leaf(node: Node) -> bool:
    """Whether a node's result is in memory: an input of the graph, or a result of a reduction."""
    return node.op == "placeholder" or node.target is operator.getitem or name_of(node) in REDUCTIONS


def name_of(node: Node) -> str:
    """ "add.Tensor"; "" for what is no overload of aten."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace not in ("aten", "prims"):
        return ""
    prefix = "" if target.namespace == "aten" else "prims."
    return f"{prefix}{target.overloadpacket.__name__}.{target._overloadname}"


def fake(node: Any) -> torch.Tensor:
    """The tensor without memory that stands for a node's result."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        raise Unsupported("its result is no tensor" if value is not None else "it has no shape (meta['val'])")
    if not all(isinstance(size, int) for size in value.shape):
        raise Unsupported(f"its shape {tuple(value.shape)} is symbolic")
    return value


def result_dtype(node: Node) -> torch.dtype:
    dtype = fake(node).dtype
    check_dtype(dtype)
    return dtype


def arguments_of(node: Node) -> dict[str, Any]:
    """All arguments of a call, by name, with the schema's defaults."""
    schema = node.target._schema.arguments  # pyright: ignore[reportAttributeAccessIssue, reportFunctionMemberAccess]
    bound = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
    bound |= {argument.name: value for argument, value in zip(schema, node.args)}
    return bound | node.kwargs


def promoted(operands, makes_float: bool) -> torch.dtype:
    """The dtype to which PyTorch promotes operands."""
    values = [fake(value) if isinstance(value, Node) else _plain(value) for value in operands]
    rule = PROMOTION.INT_TO_FLOAT if makes_float else PROMOTION.DEFAULT
    dtype = elementwise_dtypes(*values, type_promotion_kind=rule)[1]
    check_dtype(dtype)
    return dtype


def _plain(value):
    if isinstance(value, numbers.Complex) and not isinstance(value, numbers.Real):
        raise Unsupported("it has a complex number")
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        raise Unsupported("it has a symbolic number")
    return value


# Operations that are no formula of their operands alone -----------------------------------------------------------


def _is_exact(node):
    """Whether the result is one of the operands."""
    return name_of(node).split(".")[0] in _EXACT


_EXACT = {
    *("where", "masked_fill", "clamp", "clamp_min", "clamp_max", "maximum", "minimum", "fmax", "fmin", "relu", "abs"),
    *("neg", "clone", "alias", "detach", "lift_fresh_copy", "expand", "contiguous", "sign", "sgn", "floor", "ceil"),
    *("trunc", "round", "threshold_backward", "copysign"),
}


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
    exponent = _plain(arguments["exponent"])
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
