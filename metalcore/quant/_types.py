"""The types of packed weights, and samples of them: random bytes, with scales of about a thousandth."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["BY_NAME", "BY_NUMBER", "KERNELS", "SCALES", "Type", "packed_sample", "type_of"]


class Type(NamedTuple):
    """A type of tensors in GGUF files.

    Attributes:
        name: GGML's name, as "Q4_K".
        number: GGML's number, as in files.
        block: the number of weights that are packed together.
        nbytes: the bytes of a block.

    Example:
        >>> metalcore.quant.type_of("Q4_K")
        Type(name='Q4_K', number=12, block=256, nbytes=144)
    """

    name: str
    number: int
    block: int
    nbytes: int


# Source: github.com/ggml-org/ggml, include/ggml.h and src/ggml-common.h.
_ALL = """F32 0 1 4, F16 1 1 2, Q4_0 2 32 18, Q4_1 3 32 20, Q5_0 6 32 22, Q5_1 7 32 24, Q8_0 8 32 34, Q8_1 9 32 36,
Q2_K 10 256 84, Q3_K 11 256 110, Q4_K 12 256 144, Q5_K 13 256 176, Q6_K 14 256 210, Q8_K 15 256 292,
IQ2_XXS 16 256 66, IQ2_XS 17 256 74, IQ3_XXS 18 256 98, IQ1_S 19 256 50, IQ4_NL 20 32 18, IQ3_S 21 256 110,
IQ2_S 22 256 82, IQ4_XS 23 256 136, I8 24 1 1, I16 25 1 2, I32 26 1 4, I64 27 1 8, F64 28 1 8, IQ1_M 29 256 56,
BF16 30 1 2, TQ1_0 34 256 54, TQ2_0 35 256 66, MXFP4 39 32 17"""

BY_NAME: dict[str, Type] = {}
for _entry in _ALL.split(","):
    _name, *_numbers = _entry.split()
    BY_NAME[_name] = Type(_name, *map(int, _numbers))
BY_NUMBER: dict[int, Type] = {type.number: type for type in BY_NAME.values()}

# The types that have kernels. csrc/ops/quant/formats.cpp has the same.
KERNELS = frozenset("Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL IQ4_XS MXFP4".split())


def type_of(type: Any) -> Type:
    """Finds a type by its name ("Q4_K", in any case), its number, or gguf's GGMLQuantizationType.

    Raises:
        ValueError: there is none.

    Example:
        >>> metalcore.quant.type_of("q8_0").block
        32
    """
    if isinstance(type, Type):
        return type
    if isinstance(type, str):
        match = BY_NAME.get(type.upper())
    else:
        match = BY_NUMBER.get(type) if hasattr(type, "__index__") else None  # a list has no hash
    if match is None:
        raise ValueError(f"GGML has no type {type!r}; it has {', '.join(BY_NAME)}")
    return match


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
    kind = type_of(type)
    shape = (rows, length // kind.block, kind.nbytes)
    numbers = torch.arange(math.prod(shape), device=device) + (seed + 1) * 0x9E3779B9
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):  # a hash of 32 bits (MurmurHash3's last step)
        numbers = ((numbers ^ (numbers >> shift)) * factor) & 0xFFFFFFFF
    blocks = (numbers & 255).to(torch.uint8).view(shape)
    for at in SCALES[kind.name]:
        blocks[..., at + 1] = blocks[..., at + 1] % 4 | 0x14
    if kind.name == "MXFP4":
        blocks[..., 0] = blocks[..., 0] % 4 + 116
    return blocks.flatten(1)
