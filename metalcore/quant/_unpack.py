"""Packed weights as float32, by PyTorch's ops: for CPU tensors, and the reference of the kernels.

Types that have no kernels are for the package `gguf`. kernels/quant/formats.h describes the layouts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._types import KERNELS, Type

__all__ = ["NONLINEAR", "unpack"]


def unpack(packed: Tensor, type: Type) -> Tensor:
    """Returns uint8 (*, bytes of a row) as float32 (*, weights of a row), bit for bit as gguf-py."""
    shape = (*packed.shape[:-1], packed.shape[-1] // type.nbytes * type.block)
    if packed.numel() == 0:
        return torch.empty(shape, device=packed.device)
    if type.name not in KERNELS:
        return _by_gguf(packed, type)
    return _UNPACK[type.name](packed.reshape(-1, type.nbytes)).reshape(shape)


def _by_gguf(packed, type):
    if type.name in _PLAIN:
        return packed.contiguous().view(_PLAIN[type.name]).float()
    try:
        from gguf import GGMLQuantizationType, quants
    except ImportError:
        raise RuntimeError(f"{type.name} needs the package gguf: pip install 'metalcore[gguf]'") from None
    numbers = quants.dequantize(packed.cpu().contiguous().numpy(), GGMLQuantizationType(type.number))
    return torch.from_numpy(numbers).to(packed.device)


_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}


def _half(blocks, at):
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _signed(bytes):
    return bytes.contiguous().view(torch.int8).float()


def _shifted(bytes, *shifts, mask):
    """Returns (blocks, groups, bytes) as (blocks, groups, shifts, bytes): the bits of each byte from each shift on."""
    return torch.stack([(bytes >> shift) & mask for shift in shifts], -2)


def _nibbles(bytes, group=16):
    return _shifted(bytes.reshape(len(bytes), -1, group), 0, 4, mask=15).flatten(1)


def _fifth(bytes):
    """Returns four bytes as 32 bits, the lowest first, in the place of a fifth bit."""
    return torch.stack([(bytes >> shift) & 1 for shift in range(8)], -1).flatten(1) << 4


NONLINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # doubled


def _looked_up(nibbles, table):
    return torch.tensor(table, dtype=torch.float32, device=nibbles.device)[nibbles.long()]


def _q2_k(b):
    scales = b[:, :16]
    q = _shifted(b[:, 16:80].reshape(-1, 2, 32), 0, 2, 4, 6, mask=3).reshape(-1, 16, 16).float()
    scale, minimum = _half(b, 80) * (scales & 15).float(), _half(b, 82) * (scales >> 4).float()
    return scale[..., None] * q - minimum[..., None]


def _q3_k(b):
    scales = _shifted(b[:, None, 96:104], 0, 4, mask=15).flatten(1)
    scales = scales | _shifted(b[:, None, 104:108], 0, 2, 4, 6, mask=3).flatten(1) << 4
    low = _shifted(b[:, 32:96].reshape(-1, 2, 32), 0, 2, 4, 6, mask=3).flatten(1)
    high = _shifted(b[:, None, :32], *range(8), mask=1).flatten(1)
    q = ((low | high << 2).float() - 4).reshape(-1, 16, 16)
    return (_half(b, 108) * (scales.float() - 32))[..., None] * q


def _scales_and_minima(b):
    """Returns the eight scales and minima of Q4_K and Q5_K."""
    d, m, both = b[:, 4:8], b[:, 8:12], b[:, 12:16]
    scales = torch.cat([d & 63, (both & 15) | ((d >> 2) & 48)], -1)
    minima = torch.cat([m & 63, (both >> 4) | ((m >> 2) & 48)], -1)
    return (_half(b, 0) * scales.float())[..., None], (_half(b, 2) * minima.float())[..., None]


def _q4_k(b):
    scale, minimum = _scales_and_minima(b)
    return scale * _nibbles(b[:, 16:], 32).reshape(-1, 8, 32).float() - minimum


def _q5_k(b):
    scale, minimum = _scales_and_minima(b)
    fifth = _shifted(b[:, None, 16:48], *range(8), mask=1).flatten(1) << 4
    return scale * (_nibbles(b[:, 48:], 32) | fifth).reshape(-1, 8, 32).float() - minimum


def _q6_k(b):
    low = _nibbles(b[:, :128], 64)
    high = _shifted(b[:, 128:192].reshape(-1, 2, 32), 0, 2, 4, 6, mask=3).flatten(1)
    q = ((low | high << 4).float() - 32).reshape(-1, 16, 16)
    return (_half(b, 208) * _signed(b[:, 192:208]))[..., None] * q


def _iq4_xs(b):
    low = _shifted(b[:, 4:8, None], 0, 4, mask=15).flatten(1)
    high = _shifted(b[:, 2:4, None], 0, 2, 4, 6, mask=3).flatten(1)
    scale = _half(b, 0) * ((low | high << 4).float() - 32)
    return scale[..., None] * _looked_up(_nibbles(b[:, 8:]), NONLINEAR).reshape(-1, 8, 32)


def _mxfp4(b):
    e = b[:, :1].int()
    scale = torch.where(e < 2, 0x00200000 << e, (e - 1) << 23).view(torch.float32)
    return scale * _looked_up(_nibbles(b[:, 1:]), _E2M1)


_UNPACK = {
    "Q4_0": lambda b: _half(b, 0) * (_nibbles(b[:, 2:]).float() - 8),
    "Q4_1": lambda b: _half(b, 0) * _nibbles(b[:, 4:]).float() + _half(b, 2),
    "Q5_0": lambda b: _half(b, 0) * ((_nibbles(b[:, 6:]) | _fifth(b[:, 2:6])).float() - 16),
    "Q5_1": lambda b: _half(b, 0) * (_nibbles(b[:, 8:]) | _fifth(b[:, 4:8])).float() + _half(b, 2),
    "Q8_0": lambda b: _half(b, 0) * _signed(b[:, 2:]),
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": lambda b: _half(b, 0) * _looked_up(_nibbles(b[:, 2:]), NONLINEAR),
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}
