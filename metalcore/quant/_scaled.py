"""Products with weights of 8 and 4 bits with scales, and these weights as numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from .._core.operators import autograd, cpu_kernel, fake_kernel, ops
from .._core.registry import Op, Sample, register
from .._core.routing import accelerated, autocast_operands, require_tensors
from ._linear import add_bias
from ._rows import require_integers, rows_of
from ._scaled_weight import (
    ScaledWeight,
    require_scaled,
    require_scaled_weight,
    scaled_format,
    scaled_numbers,
    scaled_sample,
    unpack_scaled,
)

__all__ = [
    "dequantize_scaled",
    "multiply_scaled",
    "scaled_embedding",
    "scaled_linear",
    "scaled_product",
]


def dequantize_scaled(weight: ScaledWeight, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns numbers of 8 or 4 bits with scales as numbers, computed in float32 and rounded to dtype.

    Args:
        weight: a ScaledWeight whose tensors have 2 dimensions.
        dtype: float32, float16 or bfloat16.

    Returns:
        (rows, numbers of a row). It has no derivative.

    Raises:
        TypeError: weight is no ScaledWeight, or dtype none of these.
        RuntimeError: shapes or dtypes do not go together, or there is no such format.

    Example:
        >>> weight = metalcore.quantize_scaled(torch.ones(2, 32, device="mps"), "mxfp8")
        >>> metalcore.dequantize_scaled(weight)[0, 0].item()
        1.0
    """
    require_scaled_weight("dequantize_scaled", weight, dtype)
    packed, scales, format, block, factor = weight
    return ops.scaled_rows(packed, scales, factor, None, format, block, dtype)


def scaled_embedding(indices: Tensor, weight: ScaledWeight, dtype: torch.dtype = torch.float32) -> Tensor:
    """Looks up rows, as dequantize_scaled(weight, dtype)[indices], and makes numbers only of these.

    Args:
        indices: integers, of any shape. Those that do not exist give NaN on a GPU.
        weight, dtype: as dequantize_scaled has them.

    Returns:
        (*indices.shape, numbers of a row). It has no derivative.

    Raises:
        TypeError: indices are no tensor of integers, or as dequantize_scaled.
        RuntimeError: as dequantize_scaled.

    Example:
        >>> weight = metalcore.quantize_scaled(torch.ones(2, 32, device="mps"), "nvfp4")
        >>> metalcore.scaled_embedding(torch.tensor([1], device="mps"), weight).shape
        torch.Size([1, 32])
    """
    require_tensors("scaled_embedding", indices=indices)
    require_integers("scaled_embedding", indices=indices)
    require_scaled_weight("scaled_embedding", weight, dtype)
    packed, scales, format, block, factor = weight
    return ops.scaled_rows(packed, scales, factor, indices.long(), format, block, dtype)


def scaled_linear(x: Tensor, weight: ScaledWeight, bias: Tensor | None = None) -> Tensor:
    """Computes x Wᵀ + bias for weights W of 8 or 4 bits with scales, as torch.nn.functional.linear(x,
    dequantize_scaled(weight), bias).

    Up to 8 rows of x are multiplied with the weights as they are read, in float32. For more rows, and for the gradient
    by x, the weights become numbers of x's dtype, which PyTorch's matmul multiplies.

    Args:
        x: float32, float16 or bfloat16, (*, numbers of a row), any strides. It is not rounded to 8 or 4 bits.
        weight: W, a ScaledWeight whose tensors have 2 dimensions.
        bias: (rows of W,), or None.

    Returns:
        (*, rows of W), of x's dtype, or of autocast's where that is on. It has derivatives with respect to x and the
        bias, not to the weights.

    Raises:
        TypeError: x or bias is no tensor, or weight no ScaledWeight.
        RuntimeError: shapes or dtypes do not go together, or there is no such format.

    Example:
        >>> weight = metalcore.quantize_scaled(torch.ones(2, 32, device="mps"), "e4m3", (1, 0))
        >>> metalcore.scaled_linear(torch.ones(1, 32, device="mps"), weight).tolist()
        [[32.0, 32.0]]
    """
    require_tensors("scaled_linear", x=x)
    require_tensors("scaled_linear", optional=True, bias=bias)
    require_scaled_weight("scaled_linear", weight)
    x, bias = autocast_operands(x, bias)
    result = scaled_product(x, weight)
    return result if bias is None else add_bias(result, bias)


def scaled_product(x, weight):
    packed, scales, format, block, factor = weight
    inputs = x, packed, scales, factor, format, block, False
    return multiply_scaled(*inputs) if accelerated(x) else ops.scaled_matmul(*inputs)


@cpu_kernel("scaled_rows")
def _(packed, scales, factor, rows, format, block, dtype):
    require_scaled(packed, scales, factor, format, block)
    numbers = unpack_scaled(packed, scales, factor, format, block).to(dtype)
    return numbers if rows is None else rows_of(numbers, rows.reshape(-1)).view(*rows.shape, numbers.shape[1])


@fake_kernel("scaled_rows")
def _(packed, scales, factor, rows, format, block, dtype):
    shape = packed.shape[:1] if rows is None else rows.shape
    return packed.new_empty([*shape, packed.shape[1] * 8 // scaled_format(format).bits], dtype=dtype)


@cpu_kernel("scaled_matmul")
def _(x, packed, scales, factor, format, block, transposed):
    length = require_scaled(packed, scales, factor, format, block)
    if x.dim() < 1 or x.shape[-1] != (len(packed) if transposed else length):
        raise RuntimeError(
            f"scaled_matmul: x of shape {list(x.shape)} does not go with {len(packed)} rows of {length} weights"
        )
    weights = unpack_scaled(packed, scales, factor, format, block).to(x.dtype)
    return x @ (weights if transposed else weights.T)


@fake_kernel("scaled_matmul")
def _(x, packed, scales, factor, format, block, transposed):
    length = packed.shape[1] * 8 // scaled_format(format).bits
    return x.new_empty([*x.shape[:-1], length if transposed else packed.shape[0]])


def _save(ctx, inputs, output):
    _, *weights, ctx.format, ctx.block, ctx.transposed = inputs
    ctx.save_for_backward(*weights)


def _backward(ctx, grad):
    return multiply_scaled(grad, *ctx.saved_tensors, ctx.format, ctx.block, not ctx.transposed), *[None] * 6


multiply_scaled = autograd("scaled_matmul", _backward, _save)


def _reference(x, weight, bias=None):
    numbers = unpack_scaled(weight.packed, weight.scales, weight.factor, weight.format, weight.block)
    return torch.nn.functional.linear(x, numbers.to(x.dtype), bias)


register(
    Op(
        "scaled_linear",
        scaled_linear,
        reference=_reference,
        operators=("scaled_matmul",),
        samples=lambda: tuple(
            Sample(
                f"{format} {'x'.join(map(str, block))}, {rows} rows of {length}",
                ((rows, length),),
                arguments=lambda x, format=format, block=block: (
                    x,
                    scaled_sample(format, 37, x.shape[1], x.device, block),
                ),
                terms=length,
                roundings=2,
            )
            for format, block, rows, length in (
                ("e4m3", (128, 128), 1, 1280),
                ("e5m2", (1, 0), 3, 288),
                ("mxfp8", (1, 32), 2, 1280),
                ("mxfp4", (1, 32), 1, 288),
                ("nvfp4", (1, 16), 5, 288),
                ("e4m3", (0, 0), 20, 288),
            )
        ),
    )
)


def _numbers_samples(indices):
    """Returns samples. Their tensor gives only the device."""

    def sample(format):
        def arguments(x):
            weight = scaled_sample(format, 9, 160, x.device, (2, 32))
            return (torch.arange(4, device=x.device).mul(4).view(2, 2) % 9, weight) if indices else (weight,)

        return Sample(format, ((1,),), arguments=arguments)

    return tuple(sample(format) for format in ("e4m3", "mxfp4", "nvfp4"))


register(
    Op(
        "dequantize_scaled",
        dequantize_scaled,
        reference=scaled_numbers,
        operators=("scaled_rows",),
        samples=lambda: _numbers_samples(False),
        backward=False,
    )
)
register(
    Op(
        "scaled_embedding",
        scaled_embedding,
        reference=lambda indices, weight: scaled_numbers(weight)[indices],
        operators=("scaled_rows",),
        samples=lambda: _numbers_samples(True),
        backward=False,
    )
)
