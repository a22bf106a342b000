"""Matrix products: metalcore.matmul against MLX's steel_gemm_fused with tiles of 64 x 64, or its matmul2d kernels."""

from __future__ import annotations

import functools

import torch

import metalcore

from ..harness.case import DTYPES, of_all, size_text
from .comparison import LIMITS, calls, exact, peer_case
from .mlx import MLX

SIZES = {"gpu": (4096,), "simulator": (256,), "quick": (256,)}
CHECKED = 256  # rows of the result
# MLX's host code takes the first on the GPUs of Pro, Max and Ultra, and the second on others.
SWIZZLES = (2, 1)


def add_options(parser):
    parser.add_argument("--mlx", required=True, metavar="DIR", help="a checkout of ml-explore/mlx")
    parser.add_argument("--nax", action="store_true", help="MLX's steel_gemm_fused_nax, of Metal 4's matmul2d")
    parser.add_argument("--size", type=int, nargs="+", help="rows and columns of the matrices (4096)")


def cases(options, scale):
    peer = MLX(options.mlx)
    return of_all(
        functools.partial(case, peer, options.nax), scale, options.size or SIZES[scale], DTYPES, ("nn", "nt"), SWIZZLES
    )


def case(peer, nax, n, dtype, layout, swizzle, scale):
    """Returns the case of a product. `nt` has the transpose of the second matrix, whose memory is contiguous."""

    def inputs(device):
        return tuple(torch.randn(n, n, device=device).to(dtype) for _ in range(2))

    def right(b):
        return b if layout == "nn" else b.T

    return peer_case(
        name=f"matmul {layout}, MLX{' NAX' if nax else ''} with swizzle {swizzle}",
        shape=size_text((n, n, n)),
        dtype=dtype,
        inputs=inputs,
        ours=calls(lambda a, b: metalcore.matmul(a, right(b))),
        theirs=functools.partial(peer.matmul, layout, swizzle, for_units=nax),
        bytes=3 * n * n * dtype.itemsize,
        flops=2 * n**3,
        peak="matmul_float32" if dtype == torch.float32 else "matmul_bfloat16",
        reference=lambda a, b: exact(a[:CHECKED]) @ exact(right(b)),
        limit=LIMITS[dtype],
    )
