"""Activations of x + bias."""

from __future__ import annotations

import torch

from .._core.operators import autograd, cpu_kernel, derive, fake_kernel
from .._core.registry import Op, Sample, register
from .._core.routing import INT32_MAX, alike, require_tensors
from ._gated import _ACTIVATIONS, _check_name, _contiguous, _gelu_name, _value_and_slope, _wide

__all__ = ["bias_gelu", "bias_silu"]


def bias_gelu(x: torch.Tensor, bias: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """Computes gelu(x + bias), in one pass over memory.

    Args:
        x: float32, float16 or bfloat16, any strides. It is computed in float32. Other input goes to PyTorch's ops.
        bias: a tensor of x's dtype and of the size of x's last dimension.
        approximate: "none", or "tanh", as for `gelu`.

    Returns:
        A contiguous tensor of x's shape and dtype, with gradients of any order. The gradients compute the activation
        again, so that nothing except x and bias is kept for them. The bias's gradient is summed in a fixed order.

    Raises:
        RuntimeError: `approximate` is something else.
        TypeError: x or bias is no tensor.

    Example:
        >>> x = torch.zeros(2, 4, device="mps")
        >>> metalcore.bias_gelu(x, torch.zeros(4, device="mps")).shape
        torch.Size([2, 4])
    """
    return _activate("bias_gelu", x, bias, _gelu_name(approximate))


def bias_silu(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Computes silu(x + bias), in one pass over memory.

    Args:
        x, bias: as for `bias_gelu`.

    Returns:
        A contiguous tensor of x's shape and dtype, as for `bias_gelu`.

    Raises:
        TypeError: x or bias is no tensor.

    Example:
        >>> x = torch.zeros(2, 4, device="mps")
        >>> metalcore.bias_silu(x, torch.zeros(4, device="mps")).shape
        torch.Size([2, 4])
    """
    return _activate("bias_silu", x, bias, "silu")


def _activate(op, x, bias, activation):
    if bias is not None and alike(x, bias) and x.dim() and bias.shape == x.shape[-1:] and x.numel() <= INT32_MAX:
        return _bias_activation(x, bias, activation)
    require_tensors(op, x=x, bias=bias)
    return _ACTIVATIONS[activation](x + bias)


def _composite(x, bias, activation):
    """Returns the result in PyTorch's ops, in float32 or float64. It is differentiable to any order."""
    return _ACTIVATIONS[activation](_wide(x) + _wide(bias)).to(x.dtype)


def _gradients(grad, x, bias, activation):
    gx = _wide(grad) * _value_and_slope(_wide(x) + _wide(bias), activation)[1]
    return gx.to(x.dtype), gx.sum_to_size(bias.shape).to(bias.dtype)


def _check(op, x, bias, activation):
    _check_name(op, activation)
    if x.dim() == 0 or bias.shape != x.shape[-1:]:
        raise RuntimeError(
            f"metalcore::{op}: bias must have the size of the last dimension of x, which is {list(x.shape)}, "
            f"and is {list(bias.shape)}"
        )


@cpu_kernel("bias_activation")
def _(x, bias, activation):
    _check("bias_activation", x, bias, activation)
    return _composite(x, bias, activation).contiguous()


@fake_kernel("bias_activation")
def _(x, bias, activation):
    _check("bias_activation", x, bias, activation)
    return _contiguous(x)


@cpu_kernel("bias_activation_backward")
def _(grad, x, bias, activation):
    gx, gb = _gradients(grad, x, bias, activation)
    return gx.contiguous(), gb.contiguous()


@fake_kernel("bias_activation_backward")
def _(grad, x, bias, activation):
    return _contiguous(x), _contiguous(bias)


def _save(ctx, inputs, output):
    *tensors, ctx.activation = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, grad):
    return *_gradient(grad, *ctx.saved_tensors, ctx.activation), None


def _double_backward(ctx, *cotangents):
    return *derive(lambda grad, x, bias: _gradients(grad, x, bias, ctx.activation), ctx.saved_tensors, cotangents), None


_bias_activation = autograd("bias_activation", _backward, _save)
_gradient = autograd("bias_activation_backward", _double_backward, _save)


def _samples(name="", **options):
    return (
        Sample(f"{name}rows", ((70, 1000), (1000,)), options, terms=70),
        Sample(f"{name}not whole vectors", ((40, 27), (27,)), options, terms=40),
    )


register(
    Op(
        "bias_gelu",
        bias_gelu,
        reference=lambda x, bias, approximate="none": _composite(x, bias, _gelu_name(approximate)),
        operators=("bias_activation", "bias_activation_backward"),
        samples=lambda: (*_samples(), *_samples("tanh, ", approximate="tanh")),
    )
)
register(
    Op(
        "bias_silu",
        bias_silu,
        reference=lambda x, bias: _composite(x, bias, "silu"),
        operators=("bias_activation", "bias_activation_backward"),
        samples=_samples,
    )
)
