"""Numbers in blocks that share a scale: in 4 bits (NF4, FP4) or in 8 bits, as bitsandbytes has them.

Blocks are of consecutive numbers, whatever the shape. Packed numbers, scales and tables are those of bitsandbytes, so
that either library reads what the other has packed.

Sources: Dettmers, Pagnoni, Holtzman and Zettlemoyer, "QLoRA: Efficient Finetuning of Quantized LLMs", 2023; Dettmers,
Lewis, Shleifer and Zettlemoyer, "8-bit Optimizers via Block-wise Quantization", 2022.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["BLOCK_SIZES", "SCALE_BLOCK", "TABLES", "dynamic_code", "pack_blocks", "table_of", "unpack_blocks"]

BLOCK_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
SCALE_BLOCK = 256  # scales in 8 bits are packed in blocks of this size

_LEAST = 1e-38  # the least scale by which numbers are divided

# What the indices of four bits stand for. NF4 has quantiles of a normal distribution; FP4 a sign, and one of eight
# numbers.
_EIGHT = [x / 12 for x in (0, 0.0625, 8, 12, 4, 6, 2, 3)]
TABLES = {
    "nf4": [
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ],
    "fp4": _EIGHT + [0.0 - x for x in _EIGHT],
}
_SORTED = {"fp4": [11, 10, 13, 12, 15, 14, 9, 0, 8, 1, 6, 7, 4, 5, 2, 3]}  # the indices in the order of their values


def table_of(type: str, device: torch.device) -> Tensor:
    """Returns the 16 numbers of a type of 4 bits, float32."""
    return torch.tensor(TABLES[type], device=device)


def dynamic_code(device: torch.device, signed: bool = True) -> Tensor:
    """Returns the 256 numbers of dynamic quantization, float32, sorted: a sign where `signed`, an exponent of 10 as
    zeros before the first 1, and a linear fraction in the bits that remain."""
    return torch.tensor(_DYNAMIC[signed], device=device)


def _dynamic_numbers(signed):
    numbers = [0.0, 1.0]
    for exponent in range(7):
        ends = torch.linspace(0.1, 1, 2 ** (exponent + (not signed)) + 1, dtype=torch.float32, device="cpu")
        means = 10.0 ** (exponent - 6) * ((ends[:-1] + ends[1:]) / 2)
        numbers += [*means.tolist(), *(-means).tolist()] if signed else means.tolist()
    return sorted(numbers)


_DYNAMIC = {signed: _dynamic_numbers(signed) for signed in (True, False)}  # a compiler cannot trace what makes them


def pack_blocks(numbers: Tensor, type: str, block_size: int, code: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Returns packed numbers, uint8, flat, and the scales of their blocks, by PyTorch's ops.

    Args:
        type: "nf4", "fp4", or "code", the 8-bit table `code`.
    """
    table = code if code is not None else table_of(type, numbers.device)
    order = _SORTED.get(type)
    order = None if order is None else torch.tensor(order, device=numbers.device)
    flat = numbers.reshape(-1).float()
    blocks = flat[: len(flat) // block_size * block_size].view(-1, block_size)
    absmax = blocks.abs().amax(1)
    scaled = (blocks * (1 / absmax.clamp(min=_LEAST))[:, None]).view(-1)
    last = flat[len(scaled) :]
    if len(last):  # the last block may be shorter, and is divided
        scale = last.abs().amax().clamp(min=_LEAST)
        absmax, scaled = torch.cat([absmax, scale[None]]), torch.cat([scaled, last / scale])
    if code is None and len(scaled) % 2:
        scaled = torch.nn.functional.pad(scaled, (0, 1))
    values = table if order is None else table[order]
    places = torch.bucketize(scaled, (values[:-1] + values[1:]) / 2)
    indices = (places if order is None else order[places]).to(torch.uint8)
    return (indices if code is not None else indices[::2] << 4 | indices[1::2]), absmax


def unpack_blocks(
    packed: Tensor, absmax: Tensor, type: str, block_size: int, code: Tensor | None, shape: Sequence[int]
) -> Tensor:
    """Returns the packed numbers, float32, by PyTorch's ops."""
    flat = packed.reshape(-1)
    if code is None:
        code, flat = table_of(type, packed.device), torch.stack([flat >> 4, flat & 15], 1).view(-1)
    numbers = code[flat.long()][: math.prod(shape)]
    return (numbers * absmax.repeat_interleave(block_size)[: len(numbers)]).view(*shape)
