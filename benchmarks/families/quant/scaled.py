"""Floating-point numbers of 8 and 4 bits with scales: products with few rows of x, and as numbers, against PyTorch's
ops on the same weights in 16 bits; making them of numbers; and products of two such matrices."""

import torch
import torch.nn.functional as F

import metalcore
from metalcore.quant._scaled_weight import FORMATS, scaled_sample

from ...harness.case import Comparison, family
from .packed import ROWS, WEIGHTS

KINDS = {
    "gpu": (("e4m3", (128, 128)), ("e4m3", (1, 0)), ("e5m2", (1, 0)), ("mxfp8", ()), ("mxfp4", ()), ("nvfp4", ())),
    "simulator": (("e4m3", (128, 128)), ("nvfp4", ())),
    "quick": (("e4m3", (128, 128)),),
}


@family
def scaled(scale):
    for shape in WEIGHTS[scale]:
        for format, block in KINDS[scale]:
            for rows in ROWS[scale]:
                yield product(shape, rows, format, block, scale)
            yield numbers(shape, format, block, scale)
            yield packing(shape, format, block, scale)
        yield two(shape, 512 if scale == "gpu" else 16)


def packed_bytes(shape, format, block):
    of = FORMATS[format]
    count = shape[0] * shape[1]
    if of.of_scale:
        return count * of.bits // 8 + count // of.of_scale
    return count + 4 * (-(shape[0] // -block[0]) * (-(shape[1] // -block[1]) if block[1] else 1))


def label(format, block):
    return f"{format} {'x'.join(map(str, block))}".strip()


def product(shape, rows, format, block, scale):
    def inputs(device):
        weight = scaled_sample(format, *shape, device, block or (1, 0))
        x = torch.randn(rows, shape[1], device=device).to(torch.bfloat16)
        return x, metalcore.dequantize_scaled(weight, torch.bfloat16), *weight[:2]

    def ours(x, weights, packed, scales):
        return metalcore.scaled_linear(x, metalcore.quant.ScaledWeight(packed, scales, format, block))

    return Comparison(
        name=f"scaled_linear {label(format, block)} {rows} rows",
        shape="x".join(map(str, shape)),
        dtype=torch.bfloat16,
        ours=ours,
        theirs=lambda x, weights, *packed: F.linear(x, weights),
        inputs=inputs,
        bytes=packed_bytes(shape, format, block) + rows * sum(shape) * 2,
        flops=2 * rows * shape[0] * shape[1],
        peak="matmul_bfloat16",
        targets={"share": 0.7} if scale == "gpu" and rows == 1 else {},
    )


def numbers(shape, format, block, scale):
    def inputs(device):
        weight = scaled_sample(format, *shape, device, block or (1, 0))
        return metalcore.dequantize_scaled(weight, torch.bfloat16), *weight[:2]

    def ours(weights, packed, scales):
        weight = metalcore.quant.ScaledWeight(packed, scales, format, block)
        return metalcore.dequantize_scaled(weight, torch.bfloat16)

    return Comparison(
        name=f"dequantize_scaled {label(format, block)}",
        shape="x".join(map(str, shape)),
        dtype=torch.bfloat16,
        ours=ours,
        theirs=lambda weights, *packed: weights.clone(),
        inputs=inputs,
        bytes=packed_bytes(shape, format, block) + shape[0] * shape[1] * 2,
        targets={"share": 0.7} if scale == "gpu" else {},
    )


def packing(shape, format, block, scale):
    return Comparison(
        name=f"quantize_scaled {label(format, block)}",
        shape="x".join(map(str, shape)),
        dtype=torch.bfloat16,
        ours=lambda x: metalcore.quantize_scaled(x, format, block or None),
        theirs=lambda x: x.clone(),
        inputs=lambda device: (torch.randn(shape, device=device).to(torch.bfloat16),),
        bytes=packed_bytes(shape, format, block) + shape[0] * shape[1] * 2,
    )


def two(shape, rows):
    """With one scale for each matrix. PyTorch's product is of the same numbers in 16 bits."""

    def inputs(device):
        a = torch.randn(rows, shape[1], device=device).to(torch.float8_e4m3fn)
        b = torch.randn(shape, device=device).to(torch.float8_e4m3fn)
        one = torch.ones((), device=device)
        return a, b, one, a.to(torch.bfloat16), b.to(torch.bfloat16)

    return Comparison(
        name=f"scaled_mm {rows} rows",
        shape="x".join(map(str, shape)),
        dtype=torch.float8_e4m3fn,
        ours=lambda a, b, one, a16, b16: metalcore.scaled_mm(a, b.T, one, one),
        theirs=lambda a, b, one, a16, b16: F.linear(a16, b16),
        inputs=inputs,
        bytes=shape[0] * shape[1] + rows * (shape[1] + 2 * shape[0]),
        flops=2 * rows * shape[0] * shape[1],
        peak="matmul_bfloat16",
    )
