"""The conditions that singular value decompositions and symmetric eigendecompositions must meet."""

import torch
from matrices import EPS, check_below, norm, unit
from rows import changes, tuned

import metalcore

svd, eigh = torch.ops.metalcore.svd, torch.ops.metalcore.eigh


def check_svd(A, U, S, Vh, names):
    """A = U S Vh, U's columns and Vh's rows are orthonormal, and S is LAPACK's, sorted. Batch entry i is names[i]."""
    m, n = A.shape[-2:]
    k = min(m, n)
    bound = 10 * max(m, n) * EPS
    A, largest = unit(A)
    check_values(A, S, largest, names)
    U, S, Vh = U.double(), S.double() / largest[..., 0], Vh.double()
    check_below(norm(U.mT @ U - torch.eye(U.shape[-1])), bound, "UᵀU = I", names)
    check_below(norm(Vh @ Vh.mT - torch.eye(Vh.shape[-2])), bound, "Vh Vhᵀ = I", names)
    residual = norm(A - (U[..., :k] * S[..., None, :]) @ Vh[..., :k, :])
    check_below(residual / norm(A).clamp(min=1e-300), bound, "A = U S Vh", names)


def check_values(A, S, largest, names):
    """S / largest holds the singular values of A, sorted."""
    S = S.double() / largest[..., 0]
    assert (S >= 0).all() and (S[..., 1:] <= S[..., :-1]).all()
    expected = torch.linalg.svdvals(A)
    error = (S - expected).abs().amax(-1) / expected[..., 0].clamp(min=1e-300)
    check_below(error, 5 * max(A.shape[-2:]) * EPS, "singular values", names)


def check_eigh(A, L, V, names):
    """A V = V L for symmetric A, V's columns are orthonormal, and L is LAPACK's, sorted. Batch entry i is names[i]."""
    n = A.shape[-1]
    bound = 10 * n * EPS
    A, largest = unit(A)
    check_eigenvalues(A, L, largest, names)
    L, V = L.double() / largest[..., 0], V.double()
    check_below(norm(V.mT @ V - torch.eye(n)), bound, "VᵀV = I", names)
    check_below(norm(A @ V - V * L[..., None, :]) / norm(A).clamp(min=1e-300), bound, "A V = V L", names)


def check_eigenvalues(A, L, largest, names):
    L = L.double() / largest[..., 0]
    assert (L[..., 1:] >= L[..., :-1]).all()
    expected = torch.linalg.eigvalsh(A)
    error = (L - expected).abs().amax(-1) / expected.abs().amax(-1).clamp(min=1e-300)
    check_below(error, 5 * A.shape[-1] * EPS, "eigenvalues", names)


def plan(family, op, shape, **options):
    """The variant and the kernels on GPUs of a family."""
    with tuned(family):
        explanation = metalcore.explain(op, shape, **options)
    return explanation.variant, explanation.kernels


def square_boundaries(family, op, largest=140):
    """Sizes of square matrices on both sides of each change of plan."""
    return [n for pair in changes(lambda n: plan(family, op, (n, n)), 1, largest) for n in pair]
