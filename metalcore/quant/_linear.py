"""Products with packed weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._core.operators import autograd, cpu_kernel, fake_kernel
from .._core.registry import Op, Sample, register
from .._core.routing import accelerated, autocast_operands, require_tensors
from .._core.tensors import in_int32
from ._rows import dequantize, require_dim, require_integers, rows_of
from ._types import BY_NUMBER, KERNELS, packed_sample, type_of
from ._unpack import unpack

__all__ = ["quantized_linear", "quantized_linear_experts"]


def quantized_linear(x: Tensor, packed: Tensor, type: Any, bias: Tensor | None = None) -> Tensor:
    """Computes x Wᵀ + bias for packed weights W, as torch.nn.functional.linear(x, dequantize(packed, type), bias).

    Up to 8 rows of x are multiplied with the weights as they are read, in float32. For more rows the weights are
    rounded to x's dtype, tile by tile; or, on NVIDIA GPUs, all at once for PyTorch's matmul. The gradient by x is
    computed in the same ways from the packed weights.

    Args:
        x: float32, float16 or bfloat16, (*, weights of a row), any strides.
        packed: uint8, (rows, bytes of a row).
        type: GGML's type, by name ("Q4_K") or number. Those without kernels (IQ1 to IQ3, TQ) become numbers first.
        bias: (rows,), of x's dtype, or None.

    Returns:
        (*, rows), of x's dtype, or of autocast's where that is on, as torch.nn.functional.linear's. It has derivatives
        with respect to x and the bias, not to the weights.

    Raises:
        ValueError: the type is unknown.
        TypeError: x, packed or bias is no tensor.
        RuntimeError: shapes do not match, or x is not of a floating-point dtype.

    Example:
        >>> packed = metalcore.quant.quantize(torch.ones(4, 32, device="mps"), "Q8_0")
        >>> metalcore.quantized_linear(torch.ones(2, 32, device="mps"), packed, "Q8_0").shape
        torch.Size([2, 4])
    """
    type = type_of(type)
    require_tensors("quantized_linear", optional=True, bias=bias)
    x, bias = autocast_operands(x, bias)
    if _takes(x, packed, type):
        result = _matmul(x, packed, type.number, False)
    else:
        require_tensors("quantized_linear", x=x, packed=packed)
        _require_floating("quantized_linear", x)
        require_dim("quantized_linear", 2, packed=packed)
        result = x @ dequantize(packed, type, dtype=x.dtype).T
    return result if bias is None else add_bias(result, bias)


def add_bias(product: Tensor, bias: Tensor) -> Tensor:
    """Returns the sum, of the product's dtype. A bias of another shape would be broadcast silently."""
    if bias.shape != product.shape[-1:]:
        raise RuntimeError(f"quantized_linear: bias has shape {list(bias.shape)}, not {list(product.shape[-1:])}")
    return (product + bias).to(product.dtype)


def _require_floating(op, x):
    if not x.is_floating_point():
        raise RuntimeError(f"{op}: x must be floating-point numbers, not {x.dtype}")


def _takes(x, packed, type):
    return type.name in KERNELS and accelerated(x) and isinstance(packed, Tensor) and packed.device == x.device


@cpu_kernel("quant_matmul")
def _(x, packed, type, transposed):
    weights = unpack(packed, BY_NUMBER[type])
    return (x.float() @ (weights if transposed else weights.T)).to(x.dtype)


@fake_kernel("quant_matmul")
def _(x, packed, type, transposed):
    return x.new_empty([*x.shape[:-1], _length(packed, type, transposed)])


def _length(packed, type, transposed):
    """Returns the length of a result's rows."""
    type = BY_NUMBER[type]
    return packed.shape[-1] // type.nbytes * type.block if transposed else packed.shape[-2]


def _save(ctx, inputs, output):
    _, packed, ctx.type, ctx.transposed = inputs
    ctx.save_for_backward(packed)


def _backward(ctx, grad):
    (packed,) = ctx.saved_tensors
    return _matmul(grad, packed, ctx.type, not ctx.transposed), None, None, None


_matmul = autograd("quant_matmul", _backward, _save)


def quantized_linear_experts(x: Tensor, packed: Tensor, experts: Tensor, type: Any) -> Tensor:
    """Computes W[e] x[t] for each token t and each of its experts e.

    Args:
        x: float32, float16 or bfloat16, (tokens, weights of a row), or (tokens, experts of a token, weights of a row).
        packed: uint8, (experts, rows, bytes of a row).
        experts: integers, (tokens, experts of a token). Those that do not exist give NaN on a GPU.
        type: GGML's type, by name or number.

    Returns:
        (tokens, experts of a token, rows), of x's dtype, or of autocast's. It has a derivative with respect to x.

    Raises:
        ValueError: the type is unknown.
        TypeError: x or packed is no tensor, or experts are no tensor of integers.
        RuntimeError: shapes do not match, or x is not of a floating-point dtype.

    Example:
        >>> packed = metalcore.quant.quantize(torch.ones(3, 4, 32, device="mps"), "Q8_0")  # 3 experts
        >>> x, experts = torch.ones(2, 32, device="mps"), torch.tensor([[0, 2], [1, 2]], device="mps")
        >>> metalcore.quantized_linear_experts(x, packed, experts, "Q8_0").shape
        torch.Size([2, 2, 4])
    """
    type = type_of(type)
    op = "quantized_linear_experts"
    (x,) = autocast_operands(x)
    fits = _takes(x, packed, type) and isinstance(experts, Tensor)
    if not fits:
        require_tensors(op, x=x, packed=packed, experts=experts)
    require_integers(op, experts=experts)
    if fits:
        return _matmul_experts(x, packed, in_int32(experts), type.number, False)
    _require_floating(op, x)
    require_dim(op, 3, packed=packed)
    require_dim(op, 2, experts=experts)
    if x.dim() not in (2, 3):
        raise RuntimeError(f"{op}: x must have 2 or 3 dimensions, and is {list(x.shape)}")
    if x.shape[:-1] != experts.shape[: x.dim() - 1]:
        raise RuntimeError(f"{op}: x of shape {list(x.shape)} does not go with experts of shape {list(experts.shape)}")
    return _experts(x, packed, experts, type, False)


@cpu_kernel("quant_matmul_experts")
def _(x, packed, experts, type, transposed):
    return _experts(x, packed, experts, BY_NUMBER[type], transposed)


def _experts(x, packed, experts, type, transposed):
    weights = unpack(rows_of(packed, experts.long()), type)  # (tokens, experts of a token, rows, length)
    of_x, dtype = x.dtype, torch.promote_types(x.dtype, torch.float32)
    x = (x if x.dim() == 3 else x[:, None]).to(dtype)
    weights = (weights.mT if transposed else weights).to(dtype)
    return (weights @ x[..., None])[..., 0].to(of_x)


@fake_kernel("quant_matmul_experts")
def _(x, packed, experts, type, transposed):
    return x.new_empty([*experts.shape, _length(packed, type, transposed)])


def _save_experts(ctx, inputs, output):
    x, packed, experts, ctx.type, ctx.transposed = inputs
    ctx.shared = x.dim() == 2
    ctx.save_for_backward(packed, experts)


def _backward_experts(ctx, grad):
    packed, experts = ctx.saved_tensors
    gradient = _matmul_experts(grad, packed, experts, ctx.type, not ctx.transposed)
    return gradient.sum(1) if ctx.shared else gradient, None, None, None, None


_matmul_experts = autograd("quant_matmul_experts", _backward_experts, _save_experts)


def _reference(x, packed, type, bias=None):
    return torch.nn.functional.linear(x, unpack(packed, type_of(type)).to(x.dtype), bias)


def _samples():
    def sample(type, rows):
        return Sample(
            f"{type}, {rows} rows",
            ((rows, 1280),),
            {"type": type},
            arguments=lambda x: (x, packed_sample(type, 37, 1280, device=x.device)),
            terms=1280,
            roundings=2,
        )

    return tuple(sample(*of) for of in (("Q4_K", 1), ("Q4_K", 5), ("Q4_K", 20), ("Q6_K", 1), ("Q8_0", 3), ("Q4_0", 9)))


def _of_experts(x):
    packed = [packed_sample("Q4_K", 20, 512, seed, x.device) for seed in range(3)]
    return x, torch.stack(packed), torch.arange(2 * len(x), device=x.device).view(-1, 2) % 3


register(
    Op(
        "quantized_linear",
        quantized_linear,
        reference=_reference,
        operators=("quant_matmul",),
        samples=_samples,
    )
)
register(
    Op(
        "quantized_linear_experts",
        quantized_linear_experts,
        reference=lambda x, packed, experts, type: _experts(x, packed, experts, type_of(type), False),
        operators=("quant_matmul_experts",),
        samples=lambda: (
            Sample("few tokens", ((4, 512),), {"type": "Q4_K"}, arguments=_of_experts, terms=512, roundings=2),
            Sample("many tokens", ((40, 512),), {"type": "Q4_K"}, arguments=_of_experts, terms=512, roundings=2),
        ),
    )
)
