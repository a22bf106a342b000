"""What the tests of singular values and eigenvalues share: layouts, matrices with known gaps, and conditions."""

import pytest
import torch
from matrices import EPS, check_below, norm, unit
from references import assert_same_error
from rows import changes, tuned

import metalcore

LAYOUTS = {
    "transposed": lambda: torch.randn(3, 12, 12).mT,
    "every other": lambda: torch.randn(6, 30, 45)[::2, ::2, ::3],
    "with an offset": lambda: torch.randn(4, 50, 50)[1:, 3:12, 7:16],
    "expanded batch": lambda: torch.randn(1, 10, 10).expand(5, 10, 10),
    "expanded rows": lambda: torch.randn(3, 1, 10).expand(3, 10, 10),
    "expanded columns": lambda: torch.randn(3, 10, 1).expand(3, 10, 10),
    "permuted batches": lambda: torch.randn(2, 3, 4, 6, 6).permute(2, 0, 1, 3, 4),
    "batches in the middle": lambda: torch.randn(7, 3, 2, 7).permute(1, 2, 0, 3),
    "large, transposed": lambda: torch.randn(70, 70).mT,
}


def placed(A, device):
    """A on the device with the same layout: A.to(device) might pack the elements."""
    elements = torch.empty(0).set_(A.untyped_storage())
    return elements.to(device).as_strided(A.shape, A.stride(), A.storage_offset())


def well_separated(*shape, dtype=torch.float32):
    """Random matrices whose singular values are the numbers from 1 to k."""
    *batch, m, n = shape
    k = min(m, n)
    U, _ = torch.linalg.qr(torch.randn(*batch, m, k, dtype=torch.float64))
    V, _ = torch.linalg.qr(torch.randn(*batch, n, k, dtype=torch.float64))
    return (U * torch.arange(k, 0, -1) @ V.mT).to(dtype)


def unique_svd(results):
    """The parts of a result that do not depend on the signs of singular vectors."""
    U, S, Vh = results
    k = S.shape[-1]
    U, Vh = U[..., :k], Vh[..., :k, :]
    return U.abs(), S, Vh.abs(), U @ Vh


def unique_eigh(results):
    L, V = results
    return L, V.abs()


def svd_condition(A, *_):
    """The largest singular value over the smallest distance of two, or of one from zero if A is not square."""
    return _condition(torch.linalg.svdvals(A.detach().double()), None if A.shape[-1] == A.shape[-2] else 0.0)


def eigh_condition(A, *_):
    """The largest magnitude of an eigenvalue over the smallest distance of two, whichever triangle is read."""
    A = A.detach().double()
    return max(_condition(torch.linalg.eigvalsh(A, UPLO), None) for UPLO in "LU")


def _condition(values, another):
    if values.numel() == 0:
        return 1.0
    largest = values.abs().amax()
    if another is not None:
        values = torch.cat([values, torch.full_like(values[..., :1], another)], -1)
    gaps = values.sort(-1).values.diff()
    return max(1.0, (largest / gaps.min()).item()) if gaps.numel() else 1.0


def check_svd(A, U, S, Vh):
    """Residual and orthogonality are within 10 n eps, for a batch that is given in float32 or less."""
    A, U, S, Vh = (x.detach().cpu().double() for x in (A, U, S, Vh))
    k, bound = S.shape[-1], 10 * max(8, *A.shape[-2:]) * EPS
    assert (norm(A - U[..., :k] * S.unsqueeze(-2) @ Vh[..., :k, :]) <= bound * norm(A)).all()
    for Q in (U, Vh.mT):
        assert (norm(Q.mT @ Q - torch.eye(Q.shape[-1])) <= bound).all()
    assert (S >= 0).all() and (S.diff() <= 0).all()


def check_eigh(A, L, V, UPLO="L"):
    A, L, V = (x.detach().cpu().double() for x in (A, L, V))
    A = A.tril() + A.tril(-1).mT if UPLO == "L" else A.triu() + A.triu(1).mT
    bound = 10 * max(8, A.shape[-1]) * EPS
    assert (norm(A - V * L.unsqueeze(-2) @ V.mT) <= bound * norm(A)).all()
    assert (norm(V.mT @ V - torch.eye(V.shape[-1])) <= bound).all()
    assert (L.diff() >= 0).all()


def same_error(call, ours, theirs, device):
    """call(module, device) raises the same error with metalcore as with torch: on the CPU, in the place of MPS, or on
    MPS where metalcore left the call to PyTorch, which has no kernel there."""
    with pytest.raises(Exception) as found:  # noqa: PT011 (PyTorch may raise any error)
        call(ours, device)
    on_cpu = device == "mps" and "for the MPS device" not in str(found.value)
    assert_same_error(lambda: call(ours, device), lambda: call(theirs, "cpu" if on_cpu else device))


svd, eigh = torch.ops.metalcore.svd, torch.ops.metalcore.eigh


def check_named_svd(A, U, S, Vh, names):
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


def check_named_eigh(A, L, V, names):
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


def ten_sizes(device, first, everywhere):
    """Yields sizes of square matrices from `first` on, with the names of the matrices to check, or None for all. The
    simulator takes seconds for a matrix that a threadgroup holds, so there it gets one random matrix in ten sizes."""
    on_gpu = torch.device(device).type == "cuda"
    for n in range(first, first + 10):
        if on_gpu or n <= 32 or n % 10 == 7:
            yield n, None if on_gpu else everywhere if n <= 32 else ["random"]
