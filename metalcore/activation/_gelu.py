"""x times the normal distribution function."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from .._core.operators import autograd, cpu_kernel, fake_kernel
from .._core.registry import Op, Override, register
from .._core.routing import accelerated
from .._core.samples import elementwise, hidden_states

__all__ = ["gelu"]

_aten = torch.ops.aten


def gelu(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """Computes x * Phi(x) with the normal distribution function Phi, as torch.nn.functional.gelu.

    Args:
        x: float32, float16 or bfloat16, any shape and strides. It is computed in float32. Other input goes to PyTorch's
            op.
        approximate: "none", or "tanh" for 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))).

    Returns:
        A tensor of x's shape and dtype, with gradients of any order.

    Raises:
        RuntimeError: `approximate` is another string.

    Example:
        >>> metalcore.gelu(torch.tensor([-20.0, 0.0, 20.0], device="mps")).tolist()
        [-0.0, 0.0, 20.0]
    """
    if accelerated(x) and approximate in ("none", "tanh"):
        return _gelu(x, approximate)
    return F.gelu(x, approximate=approximate)


@cpu_kernel("gelu")
def _(x, approximate):
    return F.gelu(x, approximate=approximate)


@fake_kernel("gelu")
def _(x, approximate):
    return torch.empty_like(x)


@cpu_kernel("gelu_backward")
def _(grad, x, approximate):
    return _aten.gelu_backward(grad, x, approximate=approximate, grad_input=torch.empty_like(x))


@fake_kernel("gelu_backward")
def _(grad, x, approximate):
    return torch.empty_like(x)


def _save_with_option(ctx, inputs, output):
    *tensors, ctx.approximate = inputs
    ctx.save_for_backward(*tensors)


def _gelu_backward(ctx, grad):
    (x,) = ctx.saved_tensors
    return _gelu_gradient(grad, x, ctx.approximate), None


def _gelu_derivatives(x, approximate):
    """Returns the first and the second derivative of gelu."""
    if approximate == "none":
        density = torch.exp(-0.5 * x * x) * (1 / math.sqrt(2 * math.pi))
        return 0.5 * (1 + torch.erf(x * math.sqrt(0.5))) + x * density, density * (2 - x * x)
    scale, cubic = math.sqrt(2 / math.pi), 0.044715  # tanh's argument is scale (x + cubic x³)
    t = torch.tanh(scale * (x + cubic * x * x * x))
    slope = scale * (1 + 3 * cubic * x * x)
    sech2 = 1 - t * t
    first = 0.5 * (1 + t) + 0.5 * x * sech2 * slope
    second = sech2 * (slope + 3 * scale * cubic * x * x - x * t * slope * slope)
    return first, second


def _gelu_double_backward(ctx, grad):
    upstream, x = ctx.saved_tensors
    first, second = _gelu_derivatives(x, ctx.approximate)
    return grad * first, grad * upstream * second, None


_gelu = autograd("gelu", _gelu_backward, _save_with_option)
_gelu_gradient = autograd("gelu_backward", _gelu_double_backward, _save_with_option)


register(
    Op(
        "gelu",
        gelu,
        namesake="torch.nn.functional.gelu",
        operators=("gelu", "gelu_backward"),
        override=(Override("gelu"), Override("gelu_"), Override("gelu_backward")),
        samples=lambda: (*elementwise(), *elementwise("tanh, ", approximate="tanh")),
        production=hidden_states(approximate="tanh"),
    )
)
