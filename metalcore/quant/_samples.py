"""Packed weights as random bytes, with scales of about a thousandth."""

from __future__ import annotations

import math

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


def packed_sample(type: str, rows: int, length: int, seed: int = 0, device: torch.device | str = "cpu") -> Tensor:
    """Returns uint8 (rows, bytes of a row of `length` weights). The same seed gives the same bytes on every device, and
    compilers can trace it."""
    known = type_of(type)
    shape = (rows, length // known.block, known.nbytes)
    numbers = torch.arange(math.prod(shape), device=device) + (seed + 1) * 0x9E3779B9
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):  # a hash of 32 bits (MurmurHash3's last step)
        numbers = ((numbers ^ (numbers >> shift)) * factor) & 0xFFFFFFFF
    blocks = (numbers & 255).to(torch.uint8).view(shape)
    for at in SCALES[known.name]:
        blocks[..., at + 1] = blocks[..., at + 1] % 4 | 0x14
    if known.name == "MXFP4":
        blocks[..., 0] = blocks[..., 0] % 4 + 116
    return blocks.flatten(1)
