"""Shapes on both sides of LU's boundaries, and the conditions that factors and solutions must meet."""

import pytest
import torch
from matrices import EPS, check_below, norm, unit
from rows import changes, tuned

import metalcore

# variant of the baseline's plan -> shapes (m, n)
SHAPES = {
    "thread": [(1, 1), (2, 2), (3, 3), (4, 4)],
    "simd": [(1, 2), (3, 1), (5, 5), (8, 8), (7, 3), (9, 9), (16, 16), (12, 16), (17, 17), (32, 32), (32, 5), (20, 31)],
    "block": [
        (33, 33),
        (64, 64),
        (65, 65),
        (100, 30),
        (30, 100),
        (128, 128),
        (65, 128),
        (129, 40),
        (256, 64),
        (512, 32),
        (129, 129),
        (160, 160),
    ],
    "blocked": [(161, 161), (130, 300), (300, 130), (193, 193), (513, 40), (40, 1100), (1030, 33), (1025, 20)],
}
# Orders of matrices that the simulator takes too long for are for GPUs alone.
LARGE = [256, 512, *(pytest.param(n, marks=pytest.mark.only_on("cuda", "mps")) for n in (1024, 2048))]
# The numbers of columns of B for which solve_boundaries() looks for changes of the plan.
RIGHT = [1, 2, 4, 5, 8, 9, 16, 17, 33, 65, 130]


def plan(family, m, n, batch=1000):
    with tuned(family):
        explanation = metalcore.explain("lu_factor", (batch, m, n))
    return explanation.variant, explanation.kernels


def solve_plan(family, n, right, batch=1000):
    with tuned(family):
        explanation = metalcore.explain("solve", (batch, n, n), (batch, n, right))
    return explanation.variant, explanation.kernels[:1]


def boundaries(family):
    """Shapes on both sides of each change of plan: of square matrices, and of wide and tall ones of some widths."""
    shapes = []
    for below, above in changes(lambda n: plan(family, n, n), 1, 600):
        shapes += [(below, below), (above, above)]
    for width in (3, 30, 70):
        for below, above in changes(lambda m: plan(family, m, width), 1, 1100):
            shapes += [(below, width), (above, width), (width, below), (width, above)]
    return shapes


def solve_boundaries(family):
    return sorted(
        {
            (n, right)
            for right in RIGHT
            for pair in changes(lambda n: solve_plan(family, n, right), 1, 200)
            for n in pair
        }
    )


def unpack(LU, pivots):
    """P, L and U in float64 on the CPU."""
    return torch.lu_unpack(LU.cpu().double(), pivots.cpu())


def check_factors(A, LU, pivots, info, names, pivoting=True):
    """P L U is A; multipliers are at most 1; info is the first zero of U's diagonal. Batch entry i is names[i]."""
    if A.ndim == 2:
        A, LU, pivots, info = A[None], LU[None], pivots[None], info[None]
    m, n = A.shape[-2:]
    k = min(m, n)
    assert LU.shape == A.shape and pivots.shape == (*A.shape[:-2], k) and info.shape == A.shape[:-2]
    assert pivots.dtype == info.dtype == torch.int32
    assert ((pivots >= torch.arange(1, k + 1)) & (pivots <= m)).all()
    P, L, U = unpack(LU, pivots)
    A, largest = unit(A)
    if pivoting:
        assert (L.abs() <= 1).all()
        check_below(norm(P @ L @ (U / largest) - A) / norm(A).clamp(min=1e-300), 10 * max(m, n) * EPS, "A = PLU", names)
    zero = LU.diagonal(dim1=-2, dim2=-1) == 0
    first = torch.where(zero.any(-1), zero.int().argmax(-1) + 1, 0)
    assert torch.equal(info, first.int())


def check_solution(A, X, B, names, left=True, margin=10):
    """Each column of A X = B (or X A = B) is as exact as backward stability makes it, unless it overflows."""
    if A.ndim == 2:
        A, X, B = A[None], X[None], B[None]
    n = A.shape[-1]
    if not left:
        A, X, B = A.mT, X.mT, B.mT
    A, largest = unit(A)
    X, B = X.double() * largest, B.double()
    error = torch.linalg.vector_norm(A @ X - B, dim=-2)
    scale = norm(A)[..., None] * torch.linalg.vector_norm(X, dim=-2) + torch.linalg.vector_norm(B, dim=-2)
    error = torch.where(X.isfinite().all(-2), error / scale.clamp(min=1e-300), 0)
    check_below(error.amax(-1) if error.shape[-1] else error.sum(-1), margin * n * EPS, "A X = B", names)
