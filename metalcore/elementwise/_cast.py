"""Conversions between floating-point dtypes."""

from __future__ import annotations

import torch
from torch import Tensor

from .._core.operators import autograd, cpu_kernel, fake_kernel
from .._core.registry import Op, Sample, register
from .._core.routing import FLOAT_DTYPES, accelerated, require_tensors

__all__ = ["cast"]


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the numbers of x in another dtype, as x.to(dtype): the nearest ones, and the even one of two.

    It is there for programs without PyTorch, and to be compared with on devices. PyTorch's own op is as fast, so that
    it is never overridden.

    Args:
        x: float32, float16 or bfloat16, any strides. PyTorch's op takes all other input.
        dtype: another one of these dtypes.

    Returns:
        A contiguous tensor of x's shape; or x, if it has the dtype. It has gradients of any order.

    Raises:
        TypeError: x is no tensor, or dtype is no dtype.

    Example:
        >>> metalcore.cast(torch.tensor([1.0, 257.0], device="mps"), torch.bfloat16).tolist()
        [1.0, 256.0]
    """
    require_tensors("cast", x=x)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"cast: dtype must be a torch.dtype, not {type(dtype).__name__}")
    if x.dtype == dtype:
        return x
    if dtype not in FLOAT_DTYPES or not accelerated(x) or x.numel() > 2**32 - 1:
        return x.to(dtype)
    return _cast(x, dtype)


@cpu_kernel("cast")
def _(x, dtype):
    return x.to(dtype).contiguous()


@fake_kernel("cast")
def _(x, dtype):
    return x.new_empty(x.shape, dtype=dtype)


def _save(ctx, inputs, output):
    ctx.dtype = inputs[0].dtype


def _backward(ctx, grad):
    return cast(grad, ctx.dtype), None


_cast = autograd("cast", _backward, _save)


def _sample(dtype, kind, *shape, **more):
    # A gradient of a narrower dtype's numbers is rounded to these, which no bound of the argument's dtype covers.
    return Sample(f"{dtype}{kind}"[6:], (shape,), {"dtype": dtype}, backward=dtype == torch.float32, **more)


def _samples():
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        yield _sample(dtype, "", 64, 1000)
        yield _sample(dtype, ", strided", 40, 30, arguments=lambda x: (x.T[1:],))


register(
    Op(
        "cast",
        cast,
        reference=lambda x, dtype: x,
        operators=("cast",),
        samples=lambda: tuple(_samples()),
    )
)
