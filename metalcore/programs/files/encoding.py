"""Arguments of operators, and the structure of arguments and results, as JSON and back.

Numbers, texts, None and lists are themselves; everything else is an object with one entry, which says what it is:
{"value": "add_1"}, {"dtype": "float16"}, {"device": "program"}, {"float": "-inf"}, {"complex": "1+2j"}.
"""

from __future__ import annotations

import cmath
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import Node
from torch.utils._pytree import TreeSpec, tree_structure, tree_unflatten

from .container import ProgramFileError

__all__ = [
    "Encoder",
    "decode",
    "decode_tree",
    "dtype_named",
    "encode_tree",
    "fits",
    "form",
    "is_dense",
    "name_of_dtype",
]

_DTYPE_NAMES = (
    "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint64 uint32 uint16 uint8 bool complex64 complex128 "
    "float8_e4m3fn float8_e5m2"
).split()
_DTYPES = {name: getattr(torch, name) for name in _DTYPE_NAMES}
_LAYOUTS = {"strided": torch.strided}
_FORMATS = {
    name: getattr(torch, name) for name in ("contiguous_format", "preserve_format", "channels_last", "channels_last_3d")
}
_FLOATS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}
_ON_DEVICE = "program"  # the device that the program is for
_ON_CPU = "cpu"
_MOST_LEAVES = 100_000
_LEAF = object()  # transformers' outputs drop None


def name_of_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_named(name: Any) -> torch.dtype:
    if not isinstance(name, str) or name not in _DTYPES:
        raise ProgramFileError(f"there is no dtype {_short(name)}")
    return _DTYPES[name]


def form(tensor: torch.Tensor) -> str:
    """Returns a tensor's dtype and shape: "float32[2, 3]"."""
    return f"{name_of_dtype(tensor.dtype)}{list(tensor.shape)}"


def is_dense(shape, strides) -> bool:
    """Returns whether each element of a tensor has its own place, and there are no places between them."""
    expected = 1
    for size, stride in sorted(zip(shape, strides), key=lambda pair: pair[1]):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


class Encoder:
    """Writes arguments. Tensors of the `device` are where the program is, and others must be on the CPU. `names` has
    the names of nodes."""

    def __init__(self, device: torch.device, names: Mapping[Node, str]):
        self.device, self.names = device, names

    def place(self, device: torch.device) -> str:
        if device.type == self.device.type:
            return _ON_DEVICE
        if device.type == "cpu":
            return _ON_CPU
        raise ValueError(f"the program is for {self.device.type}, and a part of it for {device}")

    def __call__(self, thing: Any) -> Any:
        if thing is None or isinstance(thing, (bool, str)) or type(thing) is int:
            return thing
        if isinstance(thing, float):
            return thing if math.isfinite(thing) else {"float": str(float(thing))}
        if isinstance(thing, complex) and cmath.isfinite(thing):
            return {"complex": str(complex(thing))}
        if isinstance(thing, Node):
            return {"value": self.names[thing]}
        if isinstance(thing, (list, tuple)):
            return [self(item) for item in thing]
        if isinstance(thing, torch.dtype):
            return {"dtype": name_of_dtype(thing)}
        if isinstance(thing, torch.device):
            return {"device": self.place(thing)}
        for kind, table in (("layout", _LAYOUTS), ("memory_format", _FORMATS)):
            for name, constant in table.items():
                if thing is constant:
                    return {kind: name}
        raise ValueError(f"{thing!r}, a {type(thing).__name__}, has no form in a file")


def decode(thing: Any, values: Callable[[str], Any], device: torch.device) -> Any:
    """Returns an argument, from what an `Encoder` wrote. `values` gives the value of a name, or raises."""
    if isinstance(thing, list):
        return [decode(item, values, device) for item in thing]
    if not isinstance(thing, dict):
        return thing
    if len(thing) != 1:
        raise ProgramFileError(f"{_short(thing)} is no argument")
    ((kind, name),) = thing.items()
    if not isinstance(name, str):
        raise ProgramFileError(f"{_short(thing)} is no argument")
    if kind == "value":
        return values(name)
    if kind == "dtype":
        return dtype_named(name)
    if kind == "device":
        return device_named(name, device)
    if kind == "complex":
        return _complex(name)
    table = {"float": _FLOATS, "layout": _LAYOUTS, "memory_format": _FORMATS}.get(kind, {})
    if name not in table:
        raise ProgramFileError(f"{_short(thing)} is no argument")
    return table[name]  # pyright: ignore[reportArgumentType]


def _complex(text):
    try:
        number = complex(text)
    except ValueError:
        number = None
    if number is None or not cmath.isfinite(number):  # the code of a graph could not have an infinite one
        raise ProgramFileError(f"{_short(text)} is no finite complex number")
    return number


def device_named(name: Any, device: torch.device) -> torch.device:
    if name not in (_ON_DEVICE, _ON_CPU):
        raise ProgramFileError(f"there is no place {_short(name)}")
    return device if name == _ON_DEVICE else torch.device("cpu")


_PLAIN = {
    # PyTorch makes tensors of numbers.
    "TensorType": lambda v: isinstance(v, Node) or type(v) in (bool, int, float, complex),
    "IntType": lambda v: type(v) is int and -(1 << 63) <= v < 1 << 63,
    "SymIntType": lambda v: type(v) is int and -(1 << 63) <= v < 1 << 63,
    "FloatType": lambda v: type(v) in (int, float),
    "NumberType": lambda v: type(v) in (bool, float, complex) or type(v) is int and -(1 << 63) <= v < 1 << 63,
    "BoolType": lambda v: type(v) is bool,
    "StringType": lambda v: isinstance(v, str),
    "DeviceObjType": lambda v: isinstance(v, torch.device),
    "ScalarTypeType": lambda v: isinstance(v, torch.dtype),
    "LayoutType": lambda v: isinstance(v, torch.layout),
    "MemoryFormatType": lambda v: isinstance(v, torch.memory_format),
}


def fits(kind: Any, thing: Any) -> bool:
    """Returns whether an argument is of a type of a schema. None of what a file cannot hold fits."""
    name = kind.kind()
    if name == "OptionalType":
        return thing is None or fits(kind.getElementType(), thing)
    if name == "ListType":
        element = kind.getElementType()
        if isinstance(thing, list):
            return all(fits(element, item) for item in thing)
        return element.kind() in ("IntType", "SymIntType", "FloatType") and fits(element, thing)
    return name in _PLAIN and _PLAIN[name](thing)


def encode_tree(spec: TreeSpec, is_input: bool) -> Any:
    """Returns the structure of arguments or results: "leaf", or {"tuple": […]}, {"list": […]}, {"dict": [[name, …],
    …]}.

    Results of other classes that are mappings, as the outputs of transformers' models, become dicts, and named tuples,
    as those of torch.topk, become tuples.
    """
    return _encode_tree(tree_unflatten([_LEAF] * spec.num_leaves, spec), is_input)


def _encode_tree(thing, is_input):
    if thing is _LEAF:
        return "leaf"
    kind = tuple if isinstance(thing, tuple) and not is_input else type(thing)
    if kind in (tuple, list):
        return {kind.__name__: [_encode_tree(item, is_input) for item in thing]}
    if type(thing) is dict or isinstance(thing, Mapping) and not is_input:
        if not all(isinstance(name, str) for name in thing):
            raise ValueError("a dict among its arguments or results has names that are no texts")
        return {"dict": [[name, _encode_tree(item, is_input)] for name, item in thing.items()]}
    raise ValueError(
        f"the program {'takes' if is_input else 'returns'} a {type(thing).__name__}; a file can hold tuples, lists and "
        "dicts: wrap the module in one that has these"
    )


def decode_tree(thing: Any) -> TreeSpec:
    return tree_structure(_decode_tree(thing, [0]))


def _decode_tree(thing, count):
    count[0] += 1
    if count[0] > _MOST_LEAVES:
        raise ProgramFileError("the structure of its arguments or results is too large")
    if thing == "leaf":
        return 0
    kind, items = next(iter(thing.items())) if isinstance(thing, dict) and len(thing) == 1 else (None, None)
    if kind in ("tuple", "list") and isinstance(items, list):
        parts = [_decode_tree(item, count) for item in items]
        return tuple(parts) if kind == "tuple" else parts
    if kind == "dict" and isinstance(items, list):
        if all(isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str) for pair in items):
            entries = {name: _decode_tree(item, count) for name, item in items}
            if len(entries) == len(items):
                return entries
    raise ProgramFileError(f"{_short(thing)} is no structure of arguments or results")


def _short(thing):
    text = repr(thing)
    return text if len(text) <= 60 else text[:57] + "…"
