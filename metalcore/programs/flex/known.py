"""Functions that have been traced before: the same code with the same things in its closure has the same graph.

A function whose closure, defaults, globals, or attributes of modules and classes, hold something else than tensors,
numbers and such functions is traced in each call. Nothing here keeps a captured tensor alive.
"""

from __future__ import annotations

import inspect
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..ir import one_tracer
from .graphs import Captured

__all__ = ["traced_once"]

_MOST = 256
_FIXED = ("torch", "math", "operator", "builtins")  # modules whose attributes nobody sets
_known: OrderedDict[Any, tuple[Any, list]] = OrderedDict()


class _Unknown(Exception):
    pass


def traced_once(function: Callable, kind: str, trace: Callable[[], Captured], *more: Any) -> Captured:
    """Returns trace(), or what it returned for an equal function.

    Args:
        more: what the graph depends on besides.
    """
    with one_tracer:  # _known is shared as well
        try:
            key = kind, more, torch.get_default_dtype(), _key(function, set())
        except _Unknown:
            return trace()
        if key in _known:
            graph, references = _known[key]
            captures = tuple(reference() if callable(reference) else reference for reference in references)
            if all(captured is not None for captured in captures):
                _known.move_to_end(key)
                return Captured(graph, captures)  # pyright: ignore[reportArgumentType]
        captured = trace()
        references = [weakref.ref(x) if isinstance(x, Tensor) else x for x in captured.captures]
        _known[key] = captured.graph, references
        while len(_known) > _MOST:
            _known.popitem(last=False)
        return captured


def _key(value, inside, names=frozenset()):
    """Returns what stands for a thing that a function reads.

    Args:
        inside: what is being looked at already.
        names: the names that the function reads, which may be attributes of modules and classes.
    """
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.device)):
        return type(value), repr(value)  # repr tells 0.0 from -0.0
    if type(value) in (Tensor, torch.nn.Parameter):
        if value.is_cpu and not value.dim() and not value.requires_grad:  # its number is part of the graph
            return "number", value.dtype, repr(value.item())
        return id(value), value.shape, value.stride(), value.dtype, value.device, value.requires_grad
    if isinstance(value, (tuple, list)):
        return type(value), tuple(_key(item, inside, names) for item in value)
    if isinstance(value, types.FunctionType):
        return _key_of_function(value, inside)
    if isinstance(value, (types.ModuleType, type)):
        return id(value), _attributes(value, inside, names)
    if isinstance(value, types.BuiltinFunctionType):
        return id(value)
    raise _Unknown


def _attributes(owner, inside, names):
    """Returns what stands for the attributes of a module or of a class by these names, which a program may set."""
    module = owner.__name__ if isinstance(owner, types.ModuleType) else owner.__module__
    if module.split(".")[0] in _FIXED or (id(owner), names) in inside:
        return ()
    inside.add((id(owner), names))
    found = ((name, inspect.getattr_static(owner, name, None)) for name in sorted(names))
    return tuple((name, _key(value, inside, names)) for name, value in found)


def _key_of_function(function, inside):
    if function in inside:
        return function.__code__
    names = _names(function.__code__)
    if function.__module__ is not None and function.__module__.split(".")[0] == "torch":
        return function.__code__, id(function), _cells(function, inside, names)
    inside.add(function)
    found = {name: function.__globals__[name] for name in names if name in function.__globals__}
    read = *sorted(found.items()), *function.__dict__.items()
    read = tuple((name, _key(value, inside, names)) for name, value in read)
    defaults = function.__defaults__, *(function.__kwdefaults__ or {}).items()
    return function.__code__, _cells(function, inside, names), read, _key(defaults, inside, names)


def _cells(function, inside, names):
    try:
        return tuple(_key(cell.cell_contents, inside, names) for cell in function.__closure__ or ())
    except ValueError:  # a cell without contents
        raise _Unknown from None


def _names(code):
    """Returns the names that code reads, also that of functions inside of it."""
    inner = (_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return frozenset(code.co_names).union(*inner)
