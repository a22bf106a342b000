"""The square of relu."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .._core.operators import autograd, cpu_kernel, fake_kernel
from .._core.registry import Op, register
from .._core.routing import accelerated
from .._core.samples import elementwise

__all__ = ["relu2"]


def relu2(x: torch.Tensor) -> torch.Tensor:
    """max(x, 0) squared. NaN stays NaN. The activation is Primer's (So et al., 2021).

    Args:
        x: float32, float16 or bfloat16, any shape and strides. It is computed in float32. Other input goes to PyTorch's
            ops.

    Returns:
        A tensor of x's shape and dtype, with gradients of any order.
    """
    return _relu2(x) if accelerated(x) else _composite(x)


def _composite(x):
    return F.relu(x).square()


def _derivatives(x):
    """The first and the second derivative."""
    y = F.relu(x)
    return 2 * y, 2 * (y > 0).to(x.dtype)


@cpu_kernel("relu2")
def _(x):
    return torch.empty_like(x).copy_(_composite(x))


@fake_kernel("relu2")
def _(x):
    return torch.empty_like(x)


@cpu_kernel("relu2_backward")
def _(grad, x):
    wide = x if x.dtype == torch.float64 else x.float()
    return torch.empty_like(x).copy_(grad * _derivatives(wide)[0])


@fake_kernel("relu2_backward")
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


_relu2 = autograd("relu2", _backward, _save)
_gradient = autograd("relu2_backward", _double_backward, _save)


register(Op("relu2", relu2, reference=_composite, operators=("relu2", "relu2_backward"), samples=elementwise))
