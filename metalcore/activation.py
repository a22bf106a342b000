"""Elementwise activations."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ._routing import accelerated, autograd, cpu_kernel, fake_kernel, ops

__all__ = ["silu"]


def silu(x: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(x), as torch.nn.functional.silu.

    Args:
        x: float32, float16 or bfloat16, any shape and strides; computed in float32. Other input goes to PyTorch's op.
    """
    return ops.silu(x) if accelerated(x) else F.silu(x)


@cpu_kernel("silu")
def _(x):
    return F.silu(x)


@fake_kernel("silu")
def _(x):
    return torch.empty_like(x)


def _save_input(ctx, inputs, output):
    ctx.save_for_backward(inputs[0])


def _silu_backward(ctx, grad):
    (x,) = ctx.saved_tensors
    return ops.silu_backward(grad, x)


autograd("silu", _silu_backward, _save_input)
