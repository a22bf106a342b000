"""MSL's number types and which numbers of Python fit them, and limits of Metal."""

import functools
import math
import re
from typing import NamedTuple

MAX_INDEX = 30  # of buffers and of threadgroup arguments
MAX_CONSTANT_INDEX = 65535  # of function constants
MAX_THREADS = 1024  # of a threadgroup
MAX_THREADGROUP_MEMORY = 32768  # bytes
MAX_GRID = 2**32 - 1  # threads in a direction
MAX_NESTING = 256  # brackets in brackets
MAX_INCLUDE_DEPTH = 200


_INTEGERS = {"char": (8, True), "uchar": (8, False), "short": (16, True), "ushort": (16, False), "int": (32, True),
             "uint": (32, False), "unsigned": (32, False), "long": (64, True), "ulong": (64, False),
             "size_t": (64, False), "ptrdiff_t": (64, True)}  # (bits, whether it is signed)  # fmt: skip
_FIXED = {f"{u}int{bits}_t": (bits, not u) for u in ("", "u") for bits in (8, 16, 32, 64)}
_FLOATS = {"half": (16, 65504.0), "bfloat": (16, 3.3895313892515355e38), "float": (32, 3.4028234663852886e38)}
_VECTOR = re.compile(r"(.*[a-z])([234])")


class NumberType(NamedTuple):
    """A scalar or vector type of MSL."""

    name: str  # the scalar's name
    components: int
    bits: int  # the scalar's size
    kind: type  # bool, int or float
    low: int = 0  # the least int; `high` is the greatest
    high: int = 1
    largest: float = math.inf  # the largest finite float


@functools.lru_cache(maxsize=256)
def number_type(text):
    """Returns the NumberType that a text names; None for any other type."""
    text = "".join(text.split()).replace("metal::", "").replace("unsignedint", "uint")
    match = None if text in _FIXED else _VECTOR.fullmatch(text)
    name, count = (match[1], int(match[2])) if match else (text, 1)
    if name == "bool":
        return NumberType(name, count, 8, bool)
    if name in _FLOATS:
        bits, largest = _FLOATS[name]
        return NumberType(name, count, bits, float, largest=largest)
    if found := _INTEGERS.get(name) or _FIXED.get(name):
        bits, signed = found
        low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if signed else (0, (1 << bits) - 1)
        return NumberType(name, count, bits, int, low, high)
    return None


def misfit(value, type_, *, either_sign=False):
    """Returns why a bool, int or float does not fit a NumberType's scalar; None where it fits.

    Args:
        either_sign: accept an integer that is the signed or the unsigned reading of the type's bits.
    """
    if type_.kind is float:
        finite = isinstance(value, float) and not math.isfinite(value)
        if isinstance(value, bool):
            return f"{value} is a bool"
        return None if finite or abs(value) <= type_.largest else f"{value} is too large for it"
    if isinstance(value, float):
        return f"{value} is a float"
    low, high = type_.low, type_.high
    if either_sign and type_.kind is int:
        low, high = -(1 << (type_.bits - 1)), (1 << type_.bits) - 1
    return None if low <= value <= high else f"{int(value)} is not {low} to {high}"
