"""Every function of linear algebra over sizes 4 to 2048 and batches 1 to 16384: the speed-up map."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

import metalcore

from ..harness.case import Cell, Row, size_text

SIZES = {"gpu": (4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048), "simulator": (4, 16, 64), "quick": (4, 8)}
BATCHES = {"gpu": (1, 16, 256, 4096, 16384), "simulator": (1, 16), "quick": (1, 3)}
BYTES = 1 << 30  # of the matrices
TARGETS = {"speedup": 1 / 1.1}


@dataclass(frozen=True)
class Op:
    theirs: Callable
    # (matrices of normal random numbers) -> the function's arguments.
    arguments: Callable = lambda A: (A,)


def positive(A):
    """Positive definite matrices, whose condition does not depend on the size."""
    n = A.shape[-1]
    return A @ A.mT / n + torch.eye(n, device=A.device)


def symmetric(A):
    return A + A.mT


def triangular(A):
    """Lower triangular matrices that are well-conditioned."""
    n = A.shape[-1]
    return A.tril(-1) / n + 2 * torch.eye(n, device=A.device)


def column(A):
    return torch.randn(*A.shape[:-1], 1, device=A.device)


def reflectors(A):
    """(V, tau) as geqrf gives them: I - tau v vᵀ is orthogonal for each v, whose entry on the diagonal is 1."""
    tau = 2 / (1 + A.tril(-1).square().sum(-2))
    return A, tau


def factors(A):
    """(LU, pivots) of some matrix."""
    n = A.shape[-1]
    first = torch.arange(n, device=A.device)
    pivots = first + (torch.rand(A.shape[:-1], device=A.device) * (n - first)).long()
    return A / n + 2 * torch.eye(n, device=A.device), (pivots + 1).int()


def few(A):
    return A, min(6, A.shape[-1])


# By metalcore's names.
OPS = {
    "svd": Op(torch.linalg.svd),
    "svdvals": Op(torch.linalg.svdvals),
    "eigh": Op(torch.linalg.eigh, lambda A: (symmetric(A),)),
    "eigvalsh": Op(torch.linalg.eigvalsh, lambda A: (symmetric(A),)),
    "pinv": Op(torch.linalg.pinv),
    "matrix_rank": Op(torch.linalg.matrix_rank),
    "cond": Op(torch.linalg.cond),
    "svd_lowrank": Op(torch.svd_lowrank, few),
    "pca_lowrank": Op(torch.pca_lowrank, few),
    "qr": Op(torch.linalg.qr),
    "geqrf": Op(torch.geqrf),
    "householder_product": Op(torch.linalg.householder_product, reflectors),
    "ormqr": Op(torch.ormqr, lambda A: (*reflectors(A), torch.randn_like(A))),
    "lstsq": Op(torch.linalg.lstsq, lambda A: (A, column(A))),
    "cholesky": Op(torch.linalg.cholesky, lambda A: (positive(A),)),
    "cholesky_ex": Op(torch.linalg.cholesky_ex, lambda A: (positive(A),)),
    "cholesky_solve": Op(torch.cholesky_solve, lambda A: (column(A), triangular(A))),
    "lu": Op(torch.linalg.lu),
    "lu_factor": Op(torch.linalg.lu_factor),
    "lu_factor_ex": Op(torch.linalg.lu_factor_ex),
    "lu_solve": Op(torch.linalg.lu_solve, lambda A: (*factors(A), column(A))),
    "solve": Op(torch.linalg.solve, lambda A: (A, column(A))),
    "solve_ex": Op(torch.linalg.solve_ex, lambda A: (A, column(A))),
    "inv": Op(torch.linalg.inv),
    "inv_ex": Op(torch.linalg.inv_ex),
    "det": Op(torch.linalg.det),
    "slogdet": Op(torch.linalg.slogdet),
    "solve_triangular": Op(
        lambda A, B: torch.linalg.solve_triangular(A, B, upper=False), lambda A: (triangular(A), torch.randn_like(A))
    ),
    "trsm": Op(
        lambda A, B: torch.linalg.solve_triangular(A, B, upper=False), lambda A: (triangular(A), torch.randn_like(A))
    ),
    "syrk": Op(lambda A: A @ A.mT),
}
OURS = {"solve_triangular": lambda A, B: metalcore.linalg.solve_triangular(A, B, upper=False)}


def cases(scale):
    there = [name for name in OPS if hasattr(metalcore.linalg, name)]
    return [cell for name in there for n in SIZES[scale] for cell in row(name, n, BATCHES[scale])]


def row(name, n, batches):
    """An op's cells for one size, which share what they learn of each other."""
    shared, op = Row(), OPS[name]
    for batch in batches:
        shape = (n, n) if batch == 1 else (batch, n, n)
        if 4 * batch * n * n <= BYTES:
            yield Cell(
                name=name,
                shape=size_text(shape),
                dtype=torch.float32,
                n=n,
                batch=batch,
                row=shared,
                inputs=lambda device, shape=shape: op.arguments(torch.randn(shape, device=device)),
                ours=OURS.get(name) or getattr(metalcore.linalg, name),
                theirs=op.theirs,
                targets=TARGETS,
            )
