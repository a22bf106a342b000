"""Normalization of groups of channels."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .._core.operators import autograd, cpu_kernel, derive, fake_kernel
from .._core.registry import Op, Override, Sample, register
from .._core.routing import INT32_MAX, alike, autocast_to_float32
from ._layer_norm import _wide
from ._rms_norm import _empty, _is_number

__all__ = ["group_norm"]


def group_norm(
    x: torch.Tensor,
    num_groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> torch.Tensor:
    """Computes (x - mean) / sqrt(variance + eps) * weight + bias for each group of channels, as
    torch.nn.functional.group_norm.

    Args:
        x: float32, float16 or bfloat16, with the sizes (batch, channels, ...), any strides. It is computed in float32.
            Other input, and groups of 2^31 elements and more, go to PyTorch's op.
        num_groups: how many groups the channels make, each of neighbouring channels.
        weight, bias: tensors of the channels' number and of x's dtype, or None.
        eps: a number.

    Returns:
        A contiguous tensor of x's shape and dtype, or float32 if autocast makes PyTorch's result float32. It has
        gradients of any order. The gradients of weight and bias are summed in a fixed order, so that the same inputs
        give the same bits.

    Raises:
        RuntimeError: the number of channels is not a multiple of num_groups, or not the size of weight or bias.
        ValueError: there is one batch, and its groups have one element.

    Example:
        >>> x = torch.randn(2, 6, 4, 4, device="mps")
        >>> metalcore.group_norm(x, num_groups=3).shape
        torch.Size([2, 6, 4, 4])
    """
    if autocast_to_float32("group_norm", x):
        x = x.float()
        weight, bias = (t.float() if isinstance(t, torch.Tensor) else t for t in (weight, bias))
    fits = _takes(x, num_groups, weight, bias) and _is_number(eps) and eps is not None
    if not fits or x.numel() == num_groups:  # PyTorch refuses groups of one element
        return F.group_norm(x, num_groups, weight, bias, eps)
    return _group_norm(x, num_groups, weight, bias, float(eps))


def _takes(x, groups, weight, bias):
    return (
        alike(x, weight, bias)
        and x.dim() >= 2
        and type(groups) is int  # PyTorch refuses a bool
        and groups > 0
        and x.shape[1] % groups == 0
        and all(p is None or p.shape == x.shape[1:2] for p in (weight, bias))
        and 0 < x.numel() <= INT32_MAX
    )


# CPU and fake kernels


def _grouped(x, groups):
    return _wide(x).reshape(x.shape[0], groups, -1)


def _per_channel(parameter, x):
    return parameter.reshape(-1, *[1] * (x.dim() - 2))


def _statistics(x, groups, eps):
    """Computes mean and reciprocal standard deviation, with the sizes (batch, groups, 1)."""
    rows = _grouped(x, groups)
    mean = rows.mean(-1, True)
    return mean, torch.rsqrt((rows - mean).square().mean(-1, True) + eps)


def _normal(x, groups, mean, scale):
    return ((_grouped(x, groups) - mean) * scale).reshape(x.shape)


def _composite(x, groups, weight, bias, eps):
    """Computes y, means and scales in PyTorch's ops, in float32 or float64. It is differentiable to any order."""
    mean, scale = _statistics(x, groups, eps)
    y = _normal(x, groups, mean, scale)
    y = y if weight is None else y * _per_channel(weight, x)
    y = y if bias is None else y + _per_channel(bias, x)
    return y.to(x.dtype), mean.squeeze(-1), scale.squeeze(-1)


def _check(op, x, groups, **parameters):
    """Checks what the host side checks, with its messages."""
    if x.dim() < 2 or groups <= 0 or x.shape[1] % groups:
        raise RuntimeError(
            f"metalcore::{op}: the channels of x, {list(x.shape)}, must be a multiple of groups, {groups}"
        )
    for name, parameter in parameters.items():
        if parameter is not None and parameter.numel() != x.shape[1]:
            raise RuntimeError(f"metalcore::{op}: {name} must have {x.shape[1]} elements, not {parameter.numel()}")


def _of_groups(x, groups):
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    return x.new_empty((x.shape[0], groups), dtype=wide)


@cpu_kernel("group_norm")
def _(x, groups, weight, bias, eps):
    _check("group_norm", x, groups, weight=weight, bias=bias)
    if x.numel() == 0:
        return _empty(x), _of_groups(x, groups).zero_(), _of_groups(x, groups).zero_()
    return tuple(t.contiguous() for t in _composite(x, groups, weight, bias, eps))


@fake_kernel("group_norm")
def _(x, groups, weight, bias, eps):
    _check("group_norm", x, groups, weight=weight, bias=bias)
    return _empty(x), _of_groups(x, groups), _of_groups(x, groups)


def _gradients(grad, x, mean, scale, groups, weight):
    """Computes group_norm_backward in PyTorch's ops: the gradients of x, of the weight and of the bias."""
    normal = _normal(x, groups, mean, scale)
    g = _wide(grad)
    gw, gb = ((g * normal).transpose(0, 1).flatten(1).sum(1), g.transpose(0, 1).flatten(1).sum(1))
    if weight is not None:
        g = g * _per_channel(weight, x)
    rows, normals = _grouped(g, groups), _grouped(normal, groups)
    gx = scale * (rows - rows.mean(-1, True) - normals * (rows * normals).mean(-1, True))
    return gx.reshape(x.shape).to(x.dtype), gw.to(x.dtype), gb.to(x.dtype)


@cpu_kernel("group_norm_backward")
def _(grad, x, means, scales, groups, weight, parameters_wanted):
    _check("group_norm_backward", x, groups, weight=weight)
    none = x.new_empty(0)
    if x.numel() == 0:
        zeros = x.new_zeros(x.shape[1])
        return _empty(x), *((zeros, zeros.clone()) if parameters_wanted else (none, x.new_empty(0)))
    gx, gw, gb = _gradients(grad, x, means[..., None], scales[..., None], groups, weight)
    return gx.contiguous(), *((gw, gb) if parameters_wanted else (none, x.new_empty(0)))


@fake_kernel("group_norm_backward")
def _(grad, x, means, scales, groups, weight, parameters_wanted):
    _check("group_norm_backward", x, groups, weight=weight)
    channels = x.shape[1] if parameters_wanted else 0
    return _empty(x), x.new_empty(channels), x.new_empty(channels)


# Derivatives


def _save(ctx, inputs, output):
    x, ctx.groups, weight, _, ctx.eps = inputs
    ctx.save_for_backward(x, weight, *output[1:])


def _backward(ctx, grad):
    if grad is None:
        return (None,) * 5
    x, weight, means, scales = ctx.saved_tensors
    weight_wanted, bias_wanted = ctx.needs_input_grad[2:4]
    gx, gw, gb = _gradient(grad, x, means, scales, ctx.groups, weight, weight_wanted or bias_wanted)
    return gx, None, gw if weight_wanted else None, gb if bias_wanted else None, None


def _save_backward(ctx, inputs, output):
    grad, x, means, scales, ctx.groups, weight, ctx.wanted = inputs
    ctx.save_for_backward(grad, x, means, scales, weight)


def _double_backward(ctx, *cotangents):
    """Differentiates _gradients, with means and scales as functions of x. The scales tell eps."""

    def gradients(grad, x, _, scales, weight):
        rows = _grouped(x, ctx.groups)
        mean = rows.mean(-1, True)
        variance = (rows - mean).square().mean(-1, True)
        eps = scales.detach()[..., None] ** -2 - variance.detach()
        gradients = _gradients(grad, x, mean, torch.rsqrt(variance + eps), ctx.groups, weight)
        return gradients if ctx.wanted else gradients[:1]

    grad, x, _, _, weight = derive(gradients, ctx.saved_tensors, cotangents)
    return grad, x, None, None, None, weight, None


_group_norm = autograd("group_norm", _backward, _save, results=1)
_gradient = autograd("group_norm_backward", _double_backward, _save_backward)


def _sample(name, shape, groups):
    channels = shape[1:2]
    return Sample(
        name,
        (shape, channels, channels),
        arguments=lambda x, weight, bias: (x, groups, weight, bias),
        terms=torch.Size(shape).numel() // groups,
    )


register(
    Op(
        "group_norm",
        group_norm,
        namesake="torch.nn.functional.group_norm",
        operators=("group_norm", "group_norm_backward"),
        override=(
            Override("native_group_norm"),
            Override("native_group_norm_backward"),
        ),
        samples=lambda: (
            _sample("images", (3, 12, 8, 8), 4),
            _sample("large images", (2, 4, 40, 48), 2),
            _sample("odd sizes", (2, 6, 5, 7), 3),
            _sample("no area", (5, 24), 3),
        ),
    )
)
