"""What the overrides of linear algebra share: see Override. Their results are all that PyTorch's operators give, in the
form that its derivatives expect."""

from __future__ import annotations

import functools
import threading

import torch

from .._core.registry import Override
from .._core.routing import accelerated
from ._common import raise_errors

__all__ = ["checked", "factors_transpose", "override", "takes", "takes_square"]

DTYPES = frozenset({torch.float32})
_inside = threading.local()


def override(operator, take) -> Override:
    """Of an operator of aten by a function with its arguments, which returns None for what it does not take."""
    return Override(operator, _outermost(take), dtypes=DTYPES)


def _outermost(take):
    """Plans may leave a size to PyTorch's operator, the very one that is overridden: on a thread that is inside one of
    these kernels, it is the previous kernel that runs.
    """

    def make(previous, count, left):
        def kernel(keyset, *args, **kwargs):
            if getattr(_inside, "a_kernel", False):
                _inside.left = True
                return previous.call_boxed(keyset, *args, **kwargs)
            _inside.a_kernel, _inside.left = True, False
            try:
                result = take(*args, **kwargs)
                if result is None:
                    return left(keyset, *args, **kwargs)
            finally:
                _inside.a_kernel = False
            if _inside.left:
                count.left["a size at which PyTorch's op is faster (metalcore.explain tells)"] += 1
            else:
                count.ran += 1
            return result

        return kernel

    return make


def takes(*tensors):
    return accelerated(*tensors, dtypes=DTYPES) and all(tensor.dim() >= 2 for tensor in tensors)


def takes_square(A, *others):
    return takes(A, *others) and A.shape[-2] == A.shape[-1]


def checked(results, name, check_errors, A):
    """The results, of which the last is info; PyTorch's error where that is asked for and not 0."""
    if check_errors:
        raise_errors(results[-1], name, A)
    return results


@functools.cache
def factors_transpose(operator, arguments=1):
    """Whether an operator of this PyTorch factors the transpose of a matrix that lies by rows, as its derivative then
    takes for granted. All its arguments are that matrix."""
    A = torch.tensor([[1.0, 0.5], [0.0, 1.0]], dtype=torch.float32, device="cpu")  # whatever the defaults are
    LU = [result for result in operator(*[A] * arguments) if result.shape == A.shape][-1]
    return bool(LU[1, 0])
