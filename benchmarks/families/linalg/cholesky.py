"""Cholesky factorization of batches and of single matrices, against torch.linalg.cholesky_ex."""

import math

import torch

import metalcore

from ...harness.case import Comparison, size_text

# A shape has the least speedup that is wanted, or None. linalg_map has all sizes and batches.
SHAPES = {
    "gpu": {
        (4096, 32, 32): 2,
        (1024, 128, 128): 2,
        **dict.fromkeys(
            [
                (16384, 8, 8),
                (16384, 16, 16),
                (4096, 64, 64),
                (256, 256, 256),
                (64, 512, 512),
                (16, 1024, 1024),
                (512, 512),
                (2048, 2048),
            ]
        ),
    },
    "simulator": dict.fromkeys([(1024, 8, 8), (256, 16, 16), (64, 32, 32), (8, 128, 128), (512, 512)]),
    "quick": dict.fromkeys([(8, 8, 8), (2, 64, 64)]),
}


def cases(scale):
    return [case(shape, least) for shape, least in SHAPES[scale].items()]


def case(shape, least):
    return Comparison(
        name="cholesky",
        shape=size_text(shape),
        dtype=torch.float32,
        ours=metalcore.cholesky_ex,
        theirs=torch.linalg.cholesky_ex,
        inputs=lambda device: (positive_definite(shape, device),),
        bytes=least_bytes(shape),
        flops=flops(shape),
        graph=False,  # torch's op of a batch allocates arrays of pointers on the host; that is part of its time
        variant=lambda a: metalcore.explain("cholesky", a).variant,
        targets={"speedup": least} if least else {},
    )


def positive_definite(shape, device):
    a = torch.randn(shape, device=device)
    return a @ a.mT / shape[-1] + torch.eye(shape[-1], device=device)


def least_bytes(shape):
    """The op reads one triangle of A and writes the whole of L, in float32."""
    *batch, n, _ = shape
    return 4 * math.prod(batch) * (n * (n + 1) // 2 + n * n)


def flops(shape):
    """n³/3 (Golub and Van Loan, Matrix Computations, 4.2)."""
    *batch, n, _ = shape
    return round(math.prod(batch) * n**3 / 3)
