"""Gated activations: of a gate and of what it lets through, or of the two halves of one tensor."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .._core.operators import autograd, cpu_kernel, derive, fake_kernel
from .._core.registry import Op, Sample, register
from .._core.routing import INT32_MAX, alike, require_tensors
from ._elementwise import gelu_derivatives

__all__ = ["geglu", "gelu_and_mul", "silu_and_mul", "swiglu"]


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Computes silu(gate) * up, in one pass over memory.

    Args:
        gate, up: tensors of one shape and dtype: float32, float16 or bfloat16, any strides. They are computed in
            float32. Tensors that differ go to PyTorch's ops.

    Returns:
        A contiguous tensor of that shape and dtype, with gradients of any order. The gradients compute the activation
        again, so that nothing except `gate` and `up` is kept for them.

    Raises:
        TypeError: `gate` or `up` is no tensor.

    Example:
        >>> gate, up = torch.randn(2, 2, 4, device="mps")
        >>> metalcore.swiglu(gate, up).shape
        torch.Size([2, 4])
    """
    return _gate("swiglu", gate, up, "silu")


def geglu(gate: torch.Tensor, up: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """Computes gelu(gate) * up, in one pass over memory.

    Args:
        gate, up: as for `swiglu`.
        approximate: "none", or "tanh", as for `gelu`.

    Returns:
        A contiguous tensor of their shape and dtype, as for `swiglu`.

    Raises:
        RuntimeError: `approximate` is something else.
        TypeError: `gate` or `up` is no tensor.

    Example:
        >>> gate, up = torch.randn(2, 2, 4, device="mps")
        >>> metalcore.geglu(gate, up).shape
        torch.Size([2, 4])
    """
    return _gate("geglu", gate, up, _gelu_name(approximate))


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Computes silu(x[..., :d]) * x[..., d:], for a last dimension of size 2 d.

    Args:
        x: float32, float16 or bfloat16, any strides. It is computed in float32. Other input goes to PyTorch's ops.

    Returns:
        A contiguous tensor of x's dtype with a last dimension of size d, as for `swiglu`.

    Raises:
        RuntimeError: x has no dimensions, or the last one is odd.
        TypeError: x is no tensor.

    Example:
        >>> metalcore.silu_and_mul(torch.randn(2, 8, device="mps")).shape
        torch.Size([2, 4])
    """
    return _gate_halves("silu_and_mul", x, "silu")


def gelu_and_mul(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """Computes gelu(x[..., :d]) * x[..., d:], for a last dimension of size 2 d.

    Args:
        x: as for `silu_and_mul`.
        approximate: "none", or "tanh", as for `gelu`.

    Returns:
        A contiguous tensor of x's dtype with a last dimension of size d, as for `swiglu`.

    Raises:
        RuntimeError: x has no dimensions, the last one is odd, or `approximate` is something else.
        TypeError: x is no tensor.

    Example:
        >>> metalcore.gelu_and_mul(torch.randn(2, 8, device="mps")).shape
        torch.Size([2, 4])
    """
    return _gate_halves("gelu_and_mul", x, _gelu_name(approximate))


def _gelu_name(approximate):
    if approximate not in ("none", "tanh"):
        raise RuntimeError(f"approximate must be 'none' or 'tanh', not {approximate!r}")
    return "gelu_tanh" if approximate == "tanh" else "gelu"


def _gate(op, gate, up, activation):
    if up is not None and alike(gate, up) and gate.shape == up.shape and gate.numel() <= INT32_MAX:
        return _gated(gate, up, activation)
    require_tensors(op, gate=gate, up=up)
    return _ACTIVATIONS[activation](gate) * up


def _gate_halves(op, x, activation):
    if alike(x) and x.dim() and x.shape[-1] % 2 == 0 and x.numel() <= INT32_MAX:
        return _gated_packed(x, activation)
    require_tensors(op, x=x)
    _check_halves("gated_packed", x)
    gate, up = x.chunk(2, -1)
    return _ACTIVATIONS[activation](gate) * up


_ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}


# CPU and fake kernels


def _wide(x):
    return x if x.dtype == torch.float64 else x.float()


def _composite(gate, up, activation):
    """Returns the product in PyTorch's ops, in float32 or float64. It is differentiable to any order."""
    return (_ACTIVATIONS[activation](_wide(gate)) * _wide(up)).to(gate.dtype)


def _gradients(grad, gate, up, activation):
    """Returns the gradients of gate and up, by formulas that are differentiable."""
    g, u, d = _wide(gate), _wide(up), _wide(grad)
    value, slope = _value_and_slope(g, activation)
    return (d * u * slope).to(gate.dtype), (d * value).to(gate.dtype)


def _value_and_slope(x, activation):
    if activation == "silu":
        s = torch.sigmoid(x)
        return x * s, s * (1 + x * (1 - s))
    approximate = "tanh" if activation == "gelu_tanh" else "none"
    return F.gelu(x, approximate=approximate), gelu_derivatives(x, approximate)[0]


def _halves_of(x):
    gate, up = x.chunk(2, -1)
    return gate, up


def _composite_of_halves(x, activation):
    gate, up = _halves_of(x)
    return _composite(gate, up, activation)


def _gradient_of_halves(grad, x, activation):
    gate, up = _halves_of(x)
    return torch.cat(_gradients(grad, gate, up, activation), -1)


def _check_halves(op, x):
    if x.dim() == 0 or x.shape[-1] % 2:
        raise RuntimeError(f"metalcore::{op}: the last dimension of x must be even, and x is {list(x.shape)}")


def _check_name(op, activation):
    if activation not in _ACTIVATIONS:
        raise RuntimeError(f"metalcore::{op}: activation must be 'silu', 'gelu' or 'gelu_tanh', not '{activation}'")


def _contiguous(x):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@cpu_kernel("gated")
def _(gate, up, activation):
    _check_name("gated", activation)
    return _composite(gate, up, activation).contiguous()


@fake_kernel("gated")
def _(gate, up, activation):
    _check_name("gated", activation)
    return _contiguous(gate)


@cpu_kernel("gated_backward")
def _(grad, gate, up, activation):
    return tuple(x.contiguous() for x in _gradients(grad, gate, up, activation))


@fake_kernel("gated_backward")
def _(grad, gate, up, activation):
    return _contiguous(gate), _contiguous(gate)


@cpu_kernel("gated_packed")
def _(x, activation):
    _check_name("gated_packed", activation)
    _check_halves("gated_packed", x)
    return _composite_of_halves(x, activation).contiguous()


@fake_kernel("gated_packed")
def _(x, activation):
    _check_name("gated_packed", activation)
    _check_halves("gated_packed", x)
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


@cpu_kernel("gated_packed_backward")
def _(grad, x, activation):
    return _gradient_of_halves(grad, x, activation)


@fake_kernel("gated_packed_backward")
def _(grad, x, activation):
    return _contiguous(x)


# Derivatives


def _save(ctx, inputs, output):
    *tensors, ctx.activation = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, grad):
    return *_gated_gradient(grad, *ctx.saved_tensors, ctx.activation), None


def _backward_packed(ctx, grad):
    (x,) = ctx.saved_tensors
    return _gated_packed_gradient(grad, x, ctx.activation), None


def _double_backward(ctx, *cotangents):
    return *derive(
        lambda grad, gate, up: _gradients(grad, gate, up, ctx.activation), ctx.saved_tensors, cotangents
    ), None


def _double_backward_packed(ctx, cotangent):
    def gradient(grad, x):
        return [_gradient_of_halves(grad, x, ctx.activation)]

    return *derive(gradient, ctx.saved_tensors, [cotangent]), None


_gated = autograd("gated", _backward, _save)
_gated_gradient = autograd("gated_backward", _double_backward, _save)
_gated_packed = autograd("gated_packed", _backward_packed, _save)
_gated_packed_gradient = autograd("gated_packed_backward", _double_backward_packed, _save)


def _pairs(name="", **options):
    return (
        Sample(f"{name}rows", ((64, 1000), (64, 1000)), options),
        Sample(f"{name}not whole vectors", ((6, 27), (6, 27)), options),
        Sample(f"{name}strided", ((7, 64),), options, arguments=lambda x: (x[:, :32], x[:, 32:])),
    )


def _halves(name="", **options):
    return (
        Sample(f"{name}rows", ((64, 512),), options),
        Sample(f"{name}not whole vectors", ((6, 54),), options),
    )


def _reference(activation):
    return lambda gate, up: _composite(gate, up, activation)


register(Op("swiglu", swiglu, reference=_reference("silu"), operators=("gated", "gated_backward"), samples=_pairs))
register(
    Op(
        "geglu",
        geglu,
        reference=lambda gate, up, approximate="none": _composite(gate, up, _gelu_name(approximate)),
        operators=("gated", "gated_backward"),
        samples=lambda: (*_pairs(), *_pairs("tanh, ", approximate="tanh")),
    )
)
register(
    Op(
        "silu_and_mul",
        silu_and_mul,
        reference=lambda x: _composite_of_halves(x, "silu"),
        operators=("gated_packed", "gated_packed_backward"),
        samples=_halves,
    )
)
register(
    Op(
        "gelu_and_mul",
        gelu_and_mul,
        reference=lambda x, approximate="none": _composite_of_halves(x, _gelu_name(approximate)),
        operators=("gated_packed", "gated_packed_backward"),
        samples=lambda: (*_halves(), *_halves("tanh, ", approximate="tanh")),
    )
)
