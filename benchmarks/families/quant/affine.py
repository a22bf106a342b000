"""Weights of 2 to 8 bits in groups of 64 with scales and offsets: products with few rows of x, and as numbers, against
PyTorch's ops on the same weights in 16 bits."""

import torch
import torch.nn.functional as F

import metalcore
from metalcore.quant._affine import affine_sample

from ...harness.case import Comparison, family
from .four_bits import ROWS, WEIGHTS

BITS = {"gpu": (2, 3, 4, 5, 6, 8), "simulator": (4, 8), "quick": (4,)}
GROUP = 64


@family
def affine(scale):
    for shape in WEIGHTS[scale]:
        for bits in BITS[scale]:
            for rows in ROWS[scale]:
                yield product(shape, rows, bits, scale)
        yield numbers(shape, scale)


def packed_bytes(shape, bits):
    count = shape[0] * shape[1]
    return count * bits // 8 + count // GROUP * 4


def product(shape, rows, bits, scale):
    def inputs(device):
        weights = affine_sample(bits, *shape, device, GROUP, dtype=torch.bfloat16)
        x = torch.randn(rows, shape[1], device=device).to(torch.bfloat16)
        return x, metalcore.dequantize_affine(*weights, bits), *weights

    return Comparison(
        name=f"affine_linear {bits} bits {rows} rows",
        shape="x".join(map(str, shape)),
        dtype=torch.bfloat16,
        ours=lambda x, weights, *packed: metalcore.affine_linear(x, *packed, bits),
        theirs=lambda x, weights, *packed: F.linear(x, weights),
        inputs=inputs,
        bytes=packed_bytes(shape, bits) + rows * sum(shape) * 2,
        flops=2 * rows * shape[0] * shape[1],
        peak="matmul_bfloat16",
        targets={"share": 0.7} if scale == "gpu" and rows == 1 else {},
    )


def numbers(shape, scale):
    def inputs(device):
        weights = affine_sample(4, *shape, device, GROUP, dtype=torch.bfloat16)
        return metalcore.dequantize_affine(*weights, 4), *weights

    return Comparison(
        name="dequantize_affine",
        shape="x".join(map(str, shape)),
        dtype=torch.bfloat16,
        ours=lambda weights, *packed: metalcore.dequantize_affine(*packed, 4),
        theirs=lambda weights, *packed: weights.clone(),
        inputs=inputs,
        bytes=packed_bytes(shape, 4) + shape[0] * shape[1] * 2,
        targets={"share": 0.7} if scale == "gpu" else {},
    )
