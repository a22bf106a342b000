"""Dtypes as kernels hold them: in memory, and in registers."""

from __future__ import annotations

import math

import torch

# The type in memory. A bool is a byte of 0 or 1.
MEMORY = {
    torch.float32: "float",
    torch.float16: "half",
    torch.bfloat16: "bfloat",
    torch.int8: "char",
    torch.int16: "short",
    torch.int32: "int",
    torch.int64: "long",
    torch.uint8: "uchar",
    torch.bool: "uchar",
}
_UNSIGNED = {
    torch.int8: "uchar",
    torch.int16: "ushort",
    torch.int32: "uint",
    torch.int64: "ulong",
    torch.uint8: "uchar",
}


class Unsupported(NotImplementedError):
    """A node that the generator does not take. The message says why."""


def check_dtype(dtype: torch.dtype) -> None:
    if dtype not in MEMORY:
        raise Unsupported(f"{str(dtype).removeprefix('torch.')}, which Metal's kernels here do not have")


def register(dtype: torch.dtype) -> str:
    """Returns the type that a value is computed in: float for all floating-point numbers."""
    return "float" if dtype.is_floating_point else "bool" if dtype == torch.bool else MEMORY[dtype]


def unsigned(dtype: torch.dtype) -> str:
    """Returns the type whose arithmetic wraps around."""
    return _UNSIGNED.get(dtype, register(dtype))


def kind(dtype: torch.dtype) -> str:
    """Returns "f" for floating-point numbers, "i" for integers and "b" for bool."""
    return "f" if dtype.is_floating_point else "b" if dtype == torch.bool else "i"


def literal(value: bool | int | float, dtype: torch.dtype) -> str:
    """Returns a number as a register of the dtype holds it."""
    if kind(dtype) == "b":
        return "true" if value else "false"
    if kind(dtype) == "f":
        value = float(torch.tensor(float(value), dtype=torch.float64).to(torch.float32))
        if math.isnan(value):
            return "NAN"
        if math.isinf(value):
            return "INFINITY" if value > 0 else "(-INFINITY)"
        text = f"{value!r}f"
        return f"({text})" if value < 0 or math.copysign(1, value) < 0 else text
    bits = dtype.itemsize * 8
    value = int(value) & (1 << bits) - 1
    if dtype != torch.uint8 and value >> bits - 1:
        value -= 1 << bits
    if value == -(1 << 63):
        return "long(-9223372036854775807 - 1)"
    return f"{register(dtype)}({value})"


def rounded(text: str, dtype: torch.dtype) -> str:
    """Returns a float in a register as a number of the dtype's precision."""
    return text if dtype == torch.float32 else f"float({MEMORY[dtype]}({text}))"


def converted(text: str, old: torch.dtype, new: torch.dtype, keep_float32: bool = False) -> str:
    """Returns a register of one dtype as a register of another one."""
    if old == new:
        return text
    if new == torch.bool:
        return f"({text} != 0)"
    if kind(new) == "f":
        value = text if kind(old) == "f" else f"float({text})"
        exact = kind(old) == "b" or keep_float32 or (new == torch.float32 or old == new)
        return value if exact else rounded(value, new)
    if kind(old) == "f" and new.itemsize < 4:  # as CPUs convert: numbers that do not fit lose their upper bits
        return f"{register(new)}(int({text}))"
    return f"{register(new)}({text})"
