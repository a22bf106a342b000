"""The larger of x and 0."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .._core.operators import autograd, cpu_kernel, fake_kernel
from .._core.registry import Op, Override, register
from .._core.routing import accelerated, alike
from .._core.samples import elementwise, hidden_states

__all__ = ["relu"]

_aten = torch.ops.aten


def relu(x: torch.Tensor) -> torch.Tensor:
    """Computes max(x, 0), as torch.nn.functional.relu. NaN stays NaN.

    Args:
        x: float32, float16 or bfloat16, any shape and strides. Other input, integers too, goes to PyTorch's op.

    Returns:
        A tensor of x's shape and dtype, with gradients of any order.

    Example:
        >>> metalcore.relu(torch.tensor([-1.0, 2.0], device="mps")).tolist()
        [0.0, 2.0]
    """
    return _relu(x) if accelerated(x) else F.relu(x)


@cpu_kernel("relu")
def _(x):
    return F.relu(x)


@fake_kernel("relu")
def _(x):
    return torch.empty_like(x)


@cpu_kernel("relu_backward")
def _(grad, x):
    return _aten.threshold_backward(grad, x, 0, grad_input=torch.empty_like(x))


@fake_kernel("relu_backward")
def _(grad, x):
    return torch.empty_like(x)


def _save(ctx, inputs, output):
    ctx.save_for_backward(output)  # it has x's sign, and the next op often saves it too


def _relu_backward(ctx, grad):
    (y,) = ctx.saved_tensors
    return _relu_gradient(grad, y)


def _save_backward(ctx, inputs, output):
    ctx.save_for_backward(inputs[1])


def _relu_double_backward(ctx, grad):
    (x,) = ctx.saved_tensors
    return _relu_gradient(grad, x), None  # the second derivative is zero


_relu = autograd("relu", _relu_backward, _save)
_relu_gradient = autograd("relu_backward", _relu_double_backward, _save_backward)


# Overrides of PyTorch's kernels


# This kernel is in Python because its threshold is a Scalar, which PyTorch's stable ABI does not have.
def _override_backward(previous, count, decline):
    def kernel(keyset, grad, y, threshold):
        if threshold != 0 or not alike(grad, y):
            return decline(keyset, grad, y, threshold)
        return count.run(_relu_gradient, grad, y)

    return kernel


register(
    Op(
        "relu",
        relu,
        namesake="torch.nn.functional.relu",
        operators=("relu", "relu_backward"),
        override=(
            Override("relu"),
            Override("relu_"),
            Override(
                "threshold_backward",
                _override_backward,
                devices=frozenset({"mps"}),
                elsewhere="PyTorch's kernel is as fast there, and costs the host less",
            ),
        ),
        samples=elementwise,
        production=hidden_states(),
    )
)
