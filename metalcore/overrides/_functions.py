"""The overrides of functions that are not operators: what metalcore.overrides says under `clip_grad_norm_`."""

from __future__ import annotations

import importlib

from .._core.registry import FunctionOverride
from ._report import count_of

__all__ = ["switch"]

_REASON = "a device, a dtype, a layout or an option that the kernels do not take"


def switch(name: str, override: FunctionOverride, on: bool) -> None:
    """Puts our functions in the places of PyTorch's, or gives these back."""
    for place, make in override.functions.items():
        module_name, attribute = place.rsplit(".", 1)
        module = importlib.import_module(module_name)
        current = getattr(module, attribute)
        if on and not hasattr(current, "metalcore_original"):
            ours = make(current, count_of(name, place), _decline(current, name, place))
            ours.metalcore_original = current  # pyright: ignore[reportFunctionMemberAccess]
            setattr(module, attribute, ours)
        elif not on and hasattr(current, "metalcore_original"):
            setattr(module, attribute, current.metalcore_original)


def _decline(previous, name, place):
    def decline(*arguments):
        count_of(name, place).left[_REASON] += 1
        return previous(*arguments)

    return decline
