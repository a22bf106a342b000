"""What lies beneath the overrides while "safe" is on: routes around faults of PyTorch's kernels (metalcore/doctor).

A route has no kernel of its own where an override has one. It stands in the place of the kernel that was there before,
to which the override leaves what it does not take.
"""

from __future__ import annotations

import threading
from typing import Any

from .._core import refused
from .._core.torch_operators import overload
from ._report import count_of

__all__ = ["beneath", "routed", "use"]

_rows: tuple[Any, ...] = ()  # of metalcore.doctor, in use
_inside = threading.local()


def use(rows: tuple[Any, ...]) -> None:
    """From now on beneath() knows the routes of these rows. Kernels that were made before keep theirs."""
    global _rows
    _rows = rows


def routed() -> list[str]:
    """Returns the operators that have routes."""
    return list(dict.fromkeys(name for row in _rows for route in row.routes for name in route.operators))


def beneath(operator: str, device: str, kernel: Any) -> Any:
    """Returns PyTorch's kernel, or one in its place that sends what a fault touches elsewhere."""
    here = [(row, route) for row in _rows for route in row.routes if operator in route.operators]
    return _Routed(operator, device, kernel, here) if here and device == "mps" else kernel


class _Routed:
    """A kernel, called as one of torch.library.get_kernel."""

    def __init__(self, operator, device, kernel, rows_and_routes):
        self._kernel, self._operator = kernel, overload(operator)
        self._count = count_of("safe", f"aten::{operator} on {device}")
        self._routes = [
            (route, f"computed on the CPU, since this machine has the fault {row.name}")
            for row, route in rows_and_routes
        ]

    def call_boxed(self, keyset, *args, **kwargs):
        for route, reason in self._routes:
            if route.applies(*args, **kwargs):
                return self._elsewhere(route, reason, args, kwargs)
        return self._kernel.call_boxed(keyset, *args, **kwargs)

    def _elsewhere(self, route, reason, args, kwargs):
        from ..doctor.routes import on_cpu

        # metalcore's op may leave the call to PyTorch's, which comes here again: then the CPU takes it.
        if route.instead and not getattr(_inside, "a_route", False):
            _inside.a_route, before = True, refused.calls()
            try:
                result = route.instead(self._operator, args, kwargs)
            finally:
                _inside.a_route = False
            if result is not NotImplemented:
                self._count.ran_since(before)
                return result
        self._count.left[reason] += 1
        return on_cpu(self._operator, args, kwargs)
