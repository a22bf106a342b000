"""Products with packed weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._core.operators import autograd, cpu_kernel, fake_kernel, ops
from .._core.registry import Op, Sample, register
from .._core.routing import accelerated
from ._rows import dequantize
from ._samples import packed_sample
from ._types import BY_NUMBER, KERNELS, type_of
from ._unpack import unpack

__all__ = ["quantized_linear", "quantized_linear_experts"]

_FEW = 8  # rows of x, for which the packed weights are read directly


def quantized_linear(x: Tensor, packed: Tensor, type: Any, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + bias for packed weights W, as torch.nn.functional.linear(x, dequantize(packed, type), bias).

    Up to 8 rows of x are multiplied with the weights as they are read, in float32. For more, the weights become numbers
    of x's dtype first, and PyTorch's matmul multiplies.

    Args:
        x: float32, float16 or bfloat16, (*, weights of a row), any strides.
        packed: uint8, (rows, bytes of a row).
        type: GGML's type, by name ("Q4_K") or number.
        bias: (rows,), of x's dtype, or None.

    Returns:
        (*, rows), of x's dtype. It has a derivative with respect to x and the bias, not to the weights.

    Raises:
        ValueError: the type is unknown.
        RuntimeError: shapes do not match.
    """
    type = type_of(type)
    few = x.numel() <= _FEW * x.shape[-1] if x.dim() else False
    if few and type.name in KERNELS and accelerated(x) and packed.device == x.device:
        result = _matvec(x, packed, type.number)
    else:
        result = _Product.apply(x, packed, type.number)
    return result if bias is None else result + bias


class _Product(torch.autograd.Function):
    """The weights are made again for the gradient, so that they do not stay in memory as numbers."""

    @staticmethod
    def forward(ctx, x, packed, type):
        ctx.save_for_backward(packed)
        ctx.type = type
        return x @ dequantize(packed, type, dtype=x.dtype).T

    @staticmethod
    def backward(ctx, grad):
        (packed,) = ctx.saved_tensors
        return _transposed(grad, packed, ctx.type), None, None


def _transposed(grad, packed, type):
    return _Transposed.apply(grad, packed, type)


class _Transposed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, grad, packed, type):
        ctx.save_for_backward(packed)
        ctx.type = type
        return grad @ dequantize(packed, type, dtype=grad.dtype)

    @staticmethod
    def backward(ctx, grad):
        (packed,) = ctx.saved_tensors
        return quantized_linear(grad, packed, ctx.type), None, None


@cpu_kernel("quant_matvec")
def _(x, packed, type):
    return (x.float() @ unpack(packed, BY_NUMBER[type]).T).to(x.dtype)


@fake_kernel("quant_matvec")
def _(x, packed, type):
    return x.new_empty([*x.shape[:-1], packed.shape[0]])


def _save(ctx, inputs, output):
    _, packed, ctx.type = inputs
    ctx.save_for_backward(packed)


def _backward(ctx, grad):
    (packed,) = ctx.saved_tensors
    return _transposed(grad, packed, ctx.type), None, None


_matvec = autograd("quant_matvec", _backward, _save)


def quantized_linear_experts(x: Tensor, packed: Tensor, experts: Tensor, type: Any) -> Tensor:
    """For each token t and each of its experts e: W[e] x[t], without derivative.

    Args:
        x: float32, float16 or bfloat16, (tokens, weights of a row), or (tokens, experts of a token, weights of a row).
        packed: uint8, (experts, rows, bytes of a row).
        experts: integers, (tokens, experts of a token). Those that do not exist give NaN on a GPU.
        type: GGML's type, by name or number.

    Returns:
        (tokens, experts of a token, rows), of x's dtype.
    """
    type = type_of(type)
    if type.name in KERNELS and accelerated(x) and packed.device == x.device:
        return ops.quant_matvec_experts(x.detach(), packed, experts.int(), type.number)
    return _experts(x, packed, experts, type)


def _experts(x, packed, experts, type):
    weights = unpack(packed[experts.long()], type)  # (tokens, experts of a token, rows, length)
    x = x if x.dim() == 3 else x[:, None]
    dtype = torch.promote_types(x.dtype, torch.float32)
    return (weights.to(dtype) @ x.to(dtype)[..., None])[..., 0].to(x.dtype)


@cpu_kernel("quant_matvec_experts")
def _(x, packed, experts, type):
    return _experts(x, packed, experts, BY_NUMBER[type])


@fake_kernel("quant_matvec_experts")
def _(x, packed, experts, type):
    return x.new_empty([*experts.shape, packed.shape[1]])


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
    return x, torch.stack(packed), torch.arange(8, device=x.device).view(4, 2) % 3


register(
    Op(
        "quantized_linear",
        quantized_linear,
        reference=_reference,
        operators=("quant_matvec", "quant_rows"),
        samples=_samples,
    )
)
register(
    Op(
        "quantized_linear_experts",
        quantized_linear_experts,
        reference=lambda x, packed, experts, type: _experts(x, packed, experts, type_of(type)),
        operators=("quant_matvec_experts",),
        samples=lambda: (
            Sample("two of three experts", ((4, 512),), {"type": "Q4_K"}, arguments=_of_experts, terms=512),
        ),
        backward=False,
    )
)
