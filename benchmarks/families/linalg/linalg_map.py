"""Every function of linear algebra over sizes 4 to 2048 and batches 1 to 16384: the speed-up map."""

from __future__ import annotations

import functools

import torch

import metalcore
from metalcore._core.registry import OPS

from ...harness.case import Cell, Row, family, size_text

SIZES = {"gpu": (4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048), "simulator": (4, 16, 64), "quick": (4, 8)}
BATCHES = {"gpu": (1, 16, 256, 4096, 16384), "simulator": (1, 16), "quick": (1, 3)}
BYTES = 1 << 30  # of the matrices
TARGETS = {"speedup": 1 / 1.1}


def positive(A):
    """Returns positive definite matrices, whose condition does not depend on the size."""
    n = A.shape[-1]
    return A @ A.mT / n + torch.eye(n, device=A.device)


def symmetric(A):
    return A + A.mT


def triangular(A):
    """Returns lower triangular matrices that are well-conditioned."""
    n = A.shape[-1]
    return A.tril(-1) / n + 2 * torch.eye(n, device=A.device)


def column(A):
    return torch.randn(*A.shape[:-1], 1, device=A.device)


def reflectors(A):
    """Returns (V, tau) as geqrf gives them: I - tau v vᵀ is orthogonal for each v, whose entry on the diagonal is 1."""
    tau = 2 / (1 + A.tril(-1).square().sum(-2))
    return A, tau


def factors(A):
    """Returns (LU, pivots) of some matrix."""
    n = A.shape[-1]
    first = torch.arange(n, device=A.device)
    pivots = first + (torch.rand(A.shape[:-1], device=A.device) * (n - first)).long()
    return A / n + 2 * torch.eye(n, device=A.device), (pivots + 1).int()


def in_place(A):
    """Pivots of LDL factors whose rows stay where they are."""
    return torch.arange(1, A.shape[-1] + 1, device=A.device, dtype=torch.int32).expand(A.shape[:-1])


def few(A):
    return A, min(6, A.shape[-1])


def lower(function):
    """Returns solve_triangular with `upper` given."""
    return functools.partial(function, upper=False)


# The arguments of ops that take something else than matrices of normal random numbers.
ARGUMENTS = {
    "cholesky": lambda A: (positive(A),),
    "cholesky_ex": lambda A: (positive(A),),
    "cholesky_solve": lambda A: (column(A), triangular(A)),
    "eigh": lambda A: (symmetric(A),),
    "eigh_tridiagonal": lambda A: (A.diagonal(0, -2, -1), A.diagonal(1, -2, -1)),
    "eigvalsh": lambda A: (symmetric(A),),
    "householder_product": reflectors,
    "ldl_solve": lambda A: (triangular(A), in_place(A), column(A)),
    "lobpcg": lambda A: (positive(A), 1),
    "logm": lambda A: (positive(A),),
    "lstsq": lambda A: (A, column(A)),
    "lu_solve": lambda A: (*factors(A), column(A)),
    "matrix_power": lambda A: (A, 3),
    "ormqr": lambda A: (*reflectors(A), torch.randn_like(A)),
    "pca_lowrank": few,
    "solve": lambda A: (A, column(A)),
    "solve_ex": lambda A: (A, column(A)),
    "solve_sylvester": lambda A: (positive(A), positive(A), A),
    "solve_triangular": lambda A: (triangular(A), torch.randn_like(A)),
    "sqrtm": lambda A: (positive(A),),
    "svd_lowrank": few,
    "trsm": lambda A: (triangular(A), torch.randn_like(A)),
}
BIND = {"solve_triangular": lower}
# The others take several tensors, or no batches of matrices.
MAPPED = {
    name: OPS[name]
    for name in metalcore.linalg.__all__
    if name in ARGUMENTS or len(OPS[name].smallest_sample().shapes) == 1 and name != "tensorinv"
}


def arguments(name, A):
    """Returns the arguments of an op, made of matrices of normal random numbers."""
    return ARGUMENTS[name](A) if name in ARGUMENTS else (A,)


@family
def linalg_map(scale):
    return [cell for name in MAPPED for n in SIZES[scale] for cell in row(name, n, BATCHES[scale])]


def row(name, n, batches):
    """Yields an op's cells for one size, which share what they learn of each other."""
    shared, op, bind = Row(), MAPPED[name], BIND.get(name, lambda function: function)
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
                inputs=lambda device, shape=shape: arguments(name, torch.randn(shape, device=device)),
                ours=bind(op.function),
                theirs=bind(op.reference),
                targets=TARGETS,
            )
