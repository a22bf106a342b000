"""How PyTorch's operator `_scaled_mm_v2` lays the scales of a matrix out, which its recipes name.

Source: github.com/pytorch/pytorch, aten/src/ATen/native/cuda/ScaledBlas.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["EIGHT_BITS", "FOUR_BITS", "Operand", "operand_of", "rows_of_bytes"]

EIGHT_BITS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
FOUR_BITS = getattr(torch, "float4_e2m1fn_x2", None)  # two numbers in an element

# torch.nn.functional.ScalingType's numbers.
_TENSOR, _ROW, _ROW_16, _ROW_32, _ROW_128, _SQUARE_128 = range(6)
_SWIZZLED = 1  # torch.nn.functional.SwizzleType.SWIZZLE_32_4_4


class Operand(NamedTuple):
    """A matrix as kernels take it: rows of bytes, of a multiple of 32 numbers each."""

    packed: Tensor
    scales: Tensor
    format: str
    block: tuple[int, ...]
    factor: Tensor | None = None


def rows_of_bytes(matrix: Tensor) -> Tensor:
    """Returns the bytes of a matrix of 8-bit numbers, with zeros behind each row up to a multiple of 32."""
    packed = matrix.contiguous().view(torch.uint8)
    return torch.nn.functional.pad(packed, (0, -matrix.shape[1] % 32)) if matrix.shape[1] % 32 else packed


def operand_of(
    matrix: Tensor, scales: Sequence[Tensor], recipe: Sequence[int], swizzle: Sequence[int], is_right: bool
) -> Operand | None:
    """Returns an operand, or None where kernels or this reading of the layout do not take it.

    Args:
        matrix: rows of K numbers. The right matrix is given transposed.
        scales, recipe, swizzle: as the operator has them.
        is_right: whether it is the right matrix.
    """
    if matrix.dim() != 2 or matrix.numel() == 0 or len(scales) != len(recipe) or not scales:
        return None
    swizzled = list(swizzle)[:1] == [_SWIZZLED]
    if any(swizzle[1:]) or list(swizzle)[:1] not in ([], [0], [_SWIZZLED]):
        return None
    rows, length = matrix.shape
    if matrix.dtype == FOUR_BITS:
        return _four_bits(matrix, rows, 2 * length, scales, list(recipe), swizzled)
    if matrix.dtype not in EIGHT_BITS or len(scales) != 1:
        return None
    (scale,), kind, format = scales, recipe[0], EIGHT_BITS[matrix.dtype]
    if kind == _ROW_32:
        grid = _grid(scale, torch.float8_e8m0fnu, rows, length // 32, swizzled)
        form = {"e4m3": "mxfp8", "e5m2": "mxfp8_e5m2"}[format]
        return None if grid is None or length % 32 else Operand(rows_of_bytes(matrix), grid, form, ())
    parts, groups = -(length // -128), -(rows // -128)
    grid, block = None, (0, 0)
    if swizzled or scale.dtype != torch.float32:
        return None
    if kind == _TENSOR and scale.numel() == 1:
        grid = scale.view(1, 1)
    elif kind == _ROW and scale.shape == ((1, rows) if is_right else (rows, 1)):
        grid, block = scale.reshape(rows, 1), (1, 0)
    elif kind == _ROW_128 and scale.shape == (rows, parts):
        grid, block = scale, (1, 128)
    elif kind == _SQUARE_128 and scale.shape in ((parts, groups), (-(parts // -4) * 4, groups)):  # K comes first
        grid, block = scale[:parts].T, (128, 128)
    return None if grid is None else Operand(rows_of_bytes(matrix), grid.contiguous(), format, block)


def _four_bits(matrix, rows, length, scales, recipe, swizzled):
    factor = None
    if recipe == [_ROW_32]:
        dtype, each, format = torch.float8_e8m0fnu, 32, "mxfp4"
    elif recipe in ([_ROW_16], [_ROW_16, _TENSOR]):
        dtype, each, format = torch.float8_e4m3fn, 16, "nvfp4"
        if len(scales) == 2:
            factor = scales[1]
            if factor.dtype != torch.float32 or factor.numel() != 1:
                return None
    else:
        return None
    grid = _grid(scales[0], dtype, rows, length // each, swizzled)
    if grid is None or length % 32:
        return None
    return Operand(matrix.contiguous().view(torch.uint8), grid, format, (), None if factor is None else factor.view(1))


def _grid(scale, dtype, rows, columns, swizzled):
    """Returns the bytes of scales in rows, or None. Swizzled ones are blocks of 128 rows and 4 columns, in which 32
    rows follow each other, each with 4 columns of 4 rows."""
    if scale.dtype != dtype:
        return None
    scale = scale.contiguous().view(torch.uint8)
    if not swizzled:
        return scale if scale.shape == (rows, columns) else None
    down, across = -(rows // -128), -(columns // -4)
    if scale.numel() != down * across * 512:
        return None
    blocks = scale.view(down, across, 32, 4, 4).permute(0, 3, 2, 1, 4)
    return blocks.reshape(down * 128, across * 4)[:rows, :columns].contiguous()
