"""svd of large matrices by the polar decomposition: hard matrices, tall and wide ones, NaN."""

import pytest
import torch
from matrices import EPS, check_below

import metalcore
from metalcore import _C

N = 129


@pytest.fixture(autouse=True)
def polar(device):
    """All matrices of more than 128 columns go by the polar decomposition."""
    _C.use_measured(device, _C.gpu_family(device), [("jacobi", "polar_columns", [1])])
    yield
    _C.use_measured(device, _C.gpu_family(device), [])


def orthogonal(n):
    return torch.linalg.qr(torch.randn(n, n, dtype=torch.float64))[0]


def hard():
    """Yields square matrices by name."""
    places, half = torch.arange(N), N // 2
    yield "random", torch.randn(N, N)
    yield "graded", (orthogonal(N) * 10.0 ** (-10 * places / N) @ orthogonal(N)).float()
    yield "rank half", (orthogonal(N)[:, :half] @ orthogonal(N)[:half]).float()
    yield "zero columns", torch.randn(N, N) * (places % 3 > 0)
    yield "identity, then zeros", torch.diag((places < half).float())
    yield "nilpotent", torch.eye(N).roll(1, 0).tril()
    yield "zero", torch.zeros(N, N)
    yield "large", 1e37 * torch.randn(N, N)
    yield "small", 1e-37 * torch.randn(N, N)


def check(A, results, names):
    """Checks results against float64 where the entries differ from the matrix by a few roundings of its norm."""
    U, S, Vh = (result.cpu().double() for result in results)
    A = A.double()
    expected = torch.linalg.svdvals(A)
    norm = expected[:, 0].clamp(min=1e-300)
    k = S.shape[-1]
    # The weight of a step, of up to 90, multiplies roundings, and the product with x divides by its root, about 10.
    bound = (10 + 4 * k**0.5) * EPS
    residual = torch.linalg.matrix_norm((U[..., :k] * S.unsqueeze(-2)) @ Vh[..., :k, :] - A, 2)
    check_below(residual / norm, 4 * bound, "A = U S Vᴴ", names)
    check_below((S - expected).abs().amax(-1) / norm, bound, "S", names)
    for name, Q in (("U", U), ("V", Vh.mT)):
        check_below((Q.mT @ Q - torch.eye(Q.shape[-1])).abs().amax((-2, -1)), bound, f"{name} is orthonormal", names)
    assert (S.diff() <= 0).all() and (S >= 0).all()


def test_hard_matrices(device):
    names, A = zip(*hard())
    A = torch.stack(A)
    assert metalcore.explain("svd", A.to(device)).variant == "polar"
    check(A, metalcore.svd(A.to(device)), names)


@pytest.mark.parametrize("m, n, full_matrices", [(150, N, False), (150, N, True), (N, 150, False), (N, 150, True)])
def test_tall_and_wide(device, m, n, full_matrices):
    A = torch.randn(1, m, n)
    results = metalcore.svd(A.to(device), full_matrices=full_matrices)
    check(A, results, ["random"])
    values = metalcore.svdvals(A.to(device)).cpu()
    torch.testing.assert_close(values, results[1].cpu(), rtol=0, atol=64 * EPS * float(values[0, 0]))


def test_a_bad_matrix_spoils_no_other(device):
    A = torch.randn(2, N, N)
    A[1, 4, 2] = torch.nan
    results = metalcore.svd(A.to(device))
    check(A[:1], [result[:1] for result in results], ["random"])
    assert all(result[1].isnan().all() for result in results)
