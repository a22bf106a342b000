"""Root mean square normalization of groups, with a gate."""

from __future__ import annotations

import torch

from .._core.operators import autograd, cpu_kernel, derive, fake_kernel
from .._core.registry import Op, Sample, register
from .._core.routing import INT32_MAX, alike, autocast_to_float32, require_floats, require_tensors

__all__ = ["rms_norm_gated"]


def rms_norm_gated(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    activation: str = "silu",
) -> torch.Tensor:
    """Normalizes x by its root mean square and multiplies it with a gate, in one pass over memory: with a =
    activation(gate), x / sqrt(mean(x^2) + eps) * weight * a, or x a / sqrt(mean((x a)^2) + eps) * weight where the gate
    comes first. The former is the norm of gated delta rules (Qwen3-Next, Kimi), the latter that of Mamba 2.

    Args:
        x, gate: (..., n), of one shape and dtype: float32, float16 or bfloat16, any strides. They are computed in
            float32. Tensors that differ, and other input, go to PyTorch's ops.
        weight: (n,), of any of the three dtypes, or None.
        eps: a number.
        group_size: how many neighbouring elements are normalized together, by default n. It divides n.
        norm_before_gate: whether x is normalized before the gate multiplies it.
        activation: "silu" or "sigmoid", of the gate.

    Returns:
        A tensor of x's shape and dtype, or float32 if autocast makes PyTorch's rms_norm float32. It has gradients of
        any order; the weight's is summed in a fixed order.

    Raises:
        RuntimeError: x has no dimensions, weight is not (n,), group_size does not divide n, or activation is another.
        TypeError: x, gate or weight is no tensor of floating-point numbers, or eps no number.

    Example:
        >>> x, gate = torch.randn(2, 4, 8, device="mps")
        >>> metalcore.rms_norm_gated(x, gate, torch.ones(8, device="mps")).shape
        torch.Size([4, 8])
    """
    require_tensors("rms_norm_gated", x=x, gate=gate)
    require_tensors("rms_norm_gated", optional=True, weight=weight)
    length = x.shape[-1] if x.dim() else 0
    size = length if group_size is None else group_size
    _check("rms_norm_gated", x, weight, size, activation)
    if not alike(x, gate) or weight is not None and not alike(weight) or not 0 < x.numel() <= INT32_MAX:
        require_floats("rms_norm_gated", x=x, gate=gate, weight=weight)
        return _composite(x, gate, weight, eps, size, not norm_before_gate, activation)
    if autocast_to_float32("rms_norm", x):
        x, gate = x.float(), gate.float()
    return _gated(x, gate, weight, float(eps), size, not norm_before_gate, activation)


def _check(op, x, weight, size, activation):
    if x.dim() == 0:
        raise RuntimeError(f"metalcore::{op}: x must have a dimension to normalize")
    length = x.shape[-1]
    if activation not in ("silu", "sigmoid"):
        raise RuntimeError(f"metalcore::{op}: activation must be 'silu' or 'sigmoid', not {activation!r}")
    if size < 1 and length or size and length % size:
        raise RuntimeError(f"metalcore::{op}: group_size must divide the last dimension, {length}, and is {size}")
    if weight is not None and weight.shape != (length,):
        raise RuntimeError(f"metalcore::{op}: weight must have shape ({length},), not {tuple(weight.shape)}")


def _wide(x):
    return x if x.dtype == torch.float64 else x.float()


def _activated(gate, activation):
    gate = _wide(gate)
    return gate * torch.sigmoid(gate) if activation == "silu" else torch.sigmoid(gate)


def _composite(x, gate, weight, eps, size, gate_first, activation):
    """Returns the norm in PyTorch's ops, in float32 or float64. It is differentiable to any order."""
    a, u = _activated(gate, activation), _wide(x)
    if gate_first:
        u = u * a
    groups = u.unflatten(-1, (-1, size)) if u.shape[-1] else u.unsqueeze(-1)
    y = (groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + eps)).flatten(-2)
    if weight is not None:
        y = y * _wide(weight)
    return (y if gate_first else y * a).to(x.dtype)


def _empty(x):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@cpu_kernel("rms_norm_gated")
def _(x, gate, weight, eps, size, gate_first, activation):
    _check("rms_norm_gated", x, weight, size, activation)
    return _composite(x, gate, weight, eps, size, gate_first, activation).contiguous()


@fake_kernel("rms_norm_gated")
def _(x, gate, weight, eps, size, gate_first, activation):
    _check("rms_norm_gated", x, weight, size, activation)
    return _empty(x)


def _gradients(grad, x, gate, weight, eps, size, gate_first, activation):
    """Returns the gradients of x, of the gate and of the weight (None without one), by formulas that are
    differentiable."""
    a, v, d = _activated(gate, activation), _wide(x), _wide(grad)
    s = torch.sigmoid(_wide(gate))
    slope = s * (1 + _wide(gate) * (1 - s)) if activation == "silu" else s * (1 - s)
    u, c = (v * a, d) if gate_first else (v, d * a)
    u, c = u.unflatten(-1, (-1, size)), c.unflatten(-1, (-1, size))
    scale = torch.rsqrt(u.square().mean(-1, keepdim=True) + eps)
    normal = u * scale
    gw = None
    if weight is not None:
        gw = (c * normal).flatten(-2).sum_to_size(weight.shape).to(weight.dtype)
        c = c * _wide(weight).unflatten(-1, (-1, size))
    du = (scale * (c - normal * (c * normal).mean(-1, keepdim=True))).flatten(-2)
    if gate_first:
        gx, ggate = du * a, du * v * slope
    else:
        y = normal.flatten(-2) if weight is None else normal.flatten(-2) * _wide(weight)
        gx, ggate = du, d * y * slope
    return gx.to(x.dtype), ggate.to(gate.dtype), gw


@cpu_kernel("rms_norm_gated_backward")
def _(grad, x, gate, weight, eps, size, gate_first, activation, weight_wanted):
    gx, ggate, gw = _gradients(grad, x, gate, weight, eps, size, gate_first, activation)
    return gx.contiguous(), ggate.contiguous(), x.new_empty(0) if gw is None or not weight_wanted else gw.contiguous()


@fake_kernel("rms_norm_gated_backward")
def _(grad, x, gate, weight, eps, size, gate_first, activation, weight_wanted):
    return _empty(x), _empty(x), _empty(weight) if weight_wanted else x.new_empty(0)


# Derivatives


def _save(ctx, inputs, output):
    x, gate, weight, *ctx.options = inputs
    ctx.save_for_backward(x, gate, weight)


def _backward(ctx, grad):
    x, gate, weight = ctx.saved_tensors
    wanted = ctx.needs_input_grad[2]
    gx, ggate, gw = _gradient(grad, x, gate, weight, *ctx.options, wanted)
    return gx, ggate, gw if wanted else None, None, None, None, None


def _save_backward(ctx, inputs, output):
    *tensors, eps, size, gate_first, activation, ctx.weight_wanted = inputs
    ctx.options = eps, size, gate_first, activation
    ctx.save_for_backward(*tensors)


def _double_backward(ctx, *cotangents):
    def gradients(grad, x, gate, weight):
        gx, ggate, gw = _gradients(grad, x, gate, weight, *ctx.options)
        return [gx, ggate, gw] if gw is not None and ctx.weight_wanted else [gx, ggate]

    wanted = cotangents if ctx.weight_wanted else cotangents[:2]
    return *derive(gradients, ctx.saved_tensors, wanted), None, None, None, None, None


_gated = autograd("rms_norm_gated", _backward, _save)
_gradient = autograd("rms_norm_gated_backward", _double_backward, _save_backward)


def _reference(x, gate, weight=None, eps=1e-6, group_size=None, norm_before_gate=True, activation="silu"):
    return _composite(x, gate, weight, eps, group_size or x.shape[-1], not norm_before_gate, activation)


def _sample(name, shape, weighted=True, roundings=1, **options):
    shapes = (shape, shape, shape[-1:]) if weighted else (shape, shape)
    return Sample(name, shapes, options, terms=max(shape[-1], shape[0]), roundings=roundings)


register(
    Op(
        "rms_norm_gated",
        rms_norm_gated,
        reference=_reference,
        operators=("rms_norm_gated", "rms_norm_gated_backward"),
        samples=lambda: (
            _sample("a simdgroup", (33, 128)),
            _sample("long rows", (3, 8201)),
            _sample("odd rows", (5, 3, 77), activation="sigmoid"),
            _sample("the gate first", (20, 1048), norm_before_gate=False, eps=1e-5),
            _sample("groups", (6, 2080), norm_before_gate=False, group_size=1040),
            _sample("without a weight", (9, 96), weighted=False, group_size=32),
        ),
        production=lambda batch_size=8192, hidden_size=5120: _sample(
            "", (batch_size, hidden_size), norm_before_gate=False
        ),
    )
)
