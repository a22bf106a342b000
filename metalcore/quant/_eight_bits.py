"""Numbers of 8 bits in blocks, and what all numbers in blocks share: their packing and unpacking."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .._core.operators import cpu_kernel, fake_kernel, ops
from .._core.registry import Op, Sample, register
from .._core.routing import FLOAT_DTYPES, require_tensors
from ._blockwise import BLOCK_SIZES, SCALE_BLOCK, dynamic_code, pack_blocks, unpack_blocks

__all__ = [
    "dequantize_8bit",
    "even_code",
    "quantize_8bit",
    "quantized_blocks",
    "require_dtype",
    "sample_bytes",
    "sample_scales",
    "unpacked_scales",
]


def quantize_8bit(tensor: Tensor, code: Tensor | None = None, block_size: int = 256) -> tuple[Tensor, Tensor]:
    """Packs numbers in 8 bits: indices of the nearest entries of a table, times a scale for each block.

    Args:
        tensor: float32, float16 or bfloat16, of any shape.
        code: 256 numbers from -1 to 1, sorted, float32; None is bitsandbytes' signed dynamic table.
        block_size: 32, 64, 128 … 4096.

    Returns:
        packed: uint8, of the tensor's shape.
        absmax: the largest absolute value of each block of consecutive numbers, float32.

    Raises:
        ValueError: block_size is another.
        TypeError: tensor is no tensor of these dtypes.

    Example:
        >>> packed, absmax = metalcore.quantize_8bit(torch.tensor([2.0, -1.0, 0.0], device="mps"))
        >>> packed.tolist(), absmax.tolist()
        ([255, 35, 127], [2.0])
    """
    require_tensors("quantize_8bit", tensor=tensor)
    code = _code_of("quantize_8bit", code, tensor.device)
    packed, absmax = quantized_blocks("quantize_8bit", tensor, "code", block_size, code)
    return packed.view(tensor.shape), absmax


def dequantize_8bit(
    packed: Tensor,
    absmax: Tensor,
    code: Tensor | None = None,
    block_size: int = 256,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Returns packed numbers of 8 bits as numbers.

    Args:
        packed, absmax, code, block_size: as quantize_8bit has them.
        dtype: of the result. Numbers are rounded once, from float32.

    Returns:
        a tensor of packed's shape. It has no derivative.

    Raises:
        TypeError: packed or absmax is no tensor, or dtype no torch.dtype of float32, float16 or bfloat16.
        RuntimeError: absmax has another size than the blocks need.

    Example:
        >>> packed, absmax = metalcore.quantize_8bit(torch.tensor([2.0, 0.0], device="mps"))
        >>> metalcore.dequantize_8bit(packed, absmax).tolist()
        [2.0, 0.0]
    """
    require_tensors("dequantize_8bit", packed=packed, absmax=absmax)
    dtype = require_dtype("dequantize_8bit", dtype)
    code = _code_of("dequantize_8bit", code, packed.device)
    return ops.dequantize_blockwise(
        packed, absmax, None, None, None, "code", block_size, code, list(packed.shape), dtype
    )


def quantized_blocks(op: str, tensor: Tensor, type: str, block_size: int, code: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns packed numbers and the scales of their blocks, or refuses an argument of `op`."""
    require_tensors(op, tensor=tensor)
    if tensor.dtype not in FLOAT_DTYPES:
        raise TypeError(f"{op}: tensor must be float32, float16 or bfloat16, not {tensor.dtype}")
    if not isinstance(block_size, int) or block_size not in BLOCK_SIZES:
        raise ValueError(f"{op}: block_size must be one of {', '.join(map(str, BLOCK_SIZES))}, not {block_size}")
    return ops.quantize_blockwise(tensor.detach(), type, block_size, code)


def _code_of(op, code, device):
    require_tensors(op, optional=True, code=code)
    return dynamic_code(device) if code is None else code


def require_dtype(op: str, dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of a result of `op`, or refuses it."""
    if not isinstance(dtype, torch.dtype) or dtype not in FLOAT_DTYPES:
        raise TypeError(f"{op}: dtype must be torch.float32, torch.float16 or torch.bfloat16, not {dtype}")
    return dtype


@cpu_kernel("quantize_blockwise")
def _(numbers, type, block_size, code):
    return pack_blocks(numbers, type, block_size, code)


@fake_kernel("quantize_blockwise")
def _(numbers, type, block_size, code):
    count = numbers.numel()
    packed = numbers.new_empty([count if type == "code" else (count + 1) // 2], dtype=torch.uint8)
    return packed, numbers.new_empty([-(count // -block_size)], dtype=torch.float32)


@cpu_kernel("dequantize_blockwise")
def _(packed, absmax, scales, scales_code, offset, type, block_size, code, shape, dtype):
    absmax = unpacked_scales(absmax, scales, scales_code, offset)
    count = math.prod(shape)
    if packed.numel() != (count if type == "code" else (count + 1) // 2):
        raise RuntimeError(f"dequantize_blockwise: {packed.numel()} bytes are not {count} numbers of type {type!r}")
    if absmax.numel() != -(count // -block_size):
        raise RuntimeError(
            f"dequantize_blockwise: absmax must have {-(count // -block_size)} elements, not {absmax.numel()}"
        )
    return unpack_blocks(packed, absmax, type, block_size, code, shape).to(dtype)


def unpacked_scales(absmax: Tensor, scales: Tensor | None, code: Tensor | None, offset: Tensor | None) -> Tensor:
    """Returns the scales of blocks, which may have 8 bits themselves."""
    if scales is None:
        return absmax
    numbers = unpack_blocks(scales, absmax, "code", SCALE_BLOCK, code, scales.shape)
    return numbers if offset is None else numbers + offset


@fake_kernel("dequantize_blockwise")
def _(packed, absmax, scales, scales_code, offset, type, block_size, code, shape, dtype):
    return packed.new_empty(shape, dtype=dtype)


register(
    Op(
        "quantize_8bit",
        quantize_8bit,
        reference=lambda tensor, code: pack_blocks(tensor, "code", 256, code),
        operators=("quantize_blockwise",),
        samples=lambda: (Sample("rows", ((7, 333),), arguments=lambda x: (x, even_code(x.device))),),
        backward=False,
    )
)
register(
    Op(
        "dequantize_8bit",
        dequantize_8bit,
        reference=lambda packed, absmax, code: unpack_blocks(packed, absmax, "code", 256, code, packed.shape),
        operators=("dequantize_blockwise",),
        samples=lambda: (Sample("rows", ((1,),), arguments=_eight_bits_sample),),
        backward=False,
    )
)


def even_code(device: torch.device | str) -> Tensor:
    """Returns a table of 256 numbers for samples, the same on every device."""
    return torch.linspace(-1, 1, 256, device=device)


def sample_bytes(count: int, device: torch.device | str) -> Tensor:
    """Returns packed numbers, the same on every device."""
    numbers = torch.arange(count, device=device)
    return ((numbers * 167 + numbers // 16 * 53 + 11) & 255).to(torch.uint8)


def sample_scales(count: int, device: torch.device | str) -> Tensor:
    """Returns scales of blocks, the same on every device."""
    return torch.arange(count, device=device) % 7 / 8 + 0.5


def _eight_bits_sample(x):
    return sample_bytes(7 * 333, x.device).view(7, 333), sample_scales(10, x.device), even_code(x.device)
