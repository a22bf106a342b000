"""The override "safe": routes around the faults of PyTorch's MPS backend that doctor has found on this machine, and no
overrides for speed. Overrides that a fault needs are on with it, and what they leave to PyTorch goes by the routes."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch

from .._core.registry import Override
from .._core.torch_operators import overload
from . import _dispatcher
from ._report import count_of, never_replaced

__all__ = ["NAME", "is_on", "lay_routes", "prepare", "put_routes", "take_out_routes", "use"]

NAME = "safe"

_faults: tuple[Any, ...] = ()  # the rows of metalcore.doctor that show on this machine
_on: tuple[Any, ...] = ()  # those that are routed around
_installed: list[_dispatcher.Installed] = []
_undo: list[Callable[[], None]] = []


def prepare() -> list[str]:
    """Finds out what doctor has found on this machine, where it runs if it has not. Returns the overrides that it
    needs."""
    global _faults
    if not torch.backends.mps.is_available():
        return []
    from .. import doctor

    machine = doctor.this_machine()
    if rows := doctor.missing(machine):
        text = f'metalcore: "safe" tries {len(rows)} known faults, once for {machine}. It takes a minute or so.'
        warnings.warn(text, UserWarning, stacklevel=3)
    _faults = doctor.faults(machine)
    return list(dict.fromkeys(name for row in _faults for name in row.overrides))


def is_on() -> bool:
    return bool(_on)


def use(on: bool) -> bool:
    """Returns whether anything changes: then routes and overrides have to be put into the dispatcher again, in this
    order."""
    global _on
    changes, _on = _on != (_faults if on else ()), _faults if on else ()
    return changes


def take_out_routes() -> None:
    """Gives PyTorch its kernels back. No override may be on, since it may hold one of ours."""
    while _installed:
        _installed.pop().remove()
    while _undo:
        _undo.pop()()
    _dispatcher.use_routes(())


def lay_routes() -> None:
    """Overrides that are switched on from now on have the routes beneath them."""
    _dispatcher.use_routes(_on)


def put_routes(overridden: set[tuple[str, str]]) -> None:
    """Routes around the faults that are on where no override holds the route.

    Args:
        overridden: the operators with an override and the keys of its kernels.
    """
    places = [_places(operator, overridden) for operator in _dispatcher.routed()]
    _installed.extend(_dispatcher.Installed(NAME, parts, "mps") for parts in places if parts)
    for row in _on:
        if row.patch:
            _undo.append(row.patch(count_of(NAME, f"{row.name}: {row.instead}")))
        elif not row.routes:
            never_replaced(NAME, row.name, "since nothing can stand in its place: a newer PyTorch is right")


def _places(operator, overridden):
    """Returns the overrides that hold the routes of an operator: at the device's key if it has a kernel there, or where
    PyTorch takes it apart."""
    if not overload(operator):
        return ()
    name = f"aten::{operator}"
    has_kernel = functools.partial(torch._C._dispatch_has_kernel_for_dispatch_key, name)
    if not any(map(has_kernel, ("MPS", "CompositeImplicitAutograd", "CompositeExplicitAutograd"))):
        return ()  # PyTorch has none on the device
    taken_apart = has_kernel("CompositeImplicitAutograd") and not has_kernel("MPS")
    keys = (True, False) if taken_apart or has_kernel("AutogradMPS") else (False,)
    return tuple(
        Override(operator, _hold, at_autograd=at_autograd)
        for at_autograd in keys
        if (operator, ("Autograd" if at_autograd else "") + "MPS") not in overridden
    )


def _hold(previous, count, decline):
    """Returns the kernel of an operator without an override: `previous` knows the routes."""
    return previous.call_boxed
