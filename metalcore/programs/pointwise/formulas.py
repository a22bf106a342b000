"""The table of operations: for each overload of aten, the MSL of one element.

A formula's text has its operands in braces: {self}, {other}. They are registers of the dtype that the operands are
promoted to; {T} is that register's type, and {U} the one whose arithmetic wraps around. Arguments that are no operands
are numbers and strings of the graph; a function of them makes the text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from .numbers import Unsupported, literal

F32 = torch.float32


@dataclass(frozen=True)
class Formula:
    """How an operation is computed.

    Attributes:
        operands: the arguments that are values.
        text: by kind of the promoted dtype ("f", "i", "b"): the text, or a function of the other arguments that makes
            it.
        makes_float: whether whole numbers are computed in float32.
        is_bool: whether the result is a bool.
        precise: whether numbers among the operands keep float32's precision beside tensors of 16 bits.
    """

    operands: tuple[str, ...]
    text: Mapping[str, str | Callable[..., str]]
    makes_float: bool = False
    is_bool: bool = False
    precise: bool = False


FORMULAS: dict[str, Formula] = {}


def _add(names, operands, *, f=None, i=None, b=None, **options):
    text = {kind: template for kind, template in (("f", f), ("i", i), ("b", b)) if template is not None}
    formula = Formula(tuple(operands.split()), text, **options)
    for name in names.split():
        FORMULAS[name if "." in name else f"{name}.default"] = formula


def _number(value):
    return literal(value, F32)


# Of one number ----------------------------------------------------------------------------------------------------

for _name, _text in {
    "exp": "exp({self})",
    "exp2": "exp2({self})",
    "expm1": "pw_expm1({self})",
    "log": "log({self})",
    "log2": "log2({self})",
    "log10": "log10({self})",
    "log1p": "pw_log1p({self})",
    "sqrt": "sqrt({self})",
    "rsqrt": "1.0f / sqrt({self})",
    "reciprocal": "1.0f / {self}",
    "sigmoid": "pw_sigmoid({self})",
    "tanh": "tanh({self})",
    "sin": "sin({self})",
    "cos": "cos({self})",
    "tan": "tan({self})",
    "asin": "asin({self})",
    "acos": "acos({self})",
    "atan": "atan({self})",
    "sinh": "sinh({self})",
    "cosh": "cosh({self})",
    "asinh": "asinh({self})",
    "acosh": "acosh({self})",
    "atanh": "atanh({self})",
    "erf": "pw_erf({self})",
    "erfc": "pw_erfc({self})",
    "deg2rad": "{self} * 0.017453292f",
    "rad2deg": "{self} * 57.29578f",
}.items():
    _add(_name, "self", f=_text, makes_float=True)

for _name, _function in {"floor": "floor", "ceil": "ceil", "trunc": "trunc", "round": "rint"}.items():
    _add(_name, "self", f=f"{_function}({{self}})", i="{self}")
_add("frac", "self", f="{self} - trunc({self})")
_add("abs", "self", f="fabs({self})", i="{T}({self} < 0 ? {U}(0) - {U}({self}) : {U}({self}))", b="{self}")
_add("neg", "self", f="-{self}", i="{T}({U}(0) - {U}({self}))")
_add(
    "sign sgn",
    "self",
    f="({self} > 0.0f ? 1.0f : {self} < 0.0f ? -1.0f : 0.0f)",
    i="{T}(({self} > 0) - ({self} < 0))",
    b="{self}",
)
_add("square", "self", f="{self} * {self}", i="{T}({U}({self}) * {U}({self}))")
_add("signbit", "self", f="signbit({self})", i="{self} < 0", b="false", is_bool=True)
_add("isnan", "self", f="isnan({self})", i="false", b="false", is_bool=True)
_add("isinf", "self", f="isinf({self})", i="false", b="false", is_bool=True)
_add("isfinite", "self", f="isfinite({self})", i="true", b="true", is_bool=True)
_add("isposinf", "self", f="{self} == INFINITY", i="false", b="false", is_bool=True)
_add("isneginf", "self", f="{self} == -INFINITY", i="false", b="false", is_bool=True)
_add("logical_not", "self", f="{self} == 0.0f", i="{self} == 0", b="!{self}", is_bool=True)
_add("bitwise_not", "self", i="{T}(~{self})", b="!{self}")
_add("clone alias detach lift_fresh_copy _to_copy expand contiguous", "self", f="{self}", i="{self}", b="{self}")

# Activations ------------------------------------------------------------------------------------------------------

_add("relu", "self", f="({self} <= 0.0f ? 0.0f : {self})", i="({self} <= 0 ? {T}(0) : {self})")
_add("relu6", "self", f="pw_min(pw_max({self}, 0.0f), 6.0f)")
_add("silu", "self", f="{self} * pw_sigmoid({self})")
_add("hardswish", "self", f="{self} * pw_min(pw_max({self} + 3.0f, 0.0f), 6.0f) / 6.0f")
_add("hardsigmoid", "self", f="pw_min(pw_max({self} + 3.0f, 0.0f), 6.0f) / 6.0f")
_add("mish", "self", f="{self} * tanh(pw_softplus({self}))")
_add(
    "hardtanh",
    "self",
    f=lambda min_val, max_val: f"pw_min(pw_max({{self}}, {_number(min_val)}), {_number(max_val)})",
)
_add(
    "leaky_relu",
    "self",
    f=lambda negative_slope: f"({{self}} > 0.0f ? {{self}} : {{self}} * {_number(negative_slope)})",
)
_add(
    "elu",
    "self",
    f=lambda alpha, scale, input_scale: (
        f"({{self}} < 0.0f ? pw_expm1({{self}} * {_number(input_scale)}) * {_number(alpha * scale)} : "
        f"{{self}} * {_number(scale)})"
    ),
)
_add(
    "softplus",
    "self",
    f=lambda beta, threshold: (
        f"({{self}} * {_number(beta)} > {_number(threshold)} ? {{self}} : "
        f"pw_log1p(exp({{self}} * {_number(beta)})) / {_number(beta)})"
    ),
)
_add(
    "threshold", "self", f=lambda threshold, value: f"({{self}} <= {_number(threshold)} ? {_number(value)} : {{self}})"
)
_add(
    "hardshrink",
    "self",
    f=lambda lambd: f"({{self}} >= -{_number(lambd)} && {{self}} <= {_number(lambd)} ? 0.0f : {{self}})",
)
_add(
    "softshrink",
    "self",
    f=lambda lambd: (
        f"({{self}} > {_number(lambd)} ? {{self}} - {_number(lambd)} : "
        f"{{self}} < -{_number(lambd)} ? {{self}} + {_number(lambd)} : {{self}} * 0.0f)"
    ),
)
_TANH_INNER = "0.7978846f * ({self} + 0.044715f * {self} * {self} * {self})"


def _gelu(approximate):
    return "pw_gelu_tanh({self})" if approximate == "tanh" else "pw_gelu({self})"


def _gelu_backward(approximate):
    if approximate == "tanh":
        slope = "0.7978846f * (1.0f + 3.0f * 0.044715f * {self} * {self})"
        tanh_ = f"tanh({_TANH_INNER})"
        return f"{{grad_output}} * (0.5f * (1.0f + {tanh_}) + 0.5f * {{self}} * (1.0f - {tanh_} * {tanh_}) * {slope})"
    density = "{self} * 0.3989423f * exp(-0.5f * {self} * {self})"
    return f"{{grad_output}} * (pw_normal({{self}}) + {density})"


_add("gelu", "self", f=_gelu)

# Their derivatives ------------------------------------------------------------------------------------------------

_add("sigmoid_backward", "grad_output output", f="{grad_output} * (1.0f - {output}) * {output}")
_add("tanh_backward", "grad_output output", f="{grad_output} * (1.0f - {output} * {output})")
_add("gelu_backward", "grad_output self", f=_gelu_backward)
_add(
    "silu_backward",
    "grad_output self",
    f="{grad_output} * pw_sigmoid({self}) * (1.0f + {self} * (1.0f - pw_sigmoid({self})))",
)
_add(
    "threshold_backward",
    "grad_output self",
    f=lambda threshold: f"({{self}} <= {_number(threshold)} ? 0.0f : {{grad_output}})",
)
_add(
    "hardtanh_backward",
    "grad_output self",
    f=lambda min_val, max_val: (
        f"({{self}} <= {_number(min_val)} || {{self}} >= {_number(max_val)} ? 0.0f : {{grad_output}})"
    ),
)
_add(
    "leaky_relu_backward",
    "grad_output self",
    f=lambda negative_slope, self_is_result: (
        f"({{self}} > 0.0f ? {{grad_output}} : {{grad_output}} * {_number(negative_slope)})"
    ),
)
_add(
    "hardsigmoid_backward",
    "grad_output self",
    f="({self} > -3.0f && {self} < 3.0f ? {grad_output} * (1.0f / 6.0f) : 0.0f)",
)
_add(
    "hardswish_backward",
    "grad_output self",
    f="({self} <= -3.0f ? 0.0f : {self} < 3.0f ? {grad_output} * ({self} / 3.0f + 0.5f) : {grad_output})",
)

# Of two and three numbers -----------------------------------------------------------------------------------------


def _scaled(alpha, plain, kind):
    sign = "-" if "-" in plain else ""
    if alpha == 1:
        return plain
    if kind == "f":
        return f"fma({literal(-alpha if sign else alpha, F32)}, {{other}}, {{self}})"
    return f"{{T}}({{U}}({{self}}) {sign or '+'} {{U}}({int(alpha)}) * {{U}}({{other}}))"


_add(
    "add.Tensor add.Scalar",
    "self other",
    f=lambda alpha: _scaled(alpha, "{self} + {other}", "f"),
    i=lambda alpha: _scaled(alpha, "{T}({U}({self}) + {U}({other}))", "i"),
    b=lambda alpha: "({self} || {other})" if alpha else "{self}",
    precise=True,
)
_add(
    "sub.Tensor sub.Scalar",
    "self other",
    f=lambda alpha: _scaled(alpha, "{self} - {other}", "f"),
    i=lambda alpha: _scaled(alpha, "{T}({U}({self}) - {U}({other}))", "i"),
    precise=True,
)


def _rsub(alpha):
    if alpha != 1:
        raise Unsupported("alpha is not 1")
    return "{T}({U}({other}) - {U}({self}))"


_add("rsub.Tensor rsub.Scalar", "self other", f=_rsub, i=_rsub, precise=True)
_add(
    "mul.Tensor mul.Scalar",
    "self other",
    f="{self} * {other}",
    i="{T}({U}({self}) * {U}({other}))",
    b="({self} && {other})",
    precise=True,
)
_add("div.Tensor div.Scalar true_divide.Tensor", "self other", f="{self} / {other}", makes_float=True, precise=True)


def _divided(rounding_mode, kind):
    if rounding_mode == "floor":
        return "pw_floor_divide({self}, {other})"
    if rounding_mode == "trunc":
        return "trunc({self} / {other})" if kind == "f" else "pw_divide({self}, {other})"
    raise Unsupported(f"rounding mode {rounding_mode!r}")


_add(
    "div.Tensor_mode div.Scalar_mode",
    "self other",
    f=lambda rounding_mode: _divided(rounding_mode, "f"),
    i=lambda rounding_mode: _divided(rounding_mode, "i"),
)
_add(
    "floor_divide floor_divide.Scalar",
    "self other",
    f="pw_floor_divide({self}, {other})",
    i="pw_floor_divide({self}, {other})",
)
_add(
    "remainder.Tensor remainder.Scalar remainder.Scalar_Tensor",
    "self other",
    f="pw_remainder({self}, {other})",
    i="pw_remainder({self}, {other})",
)
_add("fmod.Tensor fmod.Scalar", "self other", f="fmod({self}, {other})", i="pw_modulo({self}, {other})")
_add(
    "pow.Tensor_Tensor pow.Scalar pow.Tensor_Scalar",
    "self exponent",
    f="pow({self}, {exponent})",
    i="pw_power<{T}, {U}>({self}, {exponent})",
)
_add("atan2", "self other", f="atan2({self}, {other})", makes_float=True)
_add("hypot", "self other", f="pw_hypot({self}, {other})")
_add("copysign.Tensor copysign.Scalar", "self other", f="copysign({self}, {other})", makes_float=True)
_add("logaddexp", "self other", f="pw_logaddexp({self}, {other})")
_add(
    "xlogy.Tensor xlogy.Scalar_Self xlogy.Scalar_Other",
    "self other",
    f="({self} == 0.0f && !isnan({other}) ? 0.0f : {self} * log({other}))",
    makes_float=True,
)
_add("heaviside", "self values", f="({self} == 0.0f ? {values} : float({self} > 0.0f))")
_add("maximum", "self other", f="pw_max({self}, {other})", i="max({self}, {other})", b="({self} || {other})")
_add("minimum", "self other", f="pw_min({self}, {other})", i="min({self}, {other})", b="({self} && {other})")
_add("fmax", "self other", f="fmax({self}, {other})", i="max({self}, {other})", b="({self} || {other})")
_add("fmin", "self other", f="fmin({self}, {other})", i="min({self}, {other})", b="({self} && {other})")
for _name, _operator in {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}.items():
    _text = f"{{self}} {_operator} {{other}}"
    _add(f"{_name}.Tensor {_name}.Scalar", "self other", f=_text, i=_text, b=_text, is_bool=True)
for _name, _operator in {"and": "&&", "xor": "!="}.items():
    _text = f"({{self}} != 0) {_operator} ({{other}} != 0)"
    _add(f"logical_{_name}", "self other", f=_text, i=_text, b=_text, is_bool=True)
# CUDA 13.0's ptxas gives the one for the other where a kernel has both && and || of the same comparisons.
_add(
    "logical_or",
    "self other",
    f="abs({self}) + abs({other}) != 0.0f",
    i="({self} | {other}) != 0",
    b="({self} || {other})",
    is_bool=True,
)
for _name, _operator in {"and": "&", "or": "|", "xor": "^"}.items():
    _add(
        f"bitwise_{_name}.Tensor bitwise_{_name}.Scalar bitwise_{_name}.Scalar_Tensor",
        "self other",
        i=f"{{T}}({{self}} {_operator} {{other}})",
        b=f"bool({{self}} {_operator} {{other}})",
    )
_SHIFT = "({other} < 0 || {other} >= {T}(8 * sizeof({T})) ? "
_add(
    "bitwise_left_shift.Tensor bitwise_left_shift.Tensor_Scalar __lshift__.Tensor __lshift__.Scalar",
    "self other",
    i=_SHIFT + "{T}(0) : {T}({U}({self}) << {other}))",
)
_add(
    "bitwise_right_shift.Tensor bitwise_right_shift.Tensor_Scalar __rshift__.Tensor __rshift__.Scalar",
    "self other",
    i=_SHIFT + "{T}({self} < 0 ? -1 : 0) : {T}({self} >> {other}))",
)
_LERP = "(fabs({weight}) < 0.5f ? {self} + {weight} * ({end} - {self}) : {end} - ({end} - {self}) * (1.0f - {weight}))"
_add("lerp.Tensor lerp.Scalar", "self end weight", f=_LERP, precise=True)
_add(
    "addcmul",
    "self tensor1 tensor2",
    f=lambda value: "{self} + " + ("" if value == 1 else f"{_number(value)} * ") + "{tensor1} * {tensor2}",
    i=lambda value: f"{{T}}({{U}}({{self}}) + {{U}}({int(value)}) * {{U}}({{tensor1}}) * {{U}}({{tensor2}}))",
)
_add("addcdiv", "self tensor1 tensor2", f=lambda value: f"{{self}} + {_number(value)} * ({{tensor1}} / {{tensor2}})")
_add("_prelu_kernel", "self weight", f="({self} > 0.0f ? {self} : {self} * {weight})")
