"""Numbers are packed in 8 or 4 bits with scales."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._core.operators import cpu_kernel, fake_kernel, ops
from .._core.registry import Op, Sample, register
from .._core.routing import FLOAT_DTYPES, require_tensors
from ._scaled_weight import ScaledWeight, block_sides, scaled_format, spread_scales

__all__ = [
    "quantize_scaled",
]


def quantize_scaled(
    tensor: Tensor, format: str, block: Sequence[int] | None = None, rounding: str = "floor"
) -> ScaledWeight:
    """Packs numbers in 8 or 4 bits: each is divided by its scale, rounded to the nearest, halves to even, and where it
    is beyond the largest becomes that ("saturation" in the formats' specifications).

    Args:
        tensor: floating-point, (rows, numbers of a row), where 32 divides the numbers of a row.
        format, block: as ScaledWeight has them. A scale of "e4m3" and "e5m2" is the largest absolute number of its
            block over the format's largest. A block is (1, 0), a row, by default.
        rounding: how a power of 2 becomes the scale of formats that begin with "mx". "floor" is the rule of the
            Microscaling specification: 2 to the power of floor(log2(largest number)) - floor(log2(format's largest)),
            so that numbers may be beyond the format's largest. "ceil" is the least power of 2 for which none is.
            "even" is as "floor", for the largest number rounded to the format's precision.

    Returns:
        A ScaledWeight. Of "nvfp4" it has a factor, with which the largest scale is E4M3's largest, 448. The scale of
        blocks with numbers that are NaN or infinite is NaN, in the formats that begin with "mx".

    Raises:
        TypeError: tensor is no tensor of floating-point numbers.
        RuntimeError: there is no such format, block or rounding, or 32 does not divide the rows.

    Example:
        >>> metalcore.quantize_scaled(torch.ones(4, 64, device="mps"), "nvfp4").packed.shape
        torch.Size([4, 32])
    """
    require_tensors("quantize_scaled", tensor=tensor)
    if not tensor.is_floating_point():
        raise TypeError(f"quantize_scaled: tensor must be floating-point numbers, not {tensor.dtype}")
    numbers = tensor.detach()
    numbers = numbers if numbers.dtype in FLOAT_DTYPES else numbers.float()
    of = scaled_format(format)
    if numbers.dim() != 2 or numbers.shape[1] % 32:
        raise RuntimeError(f"quantize_scaled: 32 does not divide rows of shape {tuple(numbers.shape)}")
    scales = factor = None
    sides = () if of.of_scale else (1, 0) if block is None else tuple(block)
    if block is not None and of.of_scale and tuple(block) != (1, of.of_scale):
        raise RuntimeError(f"quantize_scaled: {format} has blocks of its own, and no {tuple(block)}")
    if not of.of_scale:
        scales = _over(_largest(numbers, block_sides(format, sides)).float(), of.largest)
        scales = torch.where(scales == 0, torch.ones_like(scales), scales)
    elif format == "nvfp4":
        factor = _over(_largest(numbers, (0, 0)).float().view(-1), 448.0 * 6.0)
        factor = torch.where(factor == 0, torch.ones_like(factor), factor) if factor.numel() else factor.new_ones(1)
    packed, made = ops.scaled_quantize(numbers, scales, factor, format, sides, rounding)
    return ScaledWeight(packed, made if scales is None else scales, format, sides, factor)


def _over(numbers, divisor):
    """Returns quotients, rounded once. Of a number PyTorch's operator takes the reciprocal on some devices."""
    return numbers / torch.full_like(numbers, divisor)


def _largest(numbers, sides):
    """Returns the largest absolute value of each block."""
    rows, length = numbers.shape
    high, wide = (side or max(size, 1) for side, size in zip(sides, numbers.shape))
    padded = torch.nn.functional.pad(numbers, (0, -length % wide, 0, -rows % high))
    blocks = padded.view(padded.shape[0] // high, high, padded.shape[1] // wide, wide)
    return torch.maximum(blocks.amax((1, 3)), -blocks.amin((1, 3)))


def _encode(values, of):
    if of.numbers:
        return values.clamp(-of.largest, of.largest).to(of.numbers).view(torch.uint8)
    size = values.abs()
    codes = sum((size > tie).to(torch.uint8) for tie in (0.25, 1.25, 2.5, 5.0))
    codes = sum(((size >= tie).to(torch.uint8) for tie in (0.75, 1.75, 3.5)), codes)
    codes = (codes | values.signbit().to(torch.uint8) << 3).unflatten(-1, (-1, 2))
    return codes[..., 0] | codes[..., 1] << 4


def _powers(largest, of, rounding):
    """Returns the scales of E8M0 for blocks with these largest numbers."""
    bits = largest.view(torch.int32)
    top = int(torch.tensor(of.largest).view(torch.int32))
    fraction = {torch.float8_e4m3fn: 3, torch.float8_e5m2: 2, None: 1}[of.numbers]
    raised = bits + {"floor": 0, "ceil": 0x7FFFFF - (top & 0x7FFFFF), "even": 1 << (22 - fraction)}[rounding]
    powers = ((raised >> 23) - ((top >> 23) - 127)).clamp(min=0)
    return torch.where(bits >= 0x7F800000, 255, powers).to(torch.uint8)


@cpu_kernel("scaled_quantize")
def _(numbers, scales, factor, format, block, rounding):
    of, x = scaled_format(format), numbers.float()
    if rounding not in ("floor", "ceil", "even"):
        raise RuntimeError(f"scaled_quantize: rounding must be floor, ceil or even, not {rounding}")
    if scales is not None:
        divided = x / spread_scales(scales, x.shape, block_sides(format, block))
        return _encode(divided, of), x.new_empty(0, 0, dtype=torch.uint8)
    blocks = x.unflatten(-1, (-1, of.of_scale))
    largest = blocks.abs().amax(-1) if x.numel() else x.new_empty(blocks.shape[:-1])
    if format != "nvfp4":
        powers = _powers(largest, of, rounding)
        divided = blocks / powers.view(torch.float8_e8m0fnu).float()[..., None]
        return _encode(torch.where((powers == 255)[..., None], 0.0, divided).flatten(-2), of), powers
    factor = x.new_ones(1) if factor is None else factor
    made = (largest / 6.0 / factor).clamp(max=448.0).to(torch.float8_e4m3fn)
    divisor = (made.float() * factor)[..., None]
    divided = torch.where(divisor > 0, blocks / divisor, 0.0)
    return _encode(divided.flatten(-2), of), made.view(torch.uint8)


@fake_kernel("scaled_quantize")
def _(numbers, scales, factor, format, block, rounding):
    of = scaled_format(format)
    rows, length = numbers.shape
    packed = numbers.new_empty([rows, length * of.bits // 8], dtype=torch.uint8)
    made = [0, 0] if scales is not None else [rows, length // of.of_scale]
    return packed, numbers.new_empty(made, dtype=torch.uint8)


register(
    Op(
        "quantize_scaled",
        quantize_scaled,
        # Whether a number is rounded up or down may depend on the last bit of a scale.
        reference=lambda tensor, format, block: tensor.abs().amax(1, keepdim=True) / 448.0,
        results=lambda returned: [returned.scales if isinstance(returned, ScaledWeight) else returned],
        operators=("scaled_quantize",),
        samples=lambda: (Sample("rows", ((3, 320),), {"format": "e4m3", "block": (1, 0)}),),
        backward=False,
    )
)
