"""Weights of other libraries' files in metalcore's order of bits: rows of integers, the first of them in the lowest
bits of the first byte, and numbers of 8 and 4 bits in the same order.

Sources of the layouts: github.com/AutoGPTQ/AutoGPTQ, auto_gptq/nn_modules/qlinear/qlinear_cuda_old.py (GPTQ: columns of
such integers); github.com/casper-hansen/AutoAWQ, awq/modules/linear/gemm.py (AWQ: rows of x's columns, with the
integers of a word in another order); github.com/ml-explore/mlx, mlx/ops.cpp, and
github.com/vllm-project/compressed-tensors, compressed_tensors/compressors (both: the same rows);
github.com/pytorch/pytorch, aten/src/ATen/native/cuda/int4mm.cu (tile-packed integers).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .._core.routing import FLOAT_DTYPES
from ._affine import integers, packed_integers
from ._scaled_weight import ScaledWeight, require_scaled

__all__ = [
    "AffineWeight",
    "expert_blocks",
    "from_awq",
    "from_compressed",
    "from_gptq",
    "from_mlx",
    "from_tile_packed",
    "mxfp4_blocks",
    "scaled_from_compressed",
    "scaled_from_mlx",
]


class AffineWeight(NamedTuple):
    """What metalcore.nn.AffineLinear takes."""

    packed: Tensor
    scales: Tensor
    offsets: Tensor
    bits: int
    order: Tensor | None = None


def from_gptq(
    qweight: Tensor,
    qzeros: Tensor,
    scales: Tensor,
    g_idx: Tensor | None,
    length: int,
    group_size: int = -1,
    zeros_less_one: bool = True,
) -> AffineWeight:
    """Takes GPTQ's tensors.

    Args:
        qweight: int32, (length * bits / 32, rows): each column is a row of integers.
        qzeros: int32, (groups, rows * bits / 32).
        scales: (groups, rows).
        g_idx: the group of each column of x, or None where they are in order.
        group_size: -1 is all columns.
        zeros_less_one: whether zero points are stored as one less, as in all files except "gptq_v2".

    Raises:
        ValueError: shapes, dtypes or groups do not go together.
    """
    _require_words(qweight=qweight, qzeros=qzeros)
    groups, rows = _two(scales, "scales")
    bits = _bits(qweight.shape[0] * 32, length, (2, 3, 4, 8))
    if qweight.shape[1] != rows or qzeros.shape != (groups, rows * bits // 32) or rows * bits % 32:
        raise ValueError(
            f"qweight {list(qweight.shape)}, qzeros {list(qzeros.shape)} and scales {list(scales.shape)} do not go "
            "together"
        )
    size = _group_size(length, groups, group_size)
    packed, order = _sorted(qweight.T.contiguous().view(torch.uint8), bits, g_idx, length, size)
    zeros = integers(qzeros.contiguous().view(torch.uint8), bits)
    if zeros_less_one:
        zeros = (zeros + 1) & (2**bits - 1)
    return AffineWeight(packed, *_regular(scales.T, zeros.T, length, size), bits, order)


def from_awq(qweight: Tensor, qzeros: Tensor, scales: Tensor, length: int, group_size: int = -1) -> AffineWeight:
    """Takes AWQ's tensors, of its version "gemm".

    Args:
        qweight: int32, (length, rows * bits / 32).
        qzeros: int32, (groups, rows * bits / 32).
        scales: (groups, rows).

    Raises:
        ValueError: shapes, dtypes or groups do not go together.
    """
    _require_words(qweight=qweight, qzeros=qzeros)
    groups, rows = _two(scales, "scales")
    bits = _bits(qweight.shape[1] * 32, rows, tuple(_AWQ_ORDERS))
    if qweight.shape[0] != length or qzeros.shape != (groups, qweight.shape[1]):
        raise ValueError(
            f"qweight {list(qweight.shape)}, qzeros {list(qzeros.shape)} and scales {list(scales.shape)} do not go "
            f"together, for rows of {length}"
        )
    size = _group_size(length, groups, group_size)
    packed = packed_integers(_in_order(qweight, bits).T.contiguous(), bits)
    return AffineWeight(packed, *_regular(scales.T, _in_order(qzeros, bits).T, length, size), bits)


def from_mlx(weight: Tensor, scales: Tensor, biases: Tensor, length: int) -> AffineWeight:
    """Takes MLX's tensors of its mode "affine": uint32 (rows, length * bits / 32), and scales and biases of (rows,
    groups).

    Raises:
        ValueError: shapes or dtypes do not go together.
    """
    _require_words(torch.uint32, weight=weight)
    bits = _bits(weight.shape[1] * 32, length, (2, 3, 4, 5, 6, 8))
    rows, groups = _two(scales, "scales")
    if rows != weight.shape[0] or biases.shape != scales.shape or biases.dtype != scales.dtype:
        raise ValueError(
            f"weight {list(weight.shape)}, scales {list(scales.shape)} ({scales.dtype}) and biases "
            f"{list(biases.shape)} ({biases.dtype}) do not go together"
        )
    packed = weight.contiguous().view(torch.uint8)
    return AffineWeight(packed, *_regular(scales, biases, length, _group_size(length, groups, 0)), bits)


def from_compressed(
    weight_packed: Tensor,
    weight_scale: Tensor,
    weight_zero_point: Tensor | None,
    weight_g_idx: Tensor | None,
    length: int,
    group_size: int = -1,
) -> AffineWeight:
    """Takes compressed-tensors' tensors of its format "pack-quantized". Its integers have signs, and are stored with
    half of their range added, as zero points are.

    Args:
        weight_packed: int32, (rows, length * bits / 32).
        weight_scale: (rows, groups).
        weight_zero_point: int32, (rows * bits / 32, groups), or None where all are zero.
        weight_g_idx: the group of each column of x, or None where they are in order.

    Raises:
        ValueError: shapes, dtypes or groups do not go together.
    """
    _require_words(weight_packed=weight_packed)
    rows, groups = _two(weight_scale, "weight_scale")
    bits = _bits(weight_packed.shape[1] * 32, length, (2, 4, 8))
    if weight_packed.shape[0] != rows:
        raise ValueError(
            f"weight_packed {list(weight_packed.shape)} and weight_scale {list(weight_scale.shape)} do not go together"
        )
    size = _group_size(length, groups, group_size)
    packed = weight_packed.contiguous().view(torch.uint8)
    packed, order = _sorted(packed, bits, weight_g_idx, length, size)
    if weight_zero_point is None:
        zeros = torch.full_like(weight_scale, 2 ** (bits - 1), dtype=torch.uint8)
    else:
        _require_words(weight_zero_point=weight_zero_point)
        if weight_zero_point.shape != (rows * bits // 32, groups) or rows * bits % 32:
            raise ValueError(
                f"weight_zero_point {list(weight_zero_point.shape)} does not go with weight_scale "
                f"{list(weight_scale.shape)}"
            )
        zeros = integers(weight_zero_point.T.contiguous().view(torch.uint8), bits).T
    return AffineWeight(packed, *_regular(weight_scale, zeros, length, size), bits, order)


def from_tile_packed(qdata: Tensor, scale_and_zero: Tensor, rows: int, length: int, group_size: int) -> AffineWeight:
    """Takes torchao's tensors of its format "tile_packed_to_4d". Integers stand for themselves less 8, times the scale,
    and what 0 stands for is added.

    Args:
        qdata: int32, (padded rows / 8, padded length / 16 / tiles, 32, tiles / 2), as tensor cores read eight rows:
            each word has eight integers of a row, of two tiles of 16 columns.
        scale_and_zero: (groups, padded rows, 2).
        rows, length: of the weight without padding.

    Raises:
        ValueError: shapes or dtypes do not go together.
    """
    if qdata.dtype != torch.int32 or qdata.dim() != 4 or qdata.shape[2] != 32:
        raise ValueError(f"qdata must be torch.int32 in tiles of 32 words, not {qdata.dtype} {list(qdata.shape)}")
    eights, tiles, _, pairs = qdata.shape
    if (
        scale_and_zero.shape != (-(tiles * pairs * 32 // -group_size), eights * 8, 2)
        or rows > eights * 8
        or length > tiles * pairs * 32
    ):
        raise ValueError(
            f"qdata {list(qdata.shape)} and scale_and_zero {list(scale_and_zero.shape)} do not have {rows} rows of "
            f"{length}, in groups of {group_size}"
        )
    words = qdata.contiguous().view(-1, pairs).view(torch.uint8)
    # Of a word: the row in eight, the pair of columns in eight, the pair of tiles, the column of the pair, the eight.
    numbers = integers(words, 4).view(eights, tiles, 8, 4, pairs, 2, 4).permute(0, 2, 1, 4, 6, 3, 5)
    numbers = numbers.reshape(eights * 8, tiles * pairs * 32)[:rows, :length]
    packed = packed_integers((numbers ^ 8).contiguous(), 4).view(torch.int8)
    scales, offsets = (each[: -(length // -group_size), :rows].T for each in scale_and_zero.unbind(2))
    return AffineWeight(packed, *_regular(scales, offsets, length, group_size), 4)


def mxfp4_blocks(weight: Tensor, scales: Tensor) -> Tensor:
    """Takes MLX's tensors of its mode "mxfp4", uint32 (rows, length / 8) and uint8 (rows, length / 32), and returns
    GGML's MXFP4: blocks of a scale and 32 numbers, of which the first 16 are the lower halves of bytes.

    Raises:
        ValueError: shapes or dtypes do not go together.
    """
    _require_words(torch.uint32, weight=weight)
    rows, blocks = _two(scales, "scales")
    if scales.dtype != torch.uint8 or weight.shape != (rows, 4 * blocks):
        raise ValueError(
            f"weight {list(weight.shape)} and scales {list(scales.shape)} ({scales.dtype}) are no blocks of 32 numbers "
            "of MXFP4"
        )
    return expert_blocks(weight.contiguous().view(torch.uint8).view(rows, blocks, 16), scales)


def expert_blocks(blocks: Tensor, scales: Tensor) -> Tensor:
    """Takes gpt-oss's tensors, uint8 (*, rows, blocks of a row, 16) and (*, rows, blocks of a row), and returns GGML's
    MXFP4, as mxfp4_blocks.

    Raises:
        ValueError: shapes or dtypes do not go together.
    """
    if blocks.dtype != torch.uint8 or scales.dtype != torch.uint8 or blocks.shape != (*scales.shape, 16):
        raise ValueError(
            f"blocks {list(blocks.shape)} ({blocks.dtype}) and scales {list(scales.shape)} ({scales.dtype}) are no "
            "blocks of 32 numbers of MXFP4"
        )
    first, second = blocks[..., :8], blocks[..., 8:]  # pairs of numbers: of each, half of the block
    lower, upper = (first & 15) | (second & 15) << 4, first >> 4 | second & 0xF0
    halves = torch.stack([lower, upper], -1).flatten(-2)
    return torch.cat([scales[..., None], halves], -1).flatten(-2)


def scaled_from_mlx(weight: Tensor, scales: Tensor, length: int) -> ScaledWeight:
    """Takes MLX's tensors of its modes "mxfp8" and "nvfp4": uint32 (rows, words), and uint8 (rows, length / 32) or
    (rows, length / 16).

    Raises:
        ValueError: shapes or dtypes do not go together.
    """
    _require_words(torch.uint32, weight=weight)
    eight = weight.shape[1] * 4 == length
    return _checked(weight.contiguous().view(torch.uint8), scales, "mxfp8" if eight else "nvfp4", (), None, length)


def scaled_from_compressed(
    weight: Tensor, scale: Tensor, divisor: Tensor | None, length: int, block: tuple[int, ...]
) -> ScaledWeight:
    """Takes compressed-tensors' tensors of its formats "float-quantized", "nvfp4-pack-quantized" and
    "mxfp4-pack-quantized".

    Args:
        weight: float8_e4m3fn or float8_e5m2 (rows, length), or uint8 (rows, length / 2).
        scale: of blocks of fp8 numbers; float8_e4m3fn (rows, length / 16); or uint8 (rows, length / 32).
        divisor: what the scales of NVFP4 are divided by, or None.
        block: rows and columns that share a scale of fp8 numbers, as ScaledWeight has them.

    Raises:
        ValueError: shapes or dtypes do not go together.
    """
    if weight.dtype == torch.uint8:
        of_scales = (torch.uint8, torch.float8_e8m0fnu) if divisor is None else (torch.float8_e4m3fn,)
        if scale.dtype not in of_scales or divisor is not None and not divisor.is_floating_point():
            found = scale.dtype if divisor is None else f"{scale.dtype}, and their divisor {divisor.dtype}"
            raise ValueError(f"scales must be {' or '.join(map(str, of_scales))}, not {found}")
        factor = None if divisor is None else 1.0 / divisor.float().view(-1)
        format = "mxfp4" if divisor is None else "nvfp4"
        return _checked(weight, scale.contiguous().view(torch.uint8), format, (), factor, length)
    formats = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
    if weight.dtype not in formats:
        raise ValueError(f"weight must have 8-bit floating-point numbers, and is {weight.dtype}")
    scales = scale.float().view(1, 1) if scale.numel() == 1 else scale.float()
    block = (0, 0) if scale.numel() == 1 else block
    return _checked(weight.contiguous().view(torch.uint8), scales, formats[weight.dtype], block, None, length)


def _checked(packed, scales, format, block, factor, length):
    try:
        found = require_scaled(packed, scales, factor, format, block)
    except RuntimeError as error:
        raise ValueError(str(error)) from None
    if found != length:
        raise ValueError(f"weight has rows of {found} numbers, and not of {length}")
    return ScaledWeight(packed, scales, format, block, factor)


# Where the integers of a word stand that are for columns 0, 1, 2 ….
_AWQ_ORDERS = {4: [0, 4, 1, 5, 2, 6, 3, 7], 8: [0, 2, 1, 3]}


def _in_order(words, bits):
    order = torch.tensor(_AWQ_ORDERS[bits], device=words.device)
    rows, count = words.shape
    numbers = integers(words.contiguous().view(torch.uint8), bits).view(rows, count, 32 // bits)
    return numbers.index_select(2, order).view(rows, count * 32 // bits)


def _sorted(packed, bits, g_idx, length, size):
    """Returns rows with their columns group by group, and the order of x's columns, or None."""
    order = None if g_idx is None or g_idx.is_meta else _order(g_idx, length, size)
    if order is None:
        return packed, None
    order = order.to(packed.device)
    return packed_integers(integers(packed, bits).index_select(1, order), bits), order


def _order(g_idx, length, size):
    """Returns the columns of x, group by group, or None where they are in this order already."""
    if g_idx.shape != (length,):
        raise ValueError(f"g_idx {list(g_idx.shape)} does not have the groups of {length} columns")
    g_idx = g_idx.cpu().long()
    wanted = torch.arange(length, device="cpu") // size
    if torch.equal(g_idx, wanted):
        return None
    order = g_idx.argsort(stable=True)
    if not torch.equal(g_idx[order], wanted):
        raise ValueError(f"g_idx does not name {-(length // -size)} groups of {size} columns")
    return order


def _regular(scales, offsets, length, size):
    """Returns scales and offsets of groups as kernels take them: whole ones of a power of 2."""
    if scales.dtype not in FLOAT_DTYPES:
        raise ValueError(f"scales must be float32, float16 or bfloat16, not {scales.dtype}")
    common = math.gcd(size, length)
    least = common & -common
    if least < 32:
        raise ValueError(f"groups of {size} in rows of {length} are not multiples of 32")
    if least == size and scales.shape[1] * size == length:
        return scales.contiguous(), offsets.contiguous()
    groups = torch.arange(0, length, least, device=scales.device) // size
    return scales.index_select(1, groups), offsets.index_select(1, groups)


def _group_size(length, groups, size):
    """Returns the size of a number of groups of a row: the configuration's if it makes so many, or all alike."""
    if not isinstance(size, int):
        raise ValueError(f"group_size must be an integer, not {size!r}")
    size = length if size == -1 else size
    if size > 0 and -(length // -size) == groups:
        return size
    if groups < 1 or length % groups:
        raise ValueError(f"{groups} groups of {size} do not make rows of {length}")
    return length // groups


def _bits(all_bits, count, known):
    bits, rest = divmod(all_bits, max(count, 1))
    if rest or bits not in known:
        raise ValueError(f"{all_bits} bits are not {count} integers of {', '.join(map(str, known))} bits")
    return bits


def _two(tensor, name):
    if tensor.dim() != 2:
        raise ValueError(f"{name} {list(tensor.shape)} must have 2 dimensions")
    return tensor.shape


def _require_words(dtype=torch.int32, **tensors):
    for name, tensor in tensors.items():
        if tensor.dtype != dtype or tensor.dim() != 2:
            raise ValueError(f"{name} must be {dtype} with 2 dimensions, not {tensor.dtype} {list(tensor.shape)}")
