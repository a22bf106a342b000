"""Floating-point numbers of 8 and 4 bits with scales on a grid: their formats, and what they stand for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .._core.routing import FLOAT_DTYPES

__all__ = [
    "FORMATS",
    "ScaledWeight",
    "block_sides",
    "require_scaled",
    "require_scaled_weight",
    "scaled_format",
    "scaled_numbers",
    "scaled_sample",
    "scales_shape",
    "spread_scales",
    "unpack_scaled",
]

_SLICE = 32


class _Format(NamedTuple):
    """The dtype of numbers, or None for E2M1; the dtype of scales; and how many numbers of a row share one, or 0 where
    a block says it."""

    numbers: torch.dtype | None
    scales: torch.dtype
    of_scale: int

    @property
    def bits(self) -> int:
        return 8 if self.numbers else 4

    @property
    def largest(self) -> float:
        return torch.finfo(self.numbers).max if self.numbers else 6.0


FORMATS: dict[str, _Format] = {
    "e4m3": _Format(torch.float8_e4m3fn, torch.float32, 0),
    "e5m2": _Format(torch.float8_e5m2, torch.float32, 0),
    "mxfp8": _Format(torch.float8_e4m3fn, torch.float8_e8m0fnu, 32),
    "mxfp8_e5m2": _Format(torch.float8_e5m2, torch.float8_e8m0fnu, 32),
    "mxfp4": _Format(None, torch.float8_e8m0fnu, 32),
    "nvfp4": _Format(None, torch.float8_e4m3fn, 16),
}
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class ScaledWeight(NamedTuple):
    """Numbers of 8 or 4 bits with their scales.

    Args:
        packed: uint8, (*, rows, bytes of a row): the bits of float8_e4m3fn or float8_e5m2, or of two numbers of E2M1,
            of which the first is the lower half of a byte. A row has a multiple of 32 numbers.
        scales: float32 (*, rows of scales, scales of a row) for "e4m3" and "e5m2". For the other formats uint8: the
            bits of float8_e8m0fnu for each 32 numbers of a row, or for "nvfp4" of float8_e4m3fn for each 16.
        format: "e4m3", "e5m2", "mxfp8" (of E4M3), "mxfp8_e5m2", "mxfp4" or "nvfp4".
        block: for "e4m3" and "e5m2" the rows, and the numbers of a row, that share a scale: powers of 2, at least 32
            in a row, or 0 for all. (0, 0) is one scale for all, (1, 0) one for each row, (128, 128) DeepSeek's.
        factor: float32, one number (of each matrix) that all scales are multiplied by, or None.

    Example:
        >>> ones = torch.full((1, 32), 0x38, dtype=torch.uint8, device="mps")  # of E4M3
        >>> weight = metalcore.quant.ScaledWeight(ones, torch.full((1, 1), 0.5, device="mps"), "e4m3", (1, 0))
        >>> metalcore.dequantize_scaled(weight)[0, 0].item()
        0.5
    """

    packed: Tensor
    scales: Tensor
    format: str
    block: tuple[int, ...] = ()
    factor: Tensor | None = None


def require_scaled_weight(op, weight, dtype=torch.float32):
    if not isinstance(weight, ScaledWeight):
        raise TypeError(f"{op}: weight must be a metalcore.quant.ScaledWeight, not a {type(weight).__name__}")
    if not isinstance(dtype, torch.dtype) or dtype not in FLOAT_DTYPES:
        raise TypeError(f"{op}: dtype must be torch.float32, torch.float16 or torch.bfloat16, not {dtype}")


def scaled_format(name):
    if name not in FORMATS:
        raise RuntimeError(f"format must be one of {', '.join(FORMATS)}, not {name!r}")
    return FORMATS[name]


def block_sides(name, block):
    """Returns the rows, and the numbers of a row, of a block."""
    of = scaled_format(name)
    if of.of_scale:
        return 1, of.of_scale
    if len(block) != 2 or any(side < 0 or side & (side - 1) for side in block) or 0 < block[1] < _SLICE:
        raise RuntimeError(f"block must have sides of 0 (all) or powers of 2, at least 32 in a row, not {block}")
    return tuple(block)


def scales_shape(rows, length, sides):
    return [-(size // -side) if side else int(size > 0) for size, side in zip((rows, length), sides)]


def require_scaled(
    packed: Tensor, scales: Tensor, factor: Tensor | None, format: str, block: Sequence[int], dims: int = 2
) -> int:
    """Refuses what kernels refuse, and returns how many numbers a row has."""
    of = scaled_format(format)
    if packed.dtype != torch.uint8 or packed.dim() != dims:
        raise RuntimeError(f"packed must be uint8 with {dims} dimensions, not {packed.dtype} {list(packed.shape)}")
    length = packed.shape[-1] * 8 // of.bits
    if length % _SLICE:
        raise RuntimeError(f"rows of {length} numbers are no multiples of 32")
    shape = [*packed.shape[:-2], *scales_shape(packed.shape[-2], length, block_sides(format, block))]
    wanted = torch.float32 if of.scales is torch.float32 else torch.uint8
    if list(scales.shape) != shape or scales.dtype != wanted:
        raise RuntimeError(f"scales must be {wanted} {shape}, and are {scales.dtype} {list(scales.shape)}")
    matrices = packed.shape[0] if dims == 3 else 1
    if factor is not None and (factor.dtype != torch.float32 or factor.numel() != matrices):
        raise RuntimeError(f"factor must be float32 with {matrices} elements, not {factor.dtype} {list(factor.shape)}")
    return length


def unpack_scaled(packed: Tensor, scales: Tensor, factor: Tensor | None, format: str, block: Sequence[int]) -> Tensor:
    """Returns the numbers, float32, by PyTorch's ops."""
    of = scaled_format(format)
    if of.numbers is None:
        packed = torch.stack([packed & 15, packed >> 4], -1).view(*packed.shape[:-1], 2 * packed.shape[-1])
    numbers = _values(packed, of.numbers)
    scales = scales if of.scales is torch.float32 else _values(scales, of.scales)
    scales = scales if factor is None else scales * factor
    return numbers * spread_scales(scales, numbers.shape, block_sides(format, block))


def _values(codes, dtype):
    """Returns what bytes stand for. A GPU may not have such dtypes, and gets a table."""
    bytes = torch.arange(256, dtype=torch.uint8, device="cpu")
    table = bytes.view(dtype).float() if dtype else torch.tensor([*_E2M1, *(-value for value in _E2M1)], device="cpu")
    return table.to(codes.device)[codes.int()]


def spread_scales(scales, shape, sides):
    """Returns a scale for each number."""
    for dim, side in zip((0, 1), sides):
        scales = scales.repeat_interleave(side or shape[dim], dim).narrow(dim, 0, shape[dim])
    return scales


def scaled_numbers(weight, dtype=torch.float32):
    return unpack_scaled(weight.packed, weight.scales, weight.factor, weight.format, weight.block).to(dtype)


def scaled_sample(
    format: str, rows: int, length: int, device: torch.device | str, block: tuple[int, int] = (1, 0), matrices: int = 0
) -> ScaledWeight:
    """Returns a weight, the same on every device: all codes that are numbers, with scales around 1/8."""
    of, count = FORMATS[format], (matrices or 1) * rows
    numbers = torch.arange(count * length * of.bits // 8, device=device)
    packed = ((numbers * 167 + numbers // 16 * 53 + 11) & 255).to(torch.uint8)
    if of.bits == 8:  # the largest numbers would hide all others
        packed &= 0xBF
    high, wide = scales_shape(rows, length, block_sides(format, block))
    scales = torch.arange((matrices or 1) * high * wide, device=device) % 7
    leading = (matrices,) if matrices else ()
    if of.scales is torch.float32:
        scales = (scales + 4) / 64
    else:
        scales = (scales + (121 if of.of_scale == 32 else 24)).to(torch.uint8)
    factor = None
    if format == "nvfp4":
        factor = torch.arange(1, (matrices or 1) + 1, device=device) / 2
    sides = () if of.of_scale else block
    return ScaledWeight(packed.view(*leading, rows, -1), scales.view(*leading, high, wide), format, sides, factor)
