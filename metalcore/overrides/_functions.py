"""The overrides of what PyTorch has in Python: functions, which metalcore.overrides says under `clip_grad_norm_`, and
optimizers' steps, under `adamw`."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch

from .._core.registry import FunctionOverride, Op, OptimizerOverride
from .._core.routing import accelerated
from ._gains import NOT_MEASURED
from ._report import count_of

__all__ = ["switch_functions", "switch_step"]

_REASON = "a device, a dtype, a layout or an option that the kernels do not take"


def switch_functions(name: str, override: FunctionOverride, on: bool) -> None:
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


_PLAIN: Any = torch.optim.Optimizer


def switch_step(op: Op, override: OptimizerOverride, on: bool, leaves_fused: bool) -> None:
    """Makes the step of PyTorch's class choose, or gives it back. It may leave PyTorch the steps that are fused."""
    original: Any = override.original
    step = original.step
    if on and not hasattr(step, "metalcore_original"):
        step = original.step = _chooser(op, override, step)
        count_of(op.name, _name(override))
    if hasattr(step, "metalcore_original"):
        step.metalcore_switch.clear()  # schedulers keep the step that they have found
        if on:
            step.metalcore_switch.update({"on"}, {"leaves fused"} if leaves_fused else ())
        else:
            original.step = step.metalcore_original


def _name(override):
    return f"torch.optim.{override.original.__name__}"


def _chooser(op, override, step) -> Any:
    """Returns a step that runs our class's one on PyTorch's optimizer if it has a parameter for the kernel."""
    original, ours, counted = override.original, override.replacement, (op.name, _name(override))
    if not getattr(step, "hooked", False):  # what the first construction does: the step calls an optimizer's hooks
        step = _hooked(step)
    previous, state = step.__wrapped__, set()

    def choose(self, closure=None):
        if "on" in state and not torch.compiler.is_compiling():
            if type(self) is not original:
                reason = f"{type(self).__qualname__}, a subclass, which may do something else"
            elif not (groups := [group for group in self.param_groups if any(map(accelerated, group["params"]))]):
                reason = "no parameter that its kernel takes"
            elif "leaves fused" in state and all(group.get("fused") for group in groups):
                reason = NOT_MEASURED
            else:
                return ours.step_of(self, count_of(*counted), closure)
            count_of(*counted).left[reason] += 1
        return previous(self, closure)

    chooser = _hooked(functools.update_wrapper(choose, previous))
    chooser.metalcore_original, chooser.metalcore_switch = step, state
    return chooser


def _hooked(step):
    hooked = _PLAIN.profile_hook_step(step)
    hooked.hooked = True
    return hooked
