"""Packed weights for tests, and gguf's numbers of them."""

import functools

import numpy as np
import pytest
import torch
from references import flushes_subnormals

from metalcore.quant._types import KERNELS, SCALES, packed_sample, type_of

each_type = pytest.mark.parametrize("type", sorted(KERNELS))


def by_gguf(packed, type):
    """float32 (rows, weights), by the package gguf."""
    gguf = pytest.importorskip("gguf")
    with np.errstate(all="ignore"):
        numbers = gguf.quants.dequantize(packed.numpy(), gguf.GGMLQuantizationType(type_of(type).number))
    return torch.from_numpy(numbers)


@functools.lru_cache(maxsize=64)
def unusual(type, rows=6, length=512):
    """Blocks that no quantizer makes: random bytes, and factors that are zero, subnormal, infinite or NaN."""
    known = type_of(type)
    generator = torch.Generator().manual_seed(1)
    shape = (rows, length // known.block, known.nbytes)
    blocks = torch.randint(256, shape, dtype=torch.uint8, generator=generator)
    halves = (0x0000, 0x8000, 0x0001, 0x83FF, 0x7C00, 0xFC00, 0x7E00, 0x7BFF, 0x0400)
    flat = blocks.view(-1, known.nbytes)
    for column, at in enumerate(SCALES[known.name]):
        for row in range(min(len(flat), len(halves))):
            half = halves[(row + 3 * column) % len(halves)]
            flat[row, at], flat[row, at + 1] = half & 255, half >> 8
    if known.name == "MXFP4":
        flat[:, 0] = torch.arange(len(flat)) * 37 % 256
        flat[:4, 0] = torch.tensor([0, 1, 2, 255])
    return blocks.flatten(1)


def assert_bits(actual, expected):
    """The same bits, except for NaN's, and subnormal numbers on a device that has none."""
    actual, expected = actual.cpu(), expected.cpu()
    same = (actual.view(torch.int32) == expected.view(torch.int32)) | (actual.isnan() & expected.isnan())
    if flushes_subnormals():
        same |= (expected.abs() < torch.finfo(torch.float32).smallest_normal) & (actual == 0)
    assert same.all(), f"{(~same).sum()} of {same.numel()} numbers differ"


def sample(type, rows, length, device):
    """Packed weights on the device and in float64 on the CPU."""
    packed = packed_sample(type, rows, length)
    return packed.to(device), by_gguf(packed, type).double()
