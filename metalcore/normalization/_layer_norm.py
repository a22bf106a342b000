"""Layer normalization of a tensor, or of a sum."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from .._core.operators import autograd, cpu_kernel, derive, fake_kernel, plain_operator
from .._core.registry import Op, Override, Sample, register
from .._core.routing import INT32_MAX, alike, autocast_to_float32, too_many
from .._core.samples import rows
from ._rms_norm import _empty, _fits, _is_number

__all__ = ["add_layer_norm", "layer_norm"]


def layer_norm(
    x: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> torch.Tensor:
    """Computes (x - mean) / sqrt(variance + eps) * weight + bias over the last dimensions, as
    torch.nn.functional.layer_norm.

    Args:
        x: float32, float16 or bfloat16, any strides. It is computed in float32. Other input, and rows of 2^31 elements
            and more, go to PyTorch's op.
        normalized_shape: the last dimensions of x, over which mean and variance are computed.
        weight, bias: tensors of that shape and of x's dtype, or None.
        eps: a number.

    Returns:
        A tensor of x's shape and dtype, or float32 if autocast makes PyTorch's result float32. It has gradients of any
        order. The gradients of weight and bias are summed in a fixed order, so that the same inputs give the same bits.

    Raises:
        RuntimeError: normalized_shape is not the end of x's shape, or not the shape of weight or bias.

    Example:
        >>> x = torch.tensor([[1.0, -1.0], [3.0, 5.0]], device="mps")
        >>> metalcore.layer_norm(x, (2,), eps=0.0).tolist()
        [[1.0, -1.0], [-1.0, 1.0]]
    """
    if autocast_to_float32("layer_norm", x):
        x = x.float()
        weight, bias = (None if t is None else t.float() for t in (weight, bias))
    if not _takes(x, normalized_shape, weight, bias, eps):
        return F.layer_norm(x, normalized_shape, weight, bias, eps)
    return _plain_layer_norm(x, len(normalized_shape), weight, bias, float(eps))


def add_layer_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds the residual to x and normalizes the sum over the last dimension, in one pass over memory.

    Args:
        x, residual: tensors of one shape and dtype, as for `layer_norm`. Tensors that differ go to PyTorch's addition.
        weight, bias: tensors of the last dimension's size and of x's dtype, or None.
        eps: a number.

    Returns:
        (y, total): `total = x + residual`, and `y = layer_norm(total, total.shape[-1:], weight, bias, eps)`.

    Example:
        >>> x = torch.randn(2, 8, device="mps")
        >>> normalized, total = metalcore.add_layer_norm(x, x)
        >>> torch.equal(total, x + x)
        True
    """
    if (
        residual is None
        or not alike(x, residual)
        or residual.shape != x.shape
        or autocast_to_float32("layer_norm", x)
        or not _takes(x, x.shape[-1:], weight, bias, eps)
    ):
        total = x + residual
        return layer_norm(total, total.shape[-1:], weight, bias, eps), total
    return _plain_add_layer_norm(x, residual, 1, weight, bias, float(eps))


def _takes(x, normalized_shape, weight, bias, eps):
    return (
        alike(x, weight, bias)
        and _fits(x, normalized_shape, weight)
        and (bias is None or bias.shape == tuple(normalized_shape))
        and eps is not None
        and _is_number(eps)
        and (x.numel() <= INT32_MAX or not too_many(x, math.prod(normalized_shape)))
    )


# CPU and fake kernels


def _statistics(x, dims, eps):
    over = tuple(range(-dims, 0))
    variance, mean = torch.var_mean(x, over, correction=0, keepdim=True) if x.numel() else (x.sum(over, True),) * 2
    return mean, torch.rsqrt(variance + eps)


def _wide(x):
    return x if x.dtype == torch.float64 else x.float()


def _composite(x, dims, weight, bias, eps):
    """Computes y, means and scales in PyTorch's ops, in float32 or float64. It is differentiable to any order."""
    wide = _wide(x)
    mean, scale = _statistics(wide, dims, eps)
    y = (wide - mean) * scale
    y = y if weight is None else y * weight
    y = y if bias is None else y + bias
    return y.to(x.dtype), mean, scale


def _check(op, x, dims, **parameters):
    """Checks what the host side checks, with its messages."""
    if not 0 < dims <= x.dim():
        raise RuntimeError(f"metalcore::{op}: cannot normalize the last {dims} of {x.dim()} dimensions")
    length = math.prod(x.shape[-dims:])
    for name, parameter in parameters.items():
        if parameter is not None and parameter.numel() != length:
            raise RuntimeError(f"metalcore::{op}: {name} must have {length} elements, not {parameter.numel()}")


def _of_rows(x, dims):
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    return x.new_empty((*x.shape[:-dims], *[1] * dims), dtype=wide)


@cpu_kernel("layer_norm")
def _(x, dims, weight, bias, eps):
    _check("layer_norm", x, dims, weight=weight, bias=bias)
    y, mean, scale = _composite(x, dims, weight, bias, eps)
    return y.contiguous(), mean.contiguous(), scale.contiguous()


@fake_kernel("layer_norm")
def _(x, dims, weight, bias, eps):
    _check("layer_norm", x, dims, weight=weight, bias=bias)
    return _empty(x), _of_rows(x, dims), _of_rows(x, dims)


@cpu_kernel("add_layer_norm")
def _(x, residual, dims, weight, bias, eps):
    _check("add_layer_norm", x, dims, weight=weight, bias=bias)
    total = torch.add(x, residual, out=_empty(x))
    y, mean, scale = _composite(total, dims, weight, bias, eps)
    return y.contiguous(), total, mean.contiguous(), scale.contiguous()


@fake_kernel("add_layer_norm")
def _(x, residual, dims, weight, bias, eps):
    _check("add_layer_norm", x, dims, weight=weight, bias=bias)
    return _empty(x), _empty(x), _of_rows(x, dims), _of_rows(x, dims)


@cpu_kernel("plain_layer_norm")
def _(x, dims, weight, bias, eps):
    _check("plain_layer_norm", x, dims, weight=weight, bias=bias)
    return _composite(x, dims, weight, bias, eps)[0].contiguous()


@fake_kernel("plain_layer_norm")
def _(x, dims, weight, bias, eps):
    _check("plain_layer_norm", x, dims, weight=weight, bias=bias)
    return _empty(x)


@cpu_kernel("plain_add_layer_norm")
def _(x, residual, dims, weight, bias, eps):
    _check("plain_add_layer_norm", x, dims, weight=weight, bias=bias)
    total = torch.add(x, residual, out=_empty(x))
    return _composite(total, dims, weight, bias, eps)[0].contiguous(), total


@fake_kernel("plain_add_layer_norm")
def _(x, residual, dims, weight, bias, eps):
    _check("plain_add_layer_norm", x, dims, weight=weight, bias=bias)
    return _empty(x), _empty(x)


def _gradients(grad, x, mean, scale, sum_grad, dims, weight):
    """Computes layer_norm_backward in PyTorch's ops: the gradients of x, of the weight and of the bias."""
    over = tuple(range(-dims, 0))
    g, normal = _wide(grad), (_wide(x) - mean) * scale
    length = math.prod(x.shape[-dims:])
    gw, gb = (
        ((g * normal).reshape(-1, length).sum(0), g.reshape(-1, length).sum(0)) if length else (g.new_empty(0),) * 2
    )
    if weight is not None:
        g = g * weight
    gx = scale * (g - g.mean(over, True) - normal * (g * normal).mean(over, True))
    if sum_grad is not None:
        gx = gx + sum_grad
    return gx.to(x.dtype), gw.to(x.dtype), gb.to(x.dtype)


@cpu_kernel("layer_norm_backward")
def _(grad, x, means, scales, sum_grad, dims, weight, parameters_wanted):
    _check("layer_norm_backward", x, dims, weight=weight)
    gx, gw, gb = _gradients(grad, x, means, scales, sum_grad, dims, weight)
    if not parameters_wanted:
        return gx.contiguous(), x.new_empty(0), x.new_empty(0)
    return gx.contiguous(), gw.contiguous(), gb.contiguous()


@fake_kernel("layer_norm_backward")
def _(grad, x, means, scales, sum_grad, dims, weight, parameters_wanted):
    _check("layer_norm_backward", x, dims, weight=weight)
    length = math.prod(x.shape[-dims:]) if parameters_wanted else 0
    return _empty(x), x.new_empty(length), x.new_empty(length)


# Derivatives


def _save(ctx, inputs, output):
    x, ctx.dims, weight, bias, ctx.eps = inputs
    ctx.save_for_backward(x, weight, *output[1:])
    ctx.shapes = _shapes(weight, bias)


def _shapes(weight, bias):
    return None if weight is None else weight.shape, None if bias is None else bias.shape


def _parameters(ctx, gw, gb, wanted):
    """Returns the gradients of weight and bias in their shapes, where they are wanted."""
    return [
        None if not is_wanted else g if len(shape) == 1 else g.view(shape)
        for g, shape, is_wanted in zip((gw, gb), ctx.shapes, wanted)
    ]


def _backward(ctx, grad):
    if grad is None:
        return (None,) * 5
    x, weight, means, scales = ctx.saved_tensors
    wanted = ctx.needs_input_grad[2:4]
    gx, gw, gb = _gradient_of_rows(grad, x, means, scales, None, ctx.dims, weight, any(wanted))
    return gx, None, *_parameters(ctx, gw, gb, wanted), None


def _save_sum(ctx, inputs, output):
    _, _, ctx.dims, weight, bias, ctx.eps = inputs
    ctx.save_for_backward(output[1], weight, *output[2:])
    ctx.shapes = _shapes(weight, bias)
    ctx.set_materialize_grads(False)  # often only one of the two outputs has a gradient


def _sum_backward(ctx, grad, sum_grad):
    if grad is None:
        return sum_grad, sum_grad, None, None, None, None
    total, weight, means, scales = ctx.saved_tensors
    wanted = ctx.needs_input_grad[3:5]
    gx, gw, gb = _gradient_of_rows(grad, total, means, scales, sum_grad, ctx.dims, weight, any(wanted))
    return gx, gx, None, *_parameters(ctx, gw, gb, wanted), None


def _save_backward(ctx, inputs, output):
    grad, x, means, scales, sum_grad, ctx.dims, weight, ctx.wanted = inputs
    ctx.save_for_backward(grad, x, means, scales, sum_grad, weight)


def _double_backward(ctx, *cotangents):
    """Differentiates _gradients, with means and scales as functions of x. The scales tell eps."""
    over = tuple(range(-ctx.dims, 0))

    def gradients(grad, x, _, scales, sum_grad, weight):
        wide = _wide(x)
        mean = wide.mean(over, True)
        variance = (wide - mean).square().mean(over, True)
        eps = scales.detach() ** -2 - variance.detach()
        gradients = _gradients(grad, x, mean, torch.rsqrt(variance + eps), sum_grad, ctx.dims, weight)
        return gradients if ctx.wanted else gradients[:1]

    grad, x, _, _, sum_grad, weight = derive(gradients, ctx.saved_tensors, cotangents)
    return grad, x, None, None, sum_grad, None, weight, None


_layer_norm = autograd("layer_norm", _backward, _save, results=1)
_add_layer_norm = autograd("add_layer_norm", _sum_backward, _save_sum, results=2)
_gradient_of_rows = autograd("layer_norm_backward", _double_backward, _save_backward)
# Without means and scales, which only derivatives need.
_plain_layer_norm = plain_operator("plain_layer_norm", _layer_norm)
_plain_add_layer_norm = plain_operator("plain_add_layer_norm", _add_layer_norm)


def _sample(name, count, length):
    return Sample(
        name,
        ((count, length), (length,), (length,)),
        arguments=lambda x, weight, bias: (x, (length,), weight, bias),
        terms=max(count, length),
    )


def _sample_of_sum(name, count, length):
    return Sample(name, ((count, length), (count, length), (length,), (length,)), terms=max(count, length), roundings=2)


def _reference_of_sum(x, residual, weight=None, bias=None, eps=1e-5):
    total = x + residual
    return F.layer_norm(total, total.shape[-1:], weight, bias, eps), total


register(
    Op(
        "layer_norm",
        layer_norm,
        namesake="torch.nn.functional.layer_norm",
        operators=("layer_norm", "layer_norm_backward", "plain_layer_norm"),
        override=(
            Override("native_layer_norm"),
            Override("native_layer_norm_backward"),
        ),
        samples=lambda: (
            *rows(_sample),
            Sample("without parameters", ((16, 1000),), {"normalized_shape": (1000,)}, terms=1000),
        ),
    )
)
register(
    Op(
        "add_layer_norm",
        add_layer_norm,
        reference=_reference_of_sum,
        operators=("add_layer_norm", "layer_norm_backward", "plain_add_layer_norm"),
        samples=lambda: rows(_sample_of_sum)[:2],
    )
)
