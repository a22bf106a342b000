"""Functions in place of those of other libraries: methods of their modules' classes, and functions of their files; and
transformers' own branches for captures, in place of others while metalcore records.

Those read no values on the host. So masks of padding and of packed sequences are always written out on the device, from
what each replay is given, and never left out because one batch has no padding.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Iterator

from torch.compiler import is_compiling

from ..._core import refused
from .. import _report

__all__ = ["Patch", "as_captured", "full_name", "owner_of", "reads_nothing", "run_counted", "subclasses"]


def full_name(thing) -> str:
    return f"{thing.__module__}.{thing.__qualname__}"


def owner_of(cls, member):
    """Returns the class that defines the member of cls, or None."""
    return next((base for base in cls.__mro__ if member in vars(base)), None)


def subclasses(cls):
    """Yields all classes that derive from cls."""
    for subclass in cls.__subclasses__():
        yield subclass
        yield from subclasses(subclass)


class Patch:
    """A function in place of a member of a class or of a Python file."""

    def __init__(self, owner, member):
        self.owner, self.member, self.on = owner, member, False
        self.original = vars(owner)[member]

    def install(self, function) -> None:
        """Puts the function there. While the patch is off, a wrapper of it may still call it: it must look at `on`."""
        self.function, self.on = functools.wraps(self.original)(function), True
        setattr(self.owner, self.member, self.function)

    def remove(self) -> None:
        self.on = False
        if vars(self.owner).get(self.member) is self.function:
            setattr(self.owner, self.member, self.original)


def run_counted(count: _report.Count, compute, original, reason="input that its kernel does not take"):
    """Returns compute(), or original() where that is None, counted."""
    if is_compiling():  # the graph would contain a count
        result = compute()
        return original() if result is None else result
    refused_before = refused.calls()
    result = compute()
    if result is None:
        count.left[reason] += 1
        return original()
    count.ran_since(refused_before)
    return result


_MODULE, _ASKED = "transformers.utils.import_utils", "is_cuda_stream_capturing"


def reads_nothing() -> bool:
    """Returns whether transformers takes the branches that read no values on the host: while it is traced or
    captured."""
    is_tracing = getattr(sys.modules.get(_MODULE), "is_tracing", None)
    return is_tracing is not None and is_tracing()


@contextlib.contextmanager
def as_captured() -> Iterator[None]:
    """Makes transformers take this thread to capture a CUDA graph, inside the block. It matters only if transformers
    has been imported."""
    module = sys.modules.get(_MODULE)
    if not hasattr(module, _ASKED):
        yield
        return
    patch, thread = Patch(module, _ASKED), threading.get_ident()
    patch.install(lambda: patch.on and threading.get_ident() == thread or patch.original())
    try:
        yield
    finally:
        patch.remove()
