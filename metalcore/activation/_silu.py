"""x * sigmoid(x)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .._core.operators import autograd, cpu_kernel, fake_kernel
from .._core.registry import Op, Override, register
from .._core.routing import accelerated
from .._core.samples import elementwise, hidden_states

__all__ = ["silu"]

_aten = torch.ops.aten


def silu(x: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(x), as torch.nn.functional.silu.

    Args:
        x: float32, float16 or bfloat16, any shape and strides. It is computed in float32. Other input goes to PyTorch's
            op.

    Returns:
        A tensor of x's shape and dtype, with gradients of any order.
    """
    return _silu(x) if accelerated(x) else F.silu(x)


@cpu_kernel("silu")
def _(x):
    return F.silu(x)


@fake_kernel("silu")
def _(x):
    return torch.empty_like(x)


@cpu_kernel("silu_backward")
def _(grad, x):
    return _aten.silu_backward(grad, x, grad_input=torch.empty_like(x))


@fake_kernel("silu_backward")
def _(grad, x):
    return torch.empty_like(x)


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _silu_backward(ctx, grad):
    (x,) = ctx.saved_tensors
    return _silu_gradient(grad, x)


def _silu_double_backward(ctx, grad):
    upstream, x = ctx.saved_tensors
    s = torch.sigmoid(x)
    first = s * (1 + x * (1 - s))
    second = s * (1 - s) * (2 + x * (1 - 2 * s))
    return grad * first, grad * upstream * second


_silu = autograd("silu", _silu_backward, _save)
_silu_gradient = autograd("silu_backward", _silu_double_backward, _save)


register(
    Op(
        "silu",
        silu,
        namesake="torch.nn.functional.silu",
        operators=("silu", "silu_backward"),
        override=(Override("silu"), Override("silu_backward")),
        samples=elementwise,
        production=hidden_states(),
    )
)
