"""Packed weights: products with few rows of x, and as numbers, against PyTorch's ops on the same weights in 16 bits."""

import torch
import torch.nn.functional as F

import metalcore
from metalcore.quant._affine import affine_sample

from ...harness.case import Comparison, family

# rows and columns of weights
WEIGHTS = {
    "gpu": [(4096, 14336), (11008, 4096), (14336, 4096), (128256, 4096)],
    "simulator": [(256, 512)],
    "quick": [(16, 64)],
}
ROWS = {"gpu": (1, 4, 16, 512), "simulator": (1, 4), "quick": (1,)}
BITS = {"gpu": (2, 3, 4, 5, 6, 8), "simulator": (4, 8), "quick": (4,)}
GROUP = 64  # weights that share a scale


@family
def affine(scale):
    """Times weights of 2 to 8 bits in groups of 64 with scales and offsets: products with few rows of x, and as
    numbers, against PyTorch's ops on the same weights in 16 bits."""

    def packed(shape, bits, device):
        weights = affine_sample(bits, *shape, device, GROUP, dtype=torch.bfloat16)
        return metalcore.dequantize_affine(*weights, bits), *weights

    def packed_bytes(count, bits):
        return count * bits // 8 + count // GROUP * 4

    for shape in WEIGHTS[scale]:
        count = shape[0] * shape[1]
        for bits in BITS[scale]:
            for rows in ROWS[scale]:
                yield product(
                    f"affine_linear {bits} bits {rows} rows",
                    (rows, *shape),
                    lambda device, shape=shape, bits=bits: packed(shape, bits, device),
                    lambda x, *weights, bits=bits: metalcore.affine_linear(x, *weights, bits),
                    packed_bytes(count, bits),
                    scale,
                )
        yield numbers(
            "dequantize_affine",
            shape,
            lambda device, shape=shape: packed(shape, 4, device),
            lambda *weights: metalcore.dequantize_affine(*weights, 4),
            packed_bytes(count, 4),
            scale,
        )


@family
def four_bits(scale):
    """Times weights of 4 bits in blocks of 64 (NF4): products with few rows of x, and as numbers, against PyTorch's ops
    on the same weights in 16 bits."""

    def packed(shape, nested, device):
        weights = torch.randn(shape, device=device).to(torch.bfloat16)
        return weights, *metalcore.quantize_4bit(weights, compress=nested)

    for shape in WEIGHTS[scale]:
        count = shape[0] * shape[1]
        for nested in (False, True):
            for rows in ROWS[scale]:
                yield product(
                    f"linear_4bit {rows} rows{', scales in 8 bits' * nested}",
                    (rows, *shape),
                    lambda device, shape=shape, nested=nested: packed(shape, nested, device),
                    metalcore.linear_4bit,
                    count // 2 + count // GROUP * (1 if nested else 4),
                    scale,
                )
        yield numbers(
            "dequantize_4bit",
            shape,
            lambda device, shape=shape: packed(shape, False, device),
            metalcore.dequantize_4bit,
            count // 2 + count // GROUP * 4,
            scale,
        )


def product(name, sizes, packed, ours, packed_bytes, scale):
    """Returns the case of a product with packed weights.

    Args:
        sizes: the rows of x, and the rows and columns of the weights.
        packed: (device) -> the weights in 16 bits, and the tensors or states that hold them packed.
        ours: (x, *the packed weights) -> the product.
        packed_bytes: of the weights.
    """
    rows, outputs, inputs = sizes
    return Comparison(
        name=name,
        shape=f"{outputs}x{inputs}",
        dtype=torch.bfloat16,
        ours=lambda x, weights, *packed: ours(x, *packed),
        theirs=lambda x, weights, *packed: F.linear(x, weights),
        inputs=lambda device: (torch.randn(rows, inputs, device=device).to(torch.bfloat16), *packed(device)),
        bytes=packed_bytes + rows * (outputs + inputs) * 2,
        flops=2 * rows * outputs * inputs,
        peak="matmul_bfloat16",
        targets={"share": 0.7} if scale == "gpu" and rows == 1 else {},
    )


def numbers(name, shape, packed, ours, packed_bytes, scale):
    """Returns the case of weights as numbers, with the arguments of product()."""
    return Comparison(
        name=name,
        shape="x".join(map(str, shape)),
        dtype=torch.bfloat16,
        ours=lambda weights, *packed: ours(*packed),
        theirs=lambda weights, *packed: weights.clone(),
        inputs=packed,
        bytes=packed_bytes + shape[0] * shape[1] * 2,
        targets={"share": 0.7} if scale == "gpu" else {},
    )
