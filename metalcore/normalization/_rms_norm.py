"""Root mean square normalization of a tensor, or of a sum."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from .._core.operators import autograd, cpu_kernel, derive, fake_kernel, needs_gradient
from .._core.registry import Op, Override, Sample, register
from .._core.routing import INT32_MAX, accelerated, alike, autocast_to_float32, is_plain, too_many
from .._core.samples import rows

__all__ = ["add_rms_norm", "rms_norm"]

# With eps=None PyTorch uses the epsilon of the dtype in which it computes.
_EPS = torch.finfo(torch.float32).eps


def rms_norm(
    x: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
    offset: float = 0.0,
) -> torch.Tensor:
    """Computes x / sqrt(mean(x^2) + eps) * (weight + offset) over the last dimensions, as torch.nn.functional.rms_norm.

    Args:
        x: float32, float16 or bfloat16, any strides. It is computed in float32. Other input, and rows of 2^31 elements
            and more, go to PyTorch's op.
        normalized_shape: the last dimensions of x, over which the mean is computed.
        weight: a tensor of that shape and of any of the three dtypes, or None.
        eps: a number. None means the epsilon of float32.
        offset: a number that is added to the weight in float32. Gemma's norms have 1.

    Returns:
        A tensor of x's shape and dtype, or float32 if autocast makes PyTorch's result float32. It has gradients of any
        order. The weight's gradient is summed in a fixed order, so that the same inputs give the same bits.

    Raises:
        RuntimeError: normalized_shape is not the end of x's shape, or not weight's shape.
        ValueError: there is an offset and no weight.
        TypeError: offset is no number.

    Example:
        >>> x, weight = torch.randn(2, 8, device="mps"), torch.ones(8, device="mps")
        >>> metalcore.rms_norm(x, (8,), weight).shape
        torch.Size([2, 8])
    """
    _check_offset("rms_norm", offset, weight)
    if (
        not accelerated(x, weight)
        or not _fits(x, normalized_shape, weight)
        or not _is_number(eps)
        or x.numel() > INT32_MAX
        and too_many(x, math.prod(normalized_shape))
    ):
        if not offset:
            return F.rms_norm(x, normalized_shape, weight, eps)
        wide = x if x.dtype == torch.float64 else x.float()
        return F.rms_norm(wide, normalized_shape, _with_offset(weight, offset), eps).to(x.dtype)
    if autocast_to_float32("rms_norm", x):
        x = x.float()
    return _rms_norm(x, len(normalized_shape), weight, _EPS if eps is None else eps, float(offset))


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float | None = None,
    offset: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds the residual to x and normalizes the sum over the last dimension, in one pass over memory.

    Args:
        x, residual: tensors of one shape and dtype, as for `rms_norm`. Tensors that differ go to PyTorch's addition.
        weight: a tensor of the last dimension's size, or None.
        eps: a number. None means the epsilon of float32.
        offset: a number that is added to the weight, as for `rms_norm`.

    Returns:
        (y, total): `total = x + residual`, and `y = rms_norm(total, total.shape[-1:], weight, eps, offset)`.

    Raises:
        ValueError: there is an offset and no weight.
        TypeError: offset is no number.

    Example:
        >>> x, weight = torch.randn(2, 8, device="mps"), torch.ones(8, device="mps")
        >>> normalized, total = metalcore.add_rms_norm(x, x, weight)
        >>> torch.equal(total, x + x)
        True
    """
    _check_offset("add_rms_norm", offset, weight)
    if residual is None or not accelerated(x, residual, weight) or not _addable(x, residual, weight, eps):
        total = x + residual
        return rms_norm(total, total.shape[-1:], weight, eps, offset), total
    return _add_rms_norm(x, residual, 1, weight, _EPS if eps is None else eps, float(offset))


def _check_offset(op, offset, weight):
    if type(offset) is not float and not hasattr(offset, "__float__"):
        raise TypeError(f"{op}: offset must be a number, not {type(offset).__name__}")
    if offset and weight is None:
        raise ValueError("offset is added to a weight, and there is none")


def _with_offset(weight, offset):
    """Returns the sum in float32 or float64, or the weight itself without an offset."""
    return (weight if weight.dtype == torch.float64 else weight.float()) + offset if offset else weight


def _fits(x, normalized_shape, weight):
    if not isinstance(normalized_shape, (tuple, list)):
        return False
    shape = tuple(normalized_shape)
    return (weight is None or weight.shape == shape) and shape != () and x.shape[-len(shape) :] == shape


def _is_number(eps):
    return eps is None or type(eps) is float or isinstance(eps, (float, int))


def _addable(x, residual, weight, eps):
    shape = x.shape
    return (
        residual.dtype == x.dtype
        and _is_number(eps)
        and residual.shape == shape
        and len(shape) > 0
        and (weight is None or weight.shape == shape[-1:])
        and (x.numel() <= INT32_MAX or not too_many(x, shape[-1]))
        and not autocast_to_float32("rms_norm", x)
    )


# CPU and fake kernels


def _composite(x, dims, weight, eps, offset):
    """Returns the norm in PyTorch's ops, in float32 or float64. It is differentiable to any order."""
    wide = x if x.dtype == torch.float64 else x.float()
    scale = torch.rsqrt(wide.square().mean(tuple(range(-dims, 0)), keepdim=True) + eps)
    y = wide * scale
    return (y if weight is None else y * _with_offset(weight, offset)).to(x.dtype)


def _check(op, x, dims, weight):
    """Checks what the host side checks, with its messages."""
    if not 0 < dims <= x.dim():
        raise RuntimeError(f"metalcore::{op}: cannot normalize the last {dims} of {x.dim()} dimensions")
    length = math.prod(x.shape[-dims:])
    if weight is not None and weight.numel() != length:
        raise RuntimeError(f"metalcore::{op}: weight must have {length} elements, not {weight.numel()}")


def _empty(x):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@cpu_kernel("rms_norm")
def _(x, dims, weight, eps, offset):
    _check("rms_norm", x, dims, weight)
    return _composite(x, dims, weight, eps, offset).contiguous()


@fake_kernel("rms_norm")
def _(x, dims, weight, eps, offset):
    _check("rms_norm", x, dims, weight)
    return _empty(x)


@cpu_kernel("add_rms_norm")
def _(x, residual, dims, weight, eps, offset):
    _check("add_rms_norm", x, dims, weight)
    total = torch.add(x, residual, out=_empty(x))
    return _composite(total, dims, weight, eps, offset).contiguous(), total


@fake_kernel("add_rms_norm")
def _(x, residual, dims, weight, eps, offset):
    _check("add_rms_norm", x, dims, weight)
    return _empty(x), _empty(x)


def _gradients(grad, x, sum_grad, dims, weight, eps, offset):
    """Computes rms_norm_backward in PyTorch's ops: the gradients of x and of the weight (None without one)."""
    normalized_dims = tuple(range(-dims, 0))
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    g, v = grad.to(wide), x.to(wide)
    scale = torch.rsqrt(v.square().mean(normalized_dims, keepdim=True) + eps)
    normal = v * scale
    gw = None
    if weight is not None:
        gw = (g * normal).sum_to_size(weight.shape).to(weight.dtype)
        g = g * _with_offset(weight, offset)
    gx = scale * (g - normal * (g * normal).mean(normalized_dims, keepdim=True))
    if sum_grad is not None:
        gx = gx + sum_grad
    return gx.to(x.dtype), gw


@cpu_kernel("rms_norm_backward")
def _(grad, x, sum_grad, dims, weight, eps, offset, weight_wanted):
    _check("rms_norm_backward", x, dims, weight)
    gx, gw = _gradients(grad, x, sum_grad, dims, weight, eps, offset)
    return gx.contiguous(), x.new_empty(0) if gw is None or not weight_wanted else gw.contiguous()


@fake_kernel("rms_norm_backward")
def _(grad, x, sum_grad, dims, weight, eps, offset, weight_wanted):
    _check("rms_norm_backward", x, dims, weight)
    return _empty(x), _empty(weight) if weight_wanted else x.new_empty(0)


# Derivatives


def _save(ctx, inputs, output):
    x, ctx.dims, weight, ctx.eps, ctx.offset = inputs
    ctx.save_for_backward(x, weight)


def _backward(ctx, grad):
    x, weight = ctx.saved_tensors
    wanted = ctx.needs_input_grad[2]
    gx, gw = _gradient_of_rows(grad, x, None, ctx.dims, weight, ctx.eps, ctx.offset, wanted)
    return gx, None, gw if wanted else None, None, None


def _save_sum(ctx, inputs, output):
    _, _, ctx.dims, weight, ctx.eps, ctx.offset = inputs
    ctx.save_for_backward(output[1], weight)
    ctx.set_materialize_grads(False)  # often only one of the two outputs has a gradient


def _sum_backward(ctx, grad, sum_grad):
    if grad is None:
        return sum_grad, sum_grad, None, None, None, None
    total, weight = ctx.saved_tensors
    wanted = ctx.needs_input_grad[3]
    gx, gw = _gradient_of_rows(grad, total, sum_grad, ctx.dims, weight, ctx.eps, ctx.offset, wanted)
    return gx, gx, None, gw if wanted else None, None, None


def _save_backward(ctx, inputs, output):
    grad, x, sum_grad, ctx.dims, weight, ctx.eps, ctx.offset, ctx.weight_wanted = inputs
    ctx.save_for_backward(grad, x, sum_grad, weight)


def _double_backward(ctx, gx_cotangent, gw_cotangent):
    """Differentiates _gradients, which is differentiable to any order."""

    def gradients(grad, x, sum_grad, weight):
        gx, gw = _gradients(grad, x, sum_grad, ctx.dims, weight, ctx.eps, ctx.offset)
        return [gx, gw] if gw is not None and ctx.weight_wanted else [gx]

    grad, x, sum_grad, weight = derive(gradients, ctx.saved_tensors, (gx_cotangent, gw_cotangent))
    return grad, x, sum_grad, None, weight, None, None, None


_rms_norm = autograd("rms_norm", _backward, _save)
_add_rms_norm = autograd("add_rms_norm", _sum_backward, _save_sum)
_gradient_of_rows = autograd("rms_norm_backward", _double_backward, _save_backward)


# Overrides of PyTorch's kernels


_fused = torch.ops.aten._fused_rms_norm.default


def _override(previous, count, decline, by=lambda *arguments: _fused(*arguments)[0]):
    def kernel(keyset, x, normalized_shape, weight=None, eps=None):
        if not (is_plain(x) and is_plain(weight) and alike(x, weight) and _fits(x, normalized_shape, weight)):
            return decline(keyset, x, normalized_shape, weight, eps)
        if x.dtype is not torch.float32 and (needs_gradient(x) or weight is not None and needs_gradient(weight)):
            x = x.clone()  # PyTorch saves a float32 copy: callers may change x
        return count.run(by, x, normalized_shape, weight, eps)

    return kernel


def _override_alone(previous, count, decline):
    """Makes the kernel where aten::_fused_rms_norm is PyTorch's, which has no derivative on a Mac."""
    ours = lambda x, shape, weight, eps: _rms_norm(x, len(shape), weight, _EPS if eps is None else eps, 0.0)  # noqa: E731
    return _override(previous, count, decline, ours)


def _own_calls(release, x, normalized_shape, weight=None, eps=None):
    """Returns those in which PyTorch's function ends in aten::_fused_rms_norm on a Mac."""
    needs_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight))
    return weight is not None and not needs_grad


_AT_RMS_NORM = {
    "devices": frozenset({"mps"}),
    "elsewhere": "it ends in aten::_fused_rms_norm there",
    "own_calls": _own_calls,
    "alone": _override_alone,
}


def _sample(name, count, length):
    return Sample(
        name,
        ((count, length), (length,)),
        arguments=lambda x, weight: (x, (length,), weight, 1e-6),
        terms=max(count, length),
    )


def _sample_of_sum(name, count, length):
    return Sample(
        name, ((count, length), (count, length), (length,)), {"eps": 1e-6}, terms=max(count, length), roundings=2
    )


def _reference(x, normalized_shape, weight=None, eps=None, offset=0.0):
    return F.rms_norm(x, normalized_shape, _with_offset(weight, offset), eps)


def _reference_of_sum(x, residual, weight=None, eps=None):
    total = x + residual
    return F.rms_norm(total, total.shape[-1:], weight, eps), total


register(
    Op(
        "rms_norm",
        rms_norm,
        namesake="torch.nn.functional.rms_norm",
        reference=_reference,
        operators=("rms_norm", "rms_norm_backward"),
        override=(
            Override("_fused_rms_norm"),
            Override("_fused_rms_norm_backward"),
            Override("rms_norm", _override, at_autograd=True, **_AT_RMS_NORM),
            Override("rms_norm", _override, **_AT_RMS_NORM),
        ),
        samples=lambda: (
            *rows(_sample),
            Sample(
                "an offset",
                ((16, 1000), (1000,)),
                {"offset": 1.0},
                arguments=lambda x, w: (x, (1000,), w, 1e-6),
                terms=1000,
            ),
            Sample("without a weight", ((16, 1000),), {"normalized_shape": (1000,), "eps": 1e-6}, terms=1000),
            Sample(
                "two dimensions", ((16, 20, 50), (20, 50)), arguments=lambda x, w: (x, (20, 50), w, 1e-6), terms=1000
            ),
        ),
        production=lambda batch_size=256, hidden_size=2048: _sample("", batch_size, hidden_size),
    )
)
register(
    Op(
        "add_rms_norm",
        add_rms_norm,
        reference=_reference_of_sum,
        operators=("add_rms_norm", "rms_norm_backward"),
        samples=lambda: rows(_sample_of_sum),
        production=lambda batch_size=256, hidden_size=2048: _sample_of_sum("", batch_size, hidden_size),
    )
)
