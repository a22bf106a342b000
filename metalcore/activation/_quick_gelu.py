"""The approximation of gelu by a sigmoid."""

from __future__ import annotations

import torch

from .._core.operators import autograd, cpu_kernel, fake_kernel
from .._core.registry import Op, register
from .._core.routing import accelerated
from .._core.samples import elementwise

__all__ = ["quick_gelu"]


def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(1.702 x), the approximation of gelu that CLIP uses (Hendrycks and Gimpel, 2016).

    Args:
        x: float32, float16 or bfloat16, any shape and strides. It is computed in float32. Other input goes to PyTorch's
            ops.

    Returns:
        A tensor of x's shape and dtype, with gradients of any order.
    """
    return _quick_gelu(x) if accelerated(x) else _composite(x)


def _composite(x):
    return x * torch.sigmoid(1.702 * x)


def _derivatives(x):
    """The first and the second derivative."""
    s = torch.sigmoid(1.702 * x)
    slope = 1.702 * s * (1 - s)
    return s + x * slope, slope * (2 + 1.702 * x * (1 - 2 * s))


@cpu_kernel("quick_gelu")
def _(x):
    return torch.empty_like(x).copy_(_composite(x))


@fake_kernel("quick_gelu")
def _(x):
    return torch.empty_like(x)


@cpu_kernel("quick_gelu_backward")
def _(grad, x):
    wide = x if x.dtype == torch.float64 else x.float()
    return torch.empty_like(x).copy_(grad * _derivatives(wide)[0])


@fake_kernel("quick_gelu_backward")
def _(grad, x):
    return torch.empty_like(x)


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _backward(ctx, grad):
    (x,) = ctx.saved_tensors
    return _gradient(grad, x)


def _double_backward(ctx, grad):
    upstream, x = ctx.saved_tensors
    first, second = _derivatives(x)
    return grad * first, grad * upstream * second


_quick_gelu = autograd("quick_gelu", _backward, _save)
_gradient = autograd("quick_gelu_backward", _double_backward, _save)


register(
    Op(
        "quick_gelu",
        quick_gelu,
        reference=_composite,
        operators=("quick_gelu", "quick_gelu_backward"),
        samples=elementwise,
    )
)
