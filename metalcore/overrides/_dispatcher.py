"""Puts the kernels of ops' overrides into PyTorch's dispatcher: metalcore's op if it takes the input, else the kernel
that was there before.

While "safe" is on, routes around faults of PyTorch's kernels (metalcore/doctor) lie beneath the overrides. A route has
no kernel of its own where an override has one. It stands in the place of the kernel that was there before, to which the
override leaves what it does not take.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
from typing import Any

import torch
from torch import Tensor
from torch._decomp import decomposition_table

from .. import _C
from .._core import refused
from .._core.registry import Override
from .._core.routing import accelerated, is_plain
from .._core.torch_operators import overload
from ..mac_kernels import this_release
from ._gains import NOT_MEASURED
from ._report import count_of

__all__ = ["Installed", "beneath", "routed", "use_routes"]

_rows: tuple[Any, ...] = ()  # of metalcore.doctor, in use
_inside = threading.local()


def use_routes(rows: tuple[Any, ...]) -> None:
    """Makes beneath() know the routes of these rows from now on. Kernels that were made before keep theirs."""
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


# The operators that kernels in C++ call for what they do not take: with the names and the arguments of aten's. Each
# has the kernel that was there before.
_replaced = torch.library.Library("metalcore_replaced", "DEF")


class Installed:
    """The kernels of an op's override, in PyTorch's dispatcher for a type of device.

    Attributes:
        places: the operators, and the keys at which it has their kernels.
    """

    def __init__(
        self, name: str, overrides: tuple[Override, ...], device: str, leaves: frozenset[Override] = frozenset()
    ):
        """`leaves` are those that leave the calls to PyTorch for which that has a kernel of its own."""
        # All looked up first: with a kernel at one key, PyTorch would compute another answer for the next.
        previous_kernels = [
            (override, key, beneath(override.operator, device, _kernel_before(override.operator, key)))
            for override in overrides
            for key in [("Autograd" if override.at_autograd else "") + device.upper()]
        ]
        self.places = {(override.operator, key) for override, key, _ in previous_kernels}
        self._overrides, self._leaves = overrides, leaves
        self._libraries = torch.library.Library("aten", "IMPL"), torch.library.Library("metalcore_replaced", "IMPL")
        self._in_cpp = []  # operators and keys
        with _silent():
            for override, key, previous in previous_kernels:
                self._put(name, override, key, previous, f"aten::{override.operator} on {device}", device)
            for override in overrides:
                self._reach_by_composite(override.composite, device.upper())
        _forget_resolved(overrides)

    def _put(self, name, override, key, previous, what, device):
        in_python, replaced = self._libraries
        operator = override.operator
        if override.kernel:
            count = count_of(name, what)
            make = override.alone if override in self._leaves and override.alone else override.kernel
            kernel = make(previous, count, _left(previous, count, override.dtypes))
            if override in self._leaves:
                kernel = _leaving(kernel, override.own_calls, previous, count)
            in_python.impl(operator, kernel, key, with_keyset=True, allow_override=True)  # not the default before 2.12
            return
        count = count_of(name, what, functools.partial(_C.replacement_ran, operator, device))
        _define_replaced(operator)
        results = len(getattr(torch.ops.aten, operator).default._schema.returns)
        replaced.impl(operator, _left_by_cpp(_left(previous, count, override.dtypes), results), key, with_keyset=True)
        _replace_from_python(operator, key)
        _C.put_replacement(operator, key)
        self._in_cpp.append((operator, key))

    def _reach_by_composite(self, operator, key):
        if operator and torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{operator}", key):
            kernel = getattr(torch.ops.aten, operator).default.decompose
            for place in (key, f"Autograd{key}"):
                self._libraries[0].impl(operator, kernel, place)

    def remove(self) -> None:
        """Takes the kernels out again; PyTorch's dispatcher goes back to what it had."""
        for operator, key in self._in_cpp:
            _C.take_out_replacement(operator, key)
        for library in self._libraries:
            library._destroy()
        _forget_resolved(self._overrides)


class _Decomposition:
    """PyTorch's decomposition of an operator, called as a kernel of torch.library.get_kernel."""

    def __init__(self, operator):
        self._function = decomposition_table[overload(operator)]

    def call_boxed(self, keyset, *args, **kwargs):
        return self._function(*args, **kwargs)


class _Missing:
    """Stands where PyTorch has no kernel, for versions whose get_kernel does not know the one that says so."""

    def __init__(self, operator, key):
        self._message = f"The operator 'aten::{operator}' is not currently implemented for the {key} device"

    def call_boxed(self, keyset, *args, **kwargs):
        raise NotImplementedError(self._message)


_COMPOSITE = ("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional", "CompositeImplicitAutograd")


def _kernel_before(operator, key):
    """Returns PyTorch's kernel, or its decomposition of an operator that it does not reach on the device."""
    name = f"aten::{operator}"
    has_kernel = functools.partial(torch._C._dispatch_has_kernel_for_dispatch_key, name)
    decomposed = overload(operator) in decomposition_table
    if decomposed and not any(map(has_kernel, (key, *_COMPOSITE))):
        return _Decomposition(operator)
    try:
        return torch.library.get_kernel(name, key)
    except RuntimeError:
        return _Missing(operator, key)


@functools.cache
def _define_replaced(operator):
    _replaced.define(str(getattr(torch.ops.aten, operator).default._schema).removeprefix("aten::"))


@contextlib.contextmanager
def _silent():
    """Hides the warning of some versions of PyTorch for the first kernel that replaces another, which is what was
    asked for."""
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(False)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
            yield
    finally:
        torch.set_warn_always(always)


@functools.cache
def _replace_from_python(operator, key):
    """Replaces a kernel, and takes that back. The warning of a first kernel from C++ would go past Python's filters."""
    library = torch.library.Library("aten", "IMPL")
    library.impl(operator, lambda *arguments: None, key)
    library._destroy()


def _left_by_cpp(left, results):
    """Returns what C++ calls through PyTorch's C interface, which prints exceptions and loses their types."""

    def call(keyset, *args, **kwargs):
        try:
            return left(keyset, *args, **kwargs)
        except BaseException as exception:
            _C.leave_exception(exception)
            return args[0] if results == 1 else (args[0],) * results

    return call


def _left(previous, count, dtypes):
    def left(keyset, *args, **kwargs):
        if _C.left_as_refused():
            refused.note()
            count.left[refused.REASON] += 1
        else:
            count.left[_why_left(args, dtypes)] += 1
        return previous.call_boxed(keyset, *args, **kwargs)

    return left


def _leaving(kernel, own_calls, previous, count):
    """Returns the kernel, except for calls for which PyTorch has one of its own."""
    release = this_release()

    def leaving(keyset, *args, **kwargs):
        if own_calls(release, *args, **kwargs):
            count.left[NOT_MEASURED] += 1
            return previous.call_boxed(keyset, *args, **kwargs)
        return kernel(keyset, *args, **kwargs)

    return leaving


def _why_left(args, dtypes):
    """Returns why metalcore did not take these arguments of an operator, in words."""
    tensors = [value for value in args if isinstance(value, Tensor)]
    for tensor in tensors:
        if tensor.dtype not in dtypes:
            return f"{str(tensor.dtype).removeprefix('torch.')}, which its kernels do not take"
        if tensor.layout is not torch.strided:
            return "a layout that its kernels do not take"
        if not is_plain(tensor):
            return "tensors that stand for others, as in a trace"
    if tensors and not accelerated(*tensors, dtypes=dtypes):
        return "torch.func transforms, forward-mode derivatives, or tensors of several devices"
    if len({tensor.dtype for tensor in tensors}) > 1:
        return "tensors of several dtypes"
    return "shapes or options that its kernels do not take"


def _forget_resolved(overrides):
    # Tracing resolves an operator's kernel in Python and remembers it; registering from Python does not reset that.
    for override in overrides:
        overload(override.operator)._dispatch_cache.clear()
