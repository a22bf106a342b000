"""Operators of an activation that is a function of one number, and its gradient."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .._core.operators import autograd, cpu_kernel, fake_kernel

__all__ = ["activation"]


def activation(
    name: str, formula: Callable[[Tensor], Tensor], derivatives: Callable[[Tensor], tuple[Tensor, Tensor]]
) -> Callable[[Tensor], Tensor]:
    """Gives the operators `name` and `name`_backward their kernels without data and for the CPU, and their gradients.

    Args:
        formula: the activation, in PyTorch's ops.
        derivatives: its first and its second derivative.

    Returns:
        The operator as a function of x, with gradients of any order, which compute the activation again.
    """

    @fake_kernel(name)
    def _(x):
        return torch.empty_like(x)

    @fake_kernel(f"{name}_backward")
    def _(grad, x):
        return torch.empty_like(x)

    @cpu_kernel(name)
    def _(x):
        return torch.empty_like(x).copy_(formula(x))

    @cpu_kernel(f"{name}_backward")
    def _(grad, x):
        wide = x if x.dtype == torch.float64 else x.float()
        return torch.empty_like(x).copy_(grad * derivatives(wide)[0])

    def save(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    def backward(ctx, grad):
        return gradient(grad, *ctx.saved_tensors)

    def double_backward(ctx, grad):
        upstream, x = ctx.saved_tensors
        first, second = derivatives(x)
        return grad * first, grad * upstream * second

    gradient = autograd(f"{name}_backward", double_backward, save)
    return autograd(name, backward, save)
