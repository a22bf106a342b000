"""The conditions that a Cholesky factorization must meet, and the sizes on both sides of its plans' boundaries."""

import torch
from matrices import EPS, check_below
from rows import changes, tuned

import metalcore


def check_factor(A, L, upper, names):
    """L has zeros in its other triangle and a positive diagonal, and L Lᵀ is A. The bound of the error of entry (i, j)
    is 10 n eps sqrt(A_ii A_jj), which is what rounding allows (Demmel 1989). Batch entry i is names[i]."""
    A, L = A.double(), L.double()
    L = L.mT if upper else L
    assert L.shape == A.shape
    assert not L.triu(1).any()
    diagonal = A.diagonal(dim1=-2, dim2=-1).sqrt()
    assert (L.diagonal(dim1=-2, dim2=-1) > 0).all()
    scaled = L / diagonal[..., None]  # no product overflows
    residual = scaled @ scaled.mT - A / diagonal[..., None] / diagonal[..., None, :]
    check_below(residual.abs().amax(dim=(-2, -1)), 10 * A.shape[-1] * EPS, "A = L Lᵀ", names)


def symmetric_part(A, upper):
    """The symmetric matrix whose one triangle A holds."""
    return A.triu() + A.triu(1).mT if upper else A.tril() + A.tril(-1).mT


def random(*shape):
    """Random positive-definite matrices."""
    A = torch.randn(shape)
    return A @ A.mT / shape[-1] + torch.eye(shape[-1])


def plan(family, n):
    with tuned(family):
        explanation = metalcore.explain("cholesky", (n, n))
    return explanation.variant, explanation.kernels


def boundaries(family):
    """The orders on both sides of each change of plan."""
    return sorted({n for pair in changes(lambda n: plan(family, n), 1, 600) for n in pair})
