"""LU factorizations, solutions, inverses and determinants of batches and single matrices, against torch.linalg's."""

import math

import torch

import metalcore

from ...harness.case import Comparison, size_text

# The keys are (function, shape of A, columns of B), the values the least speedup that is wanted.
NO_SLOWER = 1 / 1.1
SYSTEMS = {
    "gpu": {
        ("solve", (4096, 32, 32), 1): 2,
        ("solve", (4096, 32, 32), 32): 2,
        ("solve", (1024, 128, 128), 1): 2,
        ("solve", (1024, 128, 128), 128): 2,
        ("inv", (100000, 3, 3), 0): 5,
        **dict.fromkeys(
            [
                ("lu_factor", (16384, 4, 4), 0),
                ("lu_factor", (16384, 16, 16), 0),
                ("lu_factor", (4096, 32, 32), 0),
                ("lu_factor", (1024, 64, 64), 0),
                ("lu_factor", (1024, 128, 128), 0),
                ("lu_factor", (128, 256, 256), 0),
                ("lu_factor", (16, 512, 512), 0),
            ],
            1,
        ),
        **dict.fromkeys(
            [
                ("lu_factor", (512, 512), 0),
                ("lu_factor", (2048, 2048), 0),
                ("lu", (1024, 64, 64), 0),
                ("solve", (16384, 4, 4), 1),
                ("solve", (128, 256, 256), 1),
                ("solve", (2048, 2048), 1),
                ("lu_solve", (1024, 64, 64), 1),
                ("lu_solve", (128, 256, 256), 16),
                ("inv", (4096, 32, 32), 0),
                ("inv", (1024, 128, 128), 0),
                ("inv", (1024, 1024), 0),
                ("det", (16384, 8, 8), 0),
                ("slogdet", (1024, 128, 128), 0),
            ],
            NO_SLOWER,
        ),
    },
    "simulator": dict.fromkeys(
        [
            ("lu_factor", (256, 16, 16), 0),
            ("lu_factor", (16, 100, 100), 0),
            ("lu_factor", (300, 300), 0),
            ("solve", (256, 16, 16), 4),
            ("solve", (16, 100, 100), 1),
            ("inv", (4096, 3, 3), 0),
        ]
    ),
    "quick": dict.fromkeys(
        [
            ("lu_factor", (8, 8, 8), 0),
            ("solve", (2, 40, 40), 3),
            ("lu_solve", (2, 8, 8), 1),
            ("inv", (8, 3, 3), 0),
            ("det", (4, 5, 5), 0),
        ]
    ),
}


def cases(scale):
    return [case(name, shape, columns, least) for (name, shape, columns), least in SYSTEMS[scale].items()]


def case(name, shape, columns, least):
    *batch, n, _ = shape
    ours, theirs = getattr(metalcore, name), getattr(torch.linalg, name)

    def inputs(device):
        A = torch.randn(shape, device=device)
        factors = torch.linalg.lu_factor(A) if name == "lu_solve" else (A,)
        return (*factors, *([torch.randn(*batch, n, columns, device=device)] if columns else []))

    return Comparison(
        name=name,
        shape=f"{size_text(shape)}, {columns}" if columns else size_text(shape),
        dtype=torch.float32,
        ours=ours,
        theirs=theirs,
        inputs=inputs,
        bytes=least_bytes(name, shape, columns),
        flops=lu_flops(name, shape, columns),
        graph=False,  # most calls wait for info, and PyTorch's functions call cuSOLVER for each matrix
        variant=lambda *tensors: metalcore.explain(name, *tensors).variant,
        targets={"speedup": least} if least else {},
    )


def least_bytes(name, shape, columns):
    """The function reads A and B, and writes LU, or P, L and U, or X, in float32."""
    *batch, n, _ = shape
    written = {"lu_factor": 1, "lu": 3, "inv": 1}.get(name, 0)
    return 4 * math.prod(batch) * (n * n * (1 + written) + 2 * n * columns)


def lu_flops(name, shape, columns):
    """The operations of the factorization, and of two triangular systems for each column of B or of the identity (Golub
    and Van Loan, Matrix Computations, 3.2 and 3.1)."""
    *batch, n, _ = shape
    factor = 0 if name == "lu_solve" else 2 * n**3 / 3
    solve = 4 * n**3 / 3 if name == "inv" else 2 * n * n * columns
    return round(math.prod(batch) * (factor + solve))
