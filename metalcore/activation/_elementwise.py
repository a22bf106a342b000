"""Activations that are functions of one number: relu, silu, gelu, and relu2 and quick_gelu, which PyTorch lacks."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from .._core.operators import autograd, cpu_kernel, fake_kernel
from .._core.registry import Op, Override, register
from .._core.routing import accelerated, alike
from .._core.samples import elementwise, hidden_states

__all__ = ["gelu", "gelu_derivatives", "quick_gelu", "relu", "relu2", "silu"]


_aten = torch.ops.aten


def _activation(
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


def _save_relu(ctx, inputs, output):
    ctx.save_for_backward(output)  # it has x's sign, and the next op often saves it too


def _relu_backward(ctx, grad):
    (y,) = ctx.saved_tensors
    return _relu_gradient(grad, y)


def _save_relu_backward(ctx, inputs, output):
    ctx.save_for_backward(inputs[1])


def _relu_double_backward(ctx, grad):
    (x,) = ctx.saved_tensors
    return _relu_gradient(grad, x), None  # the second derivative is zero


_relu = autograd("relu", _relu_backward, _save_relu)
_relu_gradient = autograd("relu_backward", _relu_double_backward, _save_relu_backward)


# Overrides of PyTorch's kernels


# This kernel is in Python because its threshold is a Scalar, which PyTorch's stable ABI does not have.
def _override_relu_backward(previous, count, decline):
    def kernel(keyset, grad, y, threshold):
        if threshold != 0 or not alike(grad, y) or grad.shape != y.shape:  # rules of batches broadcast them
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
                _override_relu_backward,
                devices=frozenset({"mps"}),
                elsewhere="PyTorch's kernel is as fast there, and costs the host less",
            ),
        ),
        samples=elementwise,
        production=hidden_states(),
    )
)


def silu(x: torch.Tensor) -> torch.Tensor:
    """Computes x * sigmoid(x), as torch.nn.functional.silu.

    Args:
        x: float32, float16 or bfloat16, any shape and strides. It is computed in float32. Other input goes to PyTorch's
            op.

    Returns:
        A tensor of x's shape and dtype, with gradients of any order.

    Example:
        >>> metalcore.silu(torch.zeros(3, device="mps")).tolist()
        [0.0, 0.0, 0.0]
    """
    return _silu(x) if accelerated(x) else F.silu(x)


def _silu_derivatives(x):
    s = torch.sigmoid(x)
    return s * (1 + x * (1 - s)), s * (1 - s) * (2 + x * (1 - 2 * s))


_silu = _activation("silu", F.silu, _silu_derivatives)


register(
    Op(
        "silu",
        silu,
        namesake="torch.nn.functional.silu",
        operators=("silu", "silu_backward"),
        override=(Override("silu"), Override("silu_"), Override("silu_backward")),
        samples=elementwise,
        production=hidden_states(),
    )
)


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


def gelu_derivatives(x, approximate):
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
    first, second = gelu_derivatives(x, ctx.approximate)
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


def relu2(x: torch.Tensor) -> torch.Tensor:
    """Computes max(x, 0) squared. NaN stays NaN. The activation is Primer's (So et al., 2021).

    Args:
        x: float32, float16 or bfloat16, any shape and strides. It is computed in float32. Other input goes to PyTorch's
            ops.

    Returns:
        A tensor of x's shape and dtype, with gradients of any order.

    Example:
        >>> metalcore.relu2(torch.tensor([-1.0, 2.0], device="mps")).tolist()
        [0.0, 4.0]
    """
    return _relu2(x) if accelerated(x) else _relu2_by_torch(x)


def _relu2_by_torch(x):
    return F.relu(x).square()


def _relu2_derivatives(x):
    """Returns the first and the second derivative."""
    y = F.relu(x)
    return 2 * y, 2 * (y > 0).to(x.dtype)


_relu2 = _activation("relu2", _relu2_by_torch, _relu2_derivatives)


register(Op("relu2", relu2, reference=_relu2_by_torch, operators=("relu2", "relu2_backward"), samples=elementwise))


def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    """Computes x * sigmoid(1.702 x), the approximation of gelu that CLIP uses (Hendrycks and Gimpel, 2016).

    Args:
        x: float32, float16 or bfloat16, any shape and strides. It is computed in float32. Other input goes to PyTorch's
            ops.

    Returns:
        A tensor of x's shape and dtype, with gradients of any order.

    Example:
        >>> metalcore.quick_gelu(torch.zeros(3, device="mps")).tolist()
        [0.0, 0.0, 0.0]
    """
    return _quick_gelu(x) if accelerated(x) else _quick_gelu_by_torch(x)


def _quick_gelu_by_torch(x):
    return x * torch.sigmoid(1.702 * x)


def _quick_gelu_derivatives(x):
    """Returns the first and the second derivative."""
    s = torch.sigmoid(1.702 * x)
    slope = 1.702 * s * (1 - s)
    return s + x * slope, 2 * slope + 1.702 * (x * slope) * (1 - 2 * s)


_quick_gelu = _activation("quick_gelu", _quick_gelu_by_torch, _quick_gelu_derivatives)


register(
    Op(
        "quick_gelu",
        quick_gelu,
        reference=_quick_gelu_by_torch,
        operators=("quick_gelu", "quick_gelu_backward"),
        samples=elementwise,
    )
)
