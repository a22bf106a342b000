"""Reduced QR of batches and of single matrices, against torch.linalg.qr."""

import math

import torch

import metalcore

from ...harness.case import Comparison, size_text

# A shape has the least speedup that is wanted, or None.
SHAPES = {
    "gpu": {
        (16384, 16, 16): 1500,
        (4096, 32, 32): 600,
        (16384, 64, 32): 300,
        (1024, 128, 128): 40,
        (4096, 8, 8): None,
        (1024, 48, 48): None,
        (256, 128, 64): None,
        (64, 256, 256): None,
        (512, 512): None,
        (1024, 1024): None,
        (2048, 2048): 1 / 1.5,
        (4096, 4096): None,
        (4000, 36): 1,
        (100000, 16): None,
        (64, 2048): None,
    },
    "simulator": dict.fromkeys(
        [(1024, 8, 8), (256, 16, 16), (64, 32, 32), (16, 128, 64), (8, 128, 128), (4000, 36), (512, 512)]
    ),
    "quick": dict.fromkeys([(8, 8, 8), (2, 64, 32)]),
}


def cases(scale):
    return [case(shape, least) for shape, least in SHAPES[scale].items()]


def case(shape, least):
    return Comparison(
        name="qr",
        shape=size_text(shape),
        dtype=torch.float32,
        ours=metalcore.qr,
        theirs=torch.linalg.qr,
        inputs=lambda device: (torch.randn(shape, device=device),),
        bytes=least_bytes(shape),
        flops=householder_flops(shape),
        graph=False,  # torch.linalg.qr calls cuSOLVER for each matrix, and the host's part counts
        variant=lambda a: metalcore.explain("qr", a).variant,
        targets={"speedup": least} if least else {},
    )


def least_bytes(shape):
    """The op reads A, and writes Q and R, in float32."""
    *batch, m, n = shape
    k = min(m, n)
    return 4 * math.prod(batch) * (m * n + m * k + k * n)


def householder_flops(shape):
    """The operations of the factorization and of the reduced Q (Golub and Van Loan, Matrix Computations, 5.2)."""
    *batch, m, n = shape
    k = min(m, n)
    factor = 4 * m * n * k - 2 * (m + n) * k**2 + 4 * k**3 / 3
    form = 2 * m * k**2 - 2 * k**3 / 3
    return round(math.prod(batch) * (factor + form))
