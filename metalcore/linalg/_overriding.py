"""Helpers of the overrides of linear algebra (see Override). An override returns all results of PyTorch's operator, in
the form that its derivative expects."""

from __future__ import annotations

import functools
import threading

import torch

from .. import _C
from .._core import refused
from .._core.registry import Override
from .._core.routing import accelerated
from ._common import raise_errors

__all__ = ["checked", "factors_transpose", "override", "takes", "takes_square"]

DTYPES = frozenset({torch.float32})
_inside = threading.local()


def override(operator, take, composite=None) -> Override:
    """Returns the override of an operator of aten. `take` has the operator's arguments, and returns None for those that
    it does not take. For `composite` see Override."""
    return Override(operator, _outermost(take), dtypes=DTYPES, composite=composite)


def _outermost(take):
    """A plan may choose PyTorch's operator, which is the overridden one. On a thread that is inside one of these
    kernels the previous kernel runs, so that no kernel calls itself.
    """

    def make(previous, count, decline):
        def kernel(keyset, *args, **kwargs):
            if getattr(_inside, "a_kernel", False):
                _inside.chose_torch = True
                return previous.call_boxed(keyset, *args, **kwargs)
            _inside.a_kernel, _inside.chose_torch = True, False
            calls_on_cpu = _C.calls_on_cpu()
            refused_before = refused.calls()
            try:
                result = take(*args, **kwargs)
                if result is None:
                    return decline(keyset, *args, **kwargs)
            finally:
                _inside.a_kernel = False
            if _C.calls_on_cpu() != calls_on_cpu:
                count.left["a size at which PyTorch's op on the CPU is faster (metalcore.explain tells)"] += 1
            elif _inside.chose_torch and refused.calls() == refused_before:
                count.left["a size at which PyTorch's op is faster (metalcore.explain tells)"] += 1
            else:
                count.ran_since(refused_before)
            return result

        return kernel

    return make


def takes(*tensors):
    return accelerated(*tensors, dtypes=DTYPES) and all(tensor.dim() >= 2 for tensor in tensors)


def takes_square(A, *others):
    return takes(A, *others) and A.shape[-2] == A.shape[-1]


def checked(results, name, check_errors, A):
    """Returns the results, the last of which is info. With `check_errors` it raises PyTorch's error if info is not
    0."""
    if check_errors:
        raise_errors(results[-1], name, A)
    return results


@functools.cache
def factors_transpose(operator, arguments=1):
    """Returns whether this PyTorch's operator factors the transpose of a row-major matrix, which its derivative then
    assumes. All `arguments` arguments of the operator are that matrix."""
    A = torch.tensor([[1.0, 0.5], [0.0, 1.0]], dtype=torch.float32, device="cpu")  # the defaults may differ
    LU = [result for result in operator(*[A] * arguments) if result.shape == A.shape][-1]
    return bool(LU[1, 0])
