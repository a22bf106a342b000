"""Packed weights as random bytes, with scales of about a thousandth."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ._types import type_of

__all__ = ["SCALES", "packed_sample"]

# The bytes of a block at which its float16 factors begin. MXFP4 has an exponent in its first byte.
SCALES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "MXFP4": (),
}


@functools.lru_cache(maxsize=64)
def packed_sample(type: str, rows: int, length: int, seed: int = 0, device: torch.device | str = "cpu") -> Tensor:
    """uint8 (rows, bytes of a row of `length` weights). The same seed gives the same bytes."""
    known = type_of(type)
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, length // known.block, known.nbytes)
    blocks = torch.randint(256, shape, dtype=torch.uint8, generator=generator, device="cpu")
    for at in SCALES[known.name]:
        blocks[..., at + 1] = blocks[..., at + 1] % 4 | 0x14
    if known.name == "MXFP4":
        blocks[..., 0] = blocks[..., 0] % 4 + 116
    return blocks.flatten(1).to(device)
