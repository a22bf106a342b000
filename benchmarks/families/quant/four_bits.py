"""Weights of 4 bits in blocks of 64 (NF4): products with few rows of x, and as numbers, against PyTorch's ops on the
same weights in 16 bits."""

import torch
import torch.nn.functional as F

import metalcore

from ...harness.case import Comparison, family

# rows and columns of weights
WEIGHTS = {
    "gpu": [(4096, 14336), (11008, 4096), (14336, 4096), (128256, 4096)],
    "simulator": [(256, 512)],
    "quick": [(16, 64)],
}
ROWS = {"gpu": (1, 4, 16, 512), "simulator": (1, 4), "quick": (1,)}


@family
def four_bits(scale):
    for shape in WEIGHTS[scale]:
        for nested in (False, True):
            for rows in ROWS[scale]:
                yield product(shape, rows, nested, scale)
        yield numbers(shape, scale)


def product(shape, rows, nested, scale):
    def inputs(device):
        x = torch.randn(rows, shape[1], device=device).to(torch.bfloat16)
        weights = torch.randn(shape, device=device).to(torch.bfloat16)
        return x, weights, *metalcore.quantize_4bit(weights, compress=nested)

    count = shape[0] * shape[1]
    return Comparison(
        name=f"linear_4bit {rows} rows{', scales in 8 bits' * nested}",
        shape="x".join(map(str, shape)),
        dtype=torch.bfloat16,
        ours=lambda x, weights, packed, state: metalcore.linear_4bit(x, packed, state),
        theirs=lambda x, weights, packed, state: F.linear(x, weights),
        inputs=inputs,
        bytes=count // 2 + count // 64 * (1 if nested else 4) + rows * sum(shape) * 2,
        flops=2 * rows * count,
        peak="matmul_bfloat16",
        targets={"share": 0.7} if scale == "gpu" and rows == 1 else {},
    )


def numbers(shape, scale):
    def inputs(device):
        weights = torch.randn(shape, device=device).to(torch.bfloat16)
        return weights, *metalcore.quantize_4bit(weights)

    count = shape[0] * shape[1]
    return Comparison(
        name="dequantize_4bit",
        shape="x".join(map(str, shape)),
        dtype=torch.bfloat16,
        ours=lambda weights, packed, state: metalcore.dequantize_4bit(packed, state),
        theirs=lambda weights, packed, state: weights.clone(),
        inputs=inputs,
        bytes=count // 2 + count // 64 * 4 + count * 2,
        targets={"share": 0.7} if scale == "gpu" else {},
    )
