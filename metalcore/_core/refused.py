"""Calls whose kernels the GPU's own compiler refuses: PyTorch's ops compute them.

A Metal driver may refuse a kernel that another one takes. The operator's kernel in C++ (csrc/ops/common/operator.h)
then calls metalcore_by_torch::<name>, which is defined here by the operator's formula for CPU tensors. It runs before
anything of the call has run, and below autograd: derivatives are operators too, and are computed in the same way.
"""

from __future__ import annotations

import functools
import json
import platform
import threading
from importlib import metadata

import torch

from .. import _C
from .tensors import call_on_cpu

__all__ = ["NAMESPACE", "REASON", "calls", "define", "families", "forget", "note"]

NAMESPACE = "metalcore_by_torch"
REASON = "kernels that Metal refuses (`python -m metalcore info` lists them)"

_library = torch.library.Library(NAMESPACE, "DEF")


class _Calls(threading.local):
    count = 0


_calls = _Calls()


def calls() -> int:
    """Returns how many calls of this thread PyTorch computed because a kernel was refused."""
    return _calls.count


def define(name, formula) -> None:
    """Defines what computes the operator metalcore::`name` where Metal refuses its kernels."""
    if not hasattr(_C, "mps_refused"):
        return
    schema = getattr(torch.ops.metalcore, name).default._schema

    @functools.wraps(formula)
    def by_torch(*args, **kwargs):
        _calls.count += 1
        try:
            note()
            return on_any_device(formula, *args, **kwargs) if schema.returns else formula(*args, **kwargs)
        except BaseException as exception:
            # PyTorch's C interface, through which C++ calls, would print it and lose its type.
            _C.leave_exception(exception)
            return (args[0],) * len(schema.returns) if len(schema.returns) > 1 else args[0] if schema.returns else None

    _library.define(str(schema).removeprefix("metalcore::"))
    _library.impl(name, by_torch, "CompositeExplicitAutograd")


# Metal's messages, for the commands of later processes ----------------------------------------------------------------

_noted: set[str] = set()  # families


def _entry():
    """Returns the name of the cache's entry for this version of metalcore and of the system."""
    from ..msl import cache

    return cache.digest("refused", metadata.version("metalcore"), platform.platform()) + ".json"


def _earlier() -> dict[str, str]:
    from ..msl import cache

    if cache.existing(_entry()) is None:
        return {}
    return json.loads(cache.content(_entry(), lambda path: path.write_text("{}")))


def families() -> dict[str, str]:
    """Returns the families of kernels that Metal has refused on this machine, with its messages: in this process, or in
    one since the last `python -m metalcore selftest`."""
    return _earlier() | _C.mps_refused() if hasattr(_C, "mps_refused") else {}


def note() -> None:
    """Keeps this process's messages."""
    from ..msl import cache

    messages = _C.mps_refused()
    if messages.keys() <= _noted:
        return
    _noted.update(messages)
    together = json.dumps(_earlier() | messages)
    cache.entry(
        _entry(),
        lambda path: path.write_text(together),
        accept=lambda content: messages.items() <= json.loads(content).items(),
    )


def forget() -> None:
    """Forgets the messages of earlier processes."""
    from ..msl import cache

    _noted.clear()
    if path := cache.existing(_entry()):
        path.unlink(missing_ok=True)


def on_any_device(formula, *args, **kwargs):
    """Returns the formula's results on its tensors' device, by way of the CPU where PyTorch lacks an op for the device.
    The formula changes none of its arguments."""
    try:
        return formula(*args, **kwargs)
    except NotImplementedError:
        return call_on_cpu(formula, *args, **kwargs)
