"""x + alpha y, and conversions between floating-point dtypes."""

from __future__ import annotations

import torch
from torch import Tensor

from .._core.operators import autograd, cpu_kernel, fake_kernel
from .._core.registry import Op, Sample, register
from .._core.routing import FLOAT_DTYPES, accelerated, alike, require_tensors

__all__ = ["add", "cast"]


def add(input: Tensor, other: Tensor, *, alpha: float = 1) -> Tensor:
    """Computes input + alpha * other, as torch.add.

    It is there for programs without PyTorch, and to be compared with on devices. PyTorch's own op is as fast, so that
    it is never overridden.

    Args:
        input, other: float32, float16 or bfloat16, of one dtype, any strides. The shapes broadcast. PyTorch's op takes
            all other input.
        alpha: a number. The product and the sum are rounded once.

    Returns:
        A tensor of the shape that the arguments broadcast to. It has gradients of any order.

    Raises:
        As torch.add.

    Example:
        >>> x = torch.ones(3, device="mps")
        >>> metalcore.add(x, x, alpha=2).tolist()
        [3.0, 3.0, 3.0]
    """
    if type(alpha) not in (int, float) or other is None or not alike(input, other):
        return torch.add(input, other, alpha=alpha)
    if input.shape != other.shape:
        input, other = torch.broadcast_tensors(input, other)
    return _add(input, other, float(alpha))


@cpu_kernel("add")
def _(x, y, alpha):
    return torch.add(x, y, alpha=alpha)


@fake_kernel("add")
def _(x, y, alpha):
    return torch.empty_like(x)


def _save_alpha(ctx, inputs, output):
    *_, ctx.alpha = inputs


def _add_backward(ctx, grad):
    by_y = grad if ctx.alpha == 1 else add(torch.zeros_like(grad), grad, alpha=ctx.alpha)
    return grad, by_y, None


_add = autograd("add", _add_backward, _save_alpha)


register(
    Op(
        "add",
        add,
        namesake="torch.add",
        operators=("add",),
        samples=lambda: (
            Sample("rows", ((64, 1000), (64, 1000)), {"alpha": 0.5}),
            Sample("with a rest", ((1027,), (1027,))),
            Sample("not aligned", ((1003,), (1003,)), arguments=lambda x, y: (x[1:], y[1:])),
            Sample("broadcast", ((5, 1, 40), (30, 1))),
            Sample("empty", ((0, 8), (0, 8))),
        ),
        production=lambda batch_size=2, sequence_length=128, hidden_size=1024: Sample(
            "", ((batch_size, sequence_length, hidden_size),) * 2
        ),
    )
)


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


def _save_dtype(ctx, inputs, output):
    ctx.dtype = inputs[0].dtype


def _cast_backward(ctx, grad):
    return cast(grad, ctx.dtype), None


_cast = autograd("cast", _cast_backward, _save_dtype)


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
