"""The overrides of optimizers' constructors: what metalcore.overrides says under `adamw`."""

from __future__ import annotations

import functools
from typing import Any

import torch

from .._core.registry import Op, OptimizerOverride
from .._core.routing import accelerated
from ._report import count_of

__all__ = ["switch"]


def switch(op: Op, override: OptimizerOverride, on: bool) -> None:
    """Makes the constructor of PyTorch's class choose, or gives it back."""
    original: Any = override.original
    constructor = original.__init__
    if on and not hasattr(constructor, "metalcore_original"):
        original.__init__ = _chooser(op, override, constructor)
        count_of(op.name, _name(override))
    elif not on and hasattr(constructor, "metalcore_original"):
        original.__init__ = constructor.metalcore_original


def _name(override):
    return f"torch.optim.{override.original.__name__}"


def _chooser(op, override, constructor) -> Any:
    """The constructor that makes a replacement, which is a subclass, if a parameter is one for its kernel."""
    original, replacement, counted = override.original, override.replacement(), (op.name, _name(override))

    def construct(self, params, *args, **kwargs):
        if type(self) is original:
            params = list(params)  # it may be a generator, and is looked at twice
            if _takes_parameters(params):
                self.__class__ = replacement
                return self.__init__(params, *args, **kwargs)
            count_of(*counted).left["made without a parameter that its kernel takes"] += 1
        elif not isinstance(self, op.function):
            reason = f"{type(self).__qualname__}, a subclass, which may do something else"
            count_of(*counted).left[reason] += 1
        return constructor(self, params, *args, **kwargs)

    chooser: Any = functools.update_wrapper(construct, constructor)
    chooser.metalcore_original = constructor
    return chooser


def _takes_parameters(params):
    """Whether an optimizer's parameters (tensors, pairs with names, or groups) hold one for metalcore's kernel; the
    replacement leaves the others to PyTorch."""
    tensors = []
    for entry in params:
        entries = [entry]
        if isinstance(entry, dict) and "params" in entry:
            group = entry["params"]
            entries = entry["params"] = [group] if isinstance(group, torch.Tensor) else list(group)  # or a generator
        tensors += [item[1] if isinstance(item, tuple) else item for item in entries]
    return any(accelerated(tensor) for tensor in tensors)
