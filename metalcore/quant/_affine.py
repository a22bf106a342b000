"""Weights of 2 to 8 bits in groups that share a scale and an offset, and products with them."""

from __future__ import annotations

import torch
from torch import Tensor

from .._core.operators import autograd, cpu_kernel, fake_kernel, ops
from .._core.registry import Op, Sample, register
from .._core.routing import FLOAT_DTYPES, accelerated, autocast_operands, require_tensors
from ._linear import add_bias
from ._rows import require_integers, rows_of

__all__ = [
    "affine_embedding",
    "affine_linear",
    "affine_matmul",
    "affine_sample",
    "dequantize_affine",
    "integers",
    "packed_integers",
    "require_affine",
    "unpack_affine",
]

_BITS = (2, 3, 4, 5, 6, 8)
_ZEROS = (torch.uint8, torch.int8)  # dtypes of zero points, and of packed weights
_SLICE = 32  # weights that are whole words, whatever their bits


def dequantize_affine(
    packed: Tensor, scales: Tensor, offsets: Tensor, bits: int, dtype: torch.dtype | None = None
) -> Tensor:
    """Returns weights of 2 to 8 bits in groups as numbers: scale * q + offset for the q of a group, rounded once.

    Kernels add scale times the zero point, and for int8 scale times half the range, to the offset before. These
    products are rounded to float32, which changes nothing where scales have 16 bits.

    Args:
        packed: uint8, (rows, bytes of a row). A row is a sequence of bits: q number k has those from k * bits on, the
            lowest first. A row has a multiple of 32 weights. int8 where q is signed, of 2, 4 or 8 bits.
        scales: float32, float16 or bfloat16, (rows, groups). A group has 32, 64, 128 … weights, any power of 2.
        offsets: of the scales' shape and dtype; or zero points, uint8 or int8: an offset is then -scale * zero.
        bits: 2, 3, 4, 5, 6 or 8.
        dtype: of the result; None is the scales'.

    Returns:
        (rows, weights of a row). It has no derivative.

    Raises:
        TypeError: packed, scales or offsets is no tensor, or dtype no torch.dtype of these.
        RuntimeError: shapes or dtypes do not go together, or there are no such bits.

    Example:
        >>> packed = torch.full((1, 16), 0x21, dtype=torch.uint8, device="mps")  # 1, 2, 1, 2 …
        >>> scales = torch.full((1, 1), 0.5, device="mps")
        >>> metalcore.dequantize_affine(packed, scales, scales, 4)[0, :4].tolist()
        [1.0, 1.5, 1.0, 1.5]
    """
    require_tensors("dequantize_affine", packed=packed, scales=scales, offsets=offsets)
    return ops.affine_rows(packed, scales, offsets, None, bits, _dtype_of("dequantize_affine", dtype, scales))


def affine_embedding(
    indices: Tensor, packed: Tensor, scales: Tensor, offsets: Tensor, bits: int, dtype: torch.dtype | None = None
) -> Tensor:
    """Looks up rows of weights of 2 to 8 bits in groups, as dequantize_affine(…)[indices], and unpacks only these.

    Args:
        indices: integers, of any shape. Those that do not exist give NaN on a GPU.
        packed, scales, offsets, bits, dtype: as dequantize_affine has them.

    Returns:
        (*indices.shape, weights of a row). It has no derivative.

    Raises:
        TypeError: indices are no tensor of integers, or as dequantize_affine.
        RuntimeError: as dequantize_affine.

    Example:
        >>> packed = torch.full((3, 16), 0x21, dtype=torch.uint8, device="mps")  # 1, 2, 1, 2 …
        >>> scales, zeros = torch.ones(3, 1, device="mps"), torch.ones(3, 1, dtype=torch.uint8, device="mps")
        >>> metalcore.affine_embedding(torch.tensor([2], device="mps"), packed, scales, zeros, 4)[0, :2].tolist()
        [0.0, 1.0]
    """
    require_tensors("affine_embedding", indices=indices, packed=packed, scales=scales, offsets=offsets)
    require_integers("affine_embedding", indices=indices)
    dtype = _dtype_of("affine_embedding", dtype, scales)
    return ops.affine_rows(packed, scales, offsets, indices.long(), bits, dtype)


def affine_linear(
    x: Tensor, packed: Tensor, scales: Tensor, offsets: Tensor, bits: int, bias: Tensor | None = None
) -> Tensor:
    """Computes x Wᵀ + bias for weights W of 2 to 8 bits in groups, as torch.nn.functional.linear(x,
    dequantize_affine(packed, scales, offsets, bits), bias).

    Up to 8 rows of x are multiplied with the weights as they are read, in float32. For more rows, and for the gradient
    by x, the weights become numbers of x's dtype, which PyTorch's matmul multiplies.

    Args:
        x: float32, float16 or bfloat16, (*, weights of a row), any strides.
        packed, scales, offsets, bits: W, as dequantize_affine has them.
        bias: (rows of W,), or None.

    Returns:
        (*, rows of W), of x's dtype, or of autocast's where that is on. It has derivatives with respect to x and the
        bias, not to the weights.

    Raises:
        TypeError: x, packed, scales, offsets or bias is no tensor.
        RuntimeError: shapes or dtypes do not go together, or there are no such bits.

    Example:
        >>> packed = torch.full((2, 32), 3, dtype=torch.uint8, device="mps")
        >>> scales, zeros = torch.ones(2, 1, device="mps"), torch.ones(2, 1, dtype=torch.uint8, device="mps")
        >>> metalcore.affine_linear(torch.ones(1, 32, device="mps"), packed, scales, zeros, 8).tolist()
        [[64.0, 64.0]]
    """
    require_tensors("affine_linear", x=x, packed=packed, scales=scales, offsets=offsets)
    require_tensors("affine_linear", optional=True, bias=bias)
    x, bias = autocast_operands(x, bias)
    result = affine_matmul(x, packed, scales, offsets, bits)
    return result if bias is None else add_bias(result, bias)


def _dtype_of(op, dtype, scales):
    dtype = scales.dtype if dtype is None else dtype
    if not isinstance(dtype, torch.dtype) or dtype not in FLOAT_DTYPES:
        raise TypeError(f"{op}: dtype must be torch.float32, torch.float16 or torch.bfloat16, not {dtype}")
    return dtype


def unpack_affine(packed: Tensor, scales: Tensor, offsets: Tensor, bits: int) -> Tensor:
    """Returns the weights, float32, by PyTorch's ops."""
    length = packed.shape[1] // (4 * bits) * _SLICE
    numbers = integers(packed.view(torch.uint8), bits).view(*scales.shape, length // max(scales.shape[1], 1)).float()
    if packed.dtype == torch.int8:
        numbers = numbers - (numbers >= 2 ** (bits - 1)) * 2.0**bits
    # The only rounding is that to float32, except on mps, which has no float64.
    wide = torch.float32 if packed.device.type == "mps" else torch.float64
    scales, points = scales.to(wide)[..., None], offsets.to(wide)[..., None]
    numbers = (numbers - points) * scales if offsets.dtype in _ZEROS else numbers * scales + points
    return numbers.float().view(len(packed), length)


def integers(packed: Tensor, bits: int) -> Tensor:
    """Returns the integers of so many bits that rows of bytes have, uint8, (rows, integers of a row)."""
    return packed if bits == 8 else _regrouped(packed, 8, bits)


def packed_integers(numbers: Tensor, bits: int) -> Tensor:
    """Returns the bytes of rows of integers, of which eight have `bits` bytes."""
    return numbers.to(torch.uint8) if bits == 8 else _regrouped(numbers.to(torch.uint8), bits, 8)


def _regrouped(numbers, bits, to):
    """Returns rows of integers of `bits` bits as integers of `to` bits: each row is one sequence of bits."""
    rows, count = numbers.shape
    places = torch.arange(8, dtype=torch.uint8, device=numbers.device)
    ones = ((numbers[..., None] >> places[:bits]) & 1).view(rows, count * bits // to, to)
    return (ones << places[:to]).sum(-1, dtype=torch.uint8)


def _length(packed, bits, dims=2):
    if bits not in _BITS:
        raise RuntimeError(f"affine weights have 2, 3, 4, 5, 6 or 8 bits, not {bits}")
    if packed.dim() != dims or packed.shape[-1] % (4 * bits):
        raise RuntimeError(f"packed of shape {list(packed.shape)} is no rows of 32 weights of {bits} bits")
    return packed.shape[-1] // (4 * bits) * _SLICE


def require_affine(packed: Tensor, scales: Tensor, offsets: Tensor, bits: int, dims: int = 2) -> int:
    """Refuses what kernels refuse, and returns how many weights a row has. Several matrices have 3 dimensions."""
    length = _length(packed, bits, dims)
    if packed.dtype not in _ZEROS or offsets.dtype not in (*_ZEROS, scales.dtype):
        raise RuntimeError(
            "packed must be uint8 or int8, and offsets uint8, int8 or of the scales' dtype, not "
            f"{packed.dtype} and {offsets.dtype}"
        )
    if packed.dtype == torch.int8 and bits not in (2, 4, 8):
        raise RuntimeError(f"packed is int8, and signed weights must have 2, 4 or 8 bits, not {bits}")
    if scales.dim() != dims or scales.shape[:-1] != packed.shape[:-1] or scales.shape != offsets.shape:
        rows = ", ".join(map(str, packed.shape[:-1]))
        raise RuntimeError(
            f"scales and offsets must have shape ({rows}, groups), and are {list(scales.shape)} and "
            f"{list(offsets.shape)}"
        )
    groups = scales.shape[-1]
    size = _SLICE if length == 0 else length // groups if groups else 0
    if groups * size != length or size < _SLICE or size & (size - 1):
        raise RuntimeError(f"{groups} groups of {length} weights must be of 32 weights, or of 64, 128 … any power of 2")
    return length


@cpu_kernel("affine_rows")
def _(packed, scales, offsets, rows, bits, dtype):
    require_affine(packed, scales, offsets, bits)
    if rows is None:
        return unpack_affine(packed, scales, offsets, bits).to(dtype)
    flat = rows.reshape(-1)
    packed, scales, offsets = (rows_of(each, flat) for each in (packed, scales, offsets))
    numbers = unpack_affine(packed, scales, offsets, bits)
    return numbers.view(*rows.shape, numbers.shape[1]).to(dtype)


@fake_kernel("affine_rows")
def _(packed, scales, offsets, rows, bits, dtype):
    shape = packed.shape[:1] if rows is None else rows.shape
    return packed.new_empty([*shape, _length(packed, bits)], dtype=dtype)


@cpu_kernel("affine_matmul")
def _(x, packed, scales, offsets, bits, transposed):
    length = require_affine(packed, scales, offsets, bits)
    if x.dim() < 1 or x.shape[-1] != (len(packed) if transposed else length):
        raise RuntimeError(
            f"affine_matmul: x of shape {list(x.shape)} does not go with {len(packed)} rows of {length} weights"
        )
    weights = unpack_affine(packed, scales, offsets, bits).to(x.dtype)
    return x @ (weights if transposed else weights.T)


@fake_kernel("affine_matmul")
def _(x, packed, scales, offsets, bits, transposed):
    return x.new_empty([*x.shape[:-1], _length(packed, bits) if transposed else packed.shape[0]])


def _save(ctx, inputs, output):
    _, *weights, ctx.bits, ctx.transposed = inputs
    ctx.save_for_backward(*weights)


def _backward(ctx, grad):
    return _matmul(grad, *ctx.saved_tensors, ctx.bits, not ctx.transposed), *[None] * 5


_matmul = autograd("affine_matmul", _backward, _save)


def affine_matmul(
    x: Tensor, packed: Tensor, scales: Tensor, offsets: Tensor, bits: int, transposed: bool = False
) -> Tensor:
    """Returns x Wᵀ, or with `transposed` x W, without checks of its own."""
    inputs = x, packed, scales, offsets, bits, transposed
    return _matmul(*inputs) if accelerated(x) else ops.affine_matmul(*inputs)


def affine_sample(
    bits: int,
    rows: int,
    length: int,
    device: torch.device | str,
    group: int = 64,
    zeros: bool = False,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns packed weights, scales, and offsets or zero points, the same on every device."""
    numbers = torch.arange(rows * length // 8 * bits, device=device)
    packed = ((numbers * 167 + numbers // 16 * 53 + 11) & 255).to(torch.uint8).view(rows, -1)
    groups = torch.arange(rows * length // group, device=device).view(rows, -1)
    scales = ((groups % 7 + 4) / 8 / 2**bits).to(dtype)
    points = groups % 5 * 2**bits // 8
    return packed, scales, points.to(torch.uint8) if zeros else ((groups % 11 - 5) / 16).to(dtype)


def _samples(bits, rows, length, group, zeros):
    return Sample(
        f"{bits} bits, {rows} rows of {length}, groups of {group}{', zero points' * zeros}",
        ((rows, length),),
        arguments=lambda x: (x, *affine_sample(bits, 37, length, x.device, group, zeros), bits),
        terms=length,
        roundings=2,
    )


register(
    Op(
        "affine_linear",
        affine_linear,
        reference=lambda x, packed, scales, offsets, bits, bias=None: torch.nn.functional.linear(
            x, unpack_affine(packed, scales, offsets, bits).to(x.dtype), bias
        ),
        operators=("affine_matmul",),
        samples=lambda: tuple(
            _samples(*of)
            for of in (
                (4, 1, 1280, 64, False),
                (4, 3, 1280, 128, True),
                (8, 5, 1280, 32, True),
                (2, 2, 1280, 256, False),
                (3, 1, 1280, 64, False),
                (5, 1, 1280, 64, False),
                (6, 1, 1280, 64, False),
                (4, 20, 1280, 64, False),
            )
        ),
    )
)


def _numbers_samples(indices):
    """Returns samples. Their tensor gives only the device."""

    def sample(bits, group, zeros):
        def arguments(x):
            weights = *affine_sample(bits, 9, 320, x.device, group, zeros), bits
            return (torch.arange(4, device=x.device).mul(4).view(2, 2) % 9, *weights) if indices else weights

        return Sample(f"{bits} bits{', zero points' * zeros}", ((1,),), arguments=arguments)

    return tuple(sample(bits, 64, zeros) for bits, zeros in ((3, False), (4, True), (8, False)))


register(
    Op(
        "dequantize_affine",
        dequantize_affine,
        reference=unpack_affine,
        operators=("affine_rows",),
        samples=lambda: _numbers_samples(False),
        backward=False,
    )
)
register(
    Op(
        "affine_embedding",
        affine_embedding,
        reference=lambda indices, packed, scales, offsets, bits: unpack_affine(packed, scales, offsets, bits)[indices],
        operators=("affine_rows",),
        samples=lambda: _numbers_samples(True),
        backward=False,
    )
)
