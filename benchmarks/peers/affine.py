"""Products of one row of x and packed weights, against MLX's affine_qmv of each number of bits and its fp_qmv."""

from __future__ import annotations

import functools

import torch

import metalcore
from metalcore.quant import ScaledWeight, dequantize, quantized_linear
from metalcore.quant._affine import affine_sample
from metalcore.quant._repack import mxfp4_blocks

from ..harness.case import of_all, size_text
from .comparison import LIMITS, calls, exact, peer_case
from .mlx import MLX

SHAPES = {
    "gpu": [(4096, 14336), (14336, 4096), (11008, 4096), (4096, 4096)],
    "simulator": [(256, 1024)],
    "quick": [(64, 1024)],
}
BITS = (2, 3, 4, 5, 6, 8)
FLOATING = {"mxfp8": 8, "nvfp4": 4}  # formats whose bytes MLX and metalcore share, and their bits
GROUP = 64
CHECKED = 64  # rows of the weights


def add_options(parser):
    parser.add_argument("--mlx", required=True, metavar="DIR", help="a checkout of ml-explore/mlx")


def cases(options, scale):
    peer, dtypes = MLX(options.mlx), (torch.bfloat16, torch.float16)
    yield from of_all(functools.partial(affine, peer), scale, SHAPES[scale], dtypes, BITS)
    yield from of_all(functools.partial(mxfp4, peer), scale, SHAPES[scale], dtypes)
    yield from of_all(functools.partial(floating, peer), scale, SHAPES[scale], dtypes, FLOATING)


def fields(shape, size, dtype):
    return {
        "shape": size_text((1, *shape)),
        "dtype": dtype,
        "bytes": shape[0] * size,
        "flops": 2 * shape[0] * shape[1],
        "limit": LIMITS[dtype],
    }


def affine(peer, shape, dtype, bits, scale):
    def inputs(device):
        x = torch.randn(1, shape[1], device=device).to(dtype)
        return x, *affine_sample(bits, *shape, device, GROUP, dtype=dtype)

    def reference(x, *weights):
        return exact(x) @ exact(metalcore.dequantize_affine(*(w[:CHECKED] for w in weights), bits).float()).T

    return peer_case(
        name=f"affine {bits} bits, MLX",
        inputs=inputs,
        ours=calls(lambda x, *weights: metalcore.affine_linear(x, *weights, bits)),
        theirs=functools.partial(peer.matvec, "affine", bits),
        reference=reference,
        **fields(shape, shape[1] * bits // 8 + shape[1] // GROUP * 2 * dtype.itemsize, dtype),
    )


def mxfp4(peer, shape, dtype, scale):
    """Compares GGML's blocks, which have the same numbers, with MLX's words and scales."""

    def inputs(device):
        words = (
            torch.randint(-(2**31), 2**31, (shape[0], shape[1] // 8), device=device, dtype=torch.int64)
            .int()
            .view(torch.uint32)
        )
        scales = torch.randint(120, 130, (shape[0], shape[1] // 32), device=device).to(torch.uint8)
        return torch.randn(1, shape[1], device=device).to(dtype), words, scales

    def ours(x, words, scales):
        return functools.partial(quantized_linear, x, mxfp4_blocks(words, scales), "MXFP4")

    def reference(x, words, scales):
        blocks = mxfp4_blocks(words[:CHECKED], scales[:CHECKED])
        return exact(x) @ exact(dequantize(blocks, "MXFP4", dtype=torch.float32)).T

    return peer_case(
        name="mxfp4, MLX",
        inputs=inputs,
        ours=ours,
        theirs=functools.partial(peer.matvec, "mxfp4", 4),
        reference=reference,
        **fields(shape, shape[1] // 32 * 17, dtype),
    )


def floating(peer, shape, dtype, format, scale):
    bits = FLOATING[format]

    def inputs(device):
        weight = metalcore.quantize_scaled(torch.randn(shape, device=device), format)
        return torch.randn(1, shape[1], device=device).to(dtype), weight.packed.view(torch.uint32), weight.scales

    def weight_of(words, scales):
        return ScaledWeight(words.view(torch.uint8), scales, format)

    def reference(x, *weight):
        rows = metalcore.dequantize_scaled(weight_of(*(each[:CHECKED] for each in weight)))
        return exact(x) @ exact(rows).T

    group = 16 if format == "nvfp4" else 32
    return peer_case(
        name=f"{format}, MLX",
        inputs=inputs,
        ours=calls(lambda x, *weight: metalcore.scaled_linear(x, weight_of(*weight))),
        theirs=functools.partial(peer.matvec, format, bits),
        reference=reference,
        **fields(shape, shape[1] * bits // 8 + shape[1] // group, dtype),
    )
