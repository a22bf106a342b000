"""The conditions that a solution of triangular systems must meet, and sizes on both sides of each change of plan."""

import torch
from matrices import EPS, check_below, norm
from rows import changes, tuned

import metalcore


def triangle(A, upper, unitriangular=False):
    """The part of A that solve_triangular reads, in float64."""
    T = A.double().triu() if upper else A.double().tril()
    return T - torch.diag_embed(T.diagonal(dim1=-2, dim2=-1) - 1) if unitriangular else T


def check_solution(A, B, X, *, upper, left=True, unitriangular=False, names=None):
    """The residual of each column of X (each row, where not left) is at most 10 n eps |A| |X|, in Frobenius norms."""
    T, B, X = triangle(A, upper, unitriangular), B.double(), X.cpu().double()
    if not left:
        T, B, X = T.mT, B.mT, X.mT
    assert X.shape == torch.broadcast_shapes(T.shape[:-2] + B.shape[-2:], B.shape)
    bound = 10 * max(1, T.shape[-1]) * EPS
    # T and X are scaled first, because norms of products of numbers about 1e30 are useless even in float64.
    scale_of_T = T.abs().amax((-2, -1), keepdim=True).clamp(min=1e-300)
    scale_of_X = X.abs().amax(-2, keepdim=True).clamp(min=1e-300)
    residual = (T / scale_of_T) @ (X / scale_of_X) - B / scale_of_X / scale_of_T
    size = norm(T / scale_of_T)[..., None] * (X / scale_of_X).norm(dim=-2)
    errors = (residual.norm(dim=-2) / size.clamp(min=1e-300)).amax(-1).flatten() if X.numel() else torch.zeros(0)
    check_below(errors, bound, "A X = B", names or ["random"] * len(errors))


def well_conditioned(*shape):
    """Matrices whose triangles are well-conditioned, also with a diagonal of ones: the random entries are small."""
    n = shape[-1]
    return torch.randn(shape) / max(n, 1) ** 0.5 / 2 + torch.eye(n)


def plan(family, n, columns, batch=1):
    """The variant and the kernels that n x n systems take on GPUs of a family."""
    with tuned(family):
        explanation = metalcore.explain("solve_triangular", (batch, n, n), (batch, n, columns))
    return explanation.variant, explanation.kernels


def boundaries(family):
    """(n, columns, batch) on both sides of each change of plan."""
    found = set()
    for columns in (1, 2, 5, 40, 200):
        for below, above in changes(lambda n: plan(family, n, columns), 1, 1100):
            found |= {(below, columns, 1), (above, columns, 1)}
    for n in (7, 20, 40):
        for batch in (1, 70, 300):
            for below, above in changes(lambda columns: plan(family, n, columns, batch), 1, 300):
                found |= {(n, below, batch), (n, above, batch)}
    return sorted(found)
