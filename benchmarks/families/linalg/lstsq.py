"""Least squares of full rank, against torch.linalg.lstsq; the drivers that find the rank have a CPU's only."""

import math

import torch

import metalcore

from ...harness.case import Comparison, size_text

# (…, m, n) and right sides, with the least speedup that is wanted, or None.
SHAPES = {
    "gpu": {
        ((100000, 6), 3): 1,
        ((1000000, 6), 3): 1,
        ((100000, 16), 1): 1,
        ((100000, 32), 1): 1,
        ((20000, 60), 4): None,
        ((3000, 4), 1): None,
        ((4096, 16, 8), 1): 1,
        ((1024, 64, 16), 2): 1,
        ((256, 128, 64), 64): 1,
        ((1024, 256, 128), 1): None,
    },
    "simulator": dict.fromkeys([((20000, 6), 3), ((256, 16, 8), 1), ((8, 128, 64), 64)]),
    "quick": dict.fromkeys([((2000, 6), 3), ((4, 16, 8), 1)]),
}


def cases(scale):
    return [case(shape, sides, least) for (shape, sides), least in SHAPES[scale].items()]


def case(shape, sides, least):
    *batch, m, n = shape
    return Comparison(
        name="lstsq",
        shape=f"{size_text(shape)} {sides} sides",
        dtype=torch.float32,
        ours=lambda A, B: metalcore.lstsq(A, B)[:2],
        theirs=lambda A, B: torch.linalg.lstsq(A, B)[:2],
        inputs=lambda device: (torch.randn(shape, device=device), torch.randn(*batch, m, sides, device=device)),
        bytes=4 * math.prod(batch) * (m * (n + sides) + n * sides),
        # Golub and Van Loan, Matrix Computations, 5.3: the reflectors of A, applied to B as well.
        flops=round(math.prod(batch) * (2 * n * n * (m - n / 3) + 4 * m * n * sides)),
        graph=False,  # torch.linalg.lstsq calls cuSOLVER for each matrix, and the host's part counts
        variant=lambda A, B: metalcore.explain("lstsq", A, B).variant,
        targets={"speedup": least} if least else {},
    )
