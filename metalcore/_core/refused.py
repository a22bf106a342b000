"""Calls whose kernels the GPU's own compiler refuses: PyTorch's ops compute them.

A Metal driver may refuse a kernel that another one takes. The operator's kernel in C++ (csrc/ops/operator.h) then calls
metalcore_by_torch::<name>, which is defined here by the operator's formula for CPU tensors. It runs before anything of
the call has run, and below autograd: derivatives are operators too, and are computed in the same way.
"""

from __future__ import annotations

import functools
import threading

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from .. import _C

__all__ = ["NAMESPACE", "REASON", "calls", "define"]

NAMESPACE = "metalcore_by_torch"
REASON = "kernels that Metal refuses (`python -m metalcore info` lists them)"

_library = torch.library.Library(NAMESPACE, "DEF")


class _Calls(threading.local):
    count = 0


_calls = _Calls()


def calls() -> int:
    """How many calls of this thread PyTorch computed because a kernel was refused."""
    return _calls.count


def define(name, formula) -> None:
    """Defines what computes the operator metalcore::`name` where its kernels are refused. Only Metal refuses kernels."""
    if not hasattr(_C, "mps_refused"):
        return
    schema = getattr(torch.ops.metalcore, name).default._schema

    @functools.wraps(formula)
    def by_torch(*args, **kwargs):
        _calls.count += 1
        try:
            return on_any_device(formula, *args, **kwargs) if schema.returns else formula(*args, **kwargs)
        except (
            BaseException
        ) as exception:  # PyTorch's C interface, through which C++ calls, prints it and loses its type
            _C.leave_exception(exception)
            return (args[0],) * len(schema.returns) if len(schema.returns) > 1 else args[0] if schema.returns else None

    _library.define(str(schema).removeprefix("metalcore::"))
    _library.impl(name, by_torch, "CompositeExplicitAutograd")


def on_any_device(formula, *args, **kwargs):
    """The formula's results on its tensors' device, by way of the CPU where PyTorch lacks an op for the device. The
    formula changes none of its arguments."""
    try:
        return formula(*args, **kwargs)
    except NotImplementedError:
        device = next(value for value in args if isinstance(value, Tensor)).device
        args, kwargs = tree_map_only(Tensor, Tensor.cpu, (args, kwargs))
        return tree_map_only(Tensor, lambda result: result.to(device), formula(*args, **kwargs))
