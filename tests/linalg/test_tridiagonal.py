"""eigh_tridiagonal: LAPACK's kinds of test matrices on both sides of each plan, NaN, batches, gradients and errors."""

import pytest
import torch
from matrices import EPS, check_below

import metalcore

eigh_tridiagonal = metalcore.linalg.eigh_tridiagonal


def hard(n):
    """Yields diagonals and off-diagonals by name."""
    ones, places = torch.ones(n), torch.arange(n)
    yield "random", torch.randn(n), torch.randn(n)
    yield "Toeplitz", 2 * ones, ones
    yield "Wilkinson", (places - (n - 1) / 2).abs(), ones
    yield "glued Wilkinson", (places % 21 - 10.0).abs(), torch.where(places % 21 == 20, 1e-5, 1.0)
    yield "zero", 0 * ones, 0 * ones
    yield "equal", ones, 0 * ones
    yield "zero diagonal", 0 * ones, ones
    yield "zeros beside it", torch.randn(n), torch.where(places % 3 == 0, 0.0, torch.randn(n))
    yield "graded", 10.0 ** (-30 * places / n), 10.0 ** (-1 - 30 * places / n)
    yield "clustered", 1 + 1e-6 * torch.randn(n), 1e-6 * torch.randn(n)
    yield "large", 1e37 * torch.randn(n), 1e37 * torch.randn(n)
    yield "small", 1e-36 * torch.randn(n), 1e-36 * torch.randn(n)
    yield "negative", -ones, -1e-3 * ones


def dense(d, e):
    return d.diag_embed() + e.diag_embed(1) + e.diag_embed(-1)


@pytest.mark.parametrize("n", [1, 2, 3, 31, 32, 33, 63, 65, 129, 200])
def test_hard_matrices(device, n):
    names, d, e = zip(*hard(n))
    d, e = torch.stack(d), torch.stack(e)[:, : n - 1]
    variant = "leaf" if n <= 32 else "merges"
    assert metalcore.explain("eigh_tridiagonal", d.to(device), e.to(device)).variant == variant
    L, V = eigh_tridiagonal(d.to(device), e.to(device))
    values = eigh_tridiagonal(d.to(device), e.to(device), eigvals_only=True)
    again = eigh_tridiagonal(d.to(device), e.to(device))
    assert torch.equal(L, again.eigenvalues) and torch.equal(V, again.eigenvectors)
    T, L, V, values = dense(d, e).double(), L.cpu().double(), V.cpu().double(), values.cpu().double()
    assert (L.diff() >= 0).all() and (values.diff() >= 0).all()
    expected = torch.linalg.eigvalsh(T)
    norm = expected.abs().amax(-1).clamp(min=1e-300)
    # A row of V has a product of sums in each merge, whose roundings are random: √n of them in most.
    bound = 4 * max(n, 16) * EPS
    check_below((T @ V - V * L.unsqueeze(-2)).norm(dim=-2).amax(-1) / norm, bound, "T V = V L", names)
    check_below((V.mT @ V - torch.eye(n)).abs().amax((-2, -1)), bound, "Vᵀ V = I", names)
    check_below((L - expected).abs().amax(-1) / norm, bound, "L", names)
    check_below((values - expected).abs().amax(-1) / norm, 4 * EPS, "bisection", names)


@pytest.mark.parametrize("n", [5, 70])
def test_a_bad_matrix_spoils_no_other(device, n):
    d, e = torch.randn(4, n), torch.randn(4, n - 1)
    d[1, 3], e[2, 0] = torch.inf, torch.nan
    L, V = eigh_tridiagonal(d.to(device), e.to(device))
    values = eigh_tridiagonal(d.to(device), e.to(device), eigvals_only=True)
    alone = eigh_tridiagonal(d[[0, 3]].to(device), e[[0, 3]].to(device))
    assert torch.equal(L[[0, 3]], alone.eigenvalues) and torch.equal(V[[0, 3]], alone.eigenvectors)
    assert L[1:3].isnan().all() and V[1:3].isnan().all() and values[1:3].isnan().all()
    assert values[[0, 3]].isfinite().all()


@pytest.mark.parametrize("n", [4, 40])
def test_gradients(device, n):
    d, e = torch.randn(2, n) + 4 * torch.arange(n), torch.randn(2, n - 1)
    weights = torch.randn(2, n), torch.randn(2, n, n)

    def gradients(function, *leaves):
        leaves = [leaf.requires_grad_() for leaf in leaves]
        L, V = function(*leaves)
        of_values, of_squares = (weight.to(L) for weight in weights)
        return torch.autograd.grad((L * of_values).sum() + (V.square() * of_squares).sum(), leaves)

    found = gradients(eigh_tridiagonal, d.to(device), e.to(device))
    expected = gradients(lambda d, e: torch.linalg.eigh(dense(d, e)), d.double(), e.double())
    for ours, theirs in zip(found, expected):
        # V's error of n eps is divided by the distance of eigenvalues, about one.
        torch.testing.assert_close(ours.cpu().double(), theirs, rtol=0, atol=64 * n * EPS)
    leaf = d.to(device).requires_grad_()
    eigh_tridiagonal(leaf, e.to(device), eigvals_only=True).sum().backward()
    torch.testing.assert_close(leaf.grad.cpu(), torch.ones(2, n), rtol=0, atol=64 * n * EPS)


def test_dtypes_and_strides(device):
    d, e = torch.randn(3, 9).half(), torch.randn(3, 8).half()
    L, V = eigh_tridiagonal(d.to(device), e.to(device))
    assert L.dtype == V.dtype == torch.half
    expected = eigh_tridiagonal(d.float(), e.float()).eigenvalues
    torch.testing.assert_close(L.cpu().float(), expected, rtol=2e-3, atol=2e-3)  # half's eps
    A = torch.randn(9, 9, device=device)
    found = eigh_tridiagonal(A.diagonal(), A.diagonal(1))
    alone = eigh_tridiagonal(A.diagonal().contiguous(), A.diagonal(1).contiguous())
    assert torch.equal(found.eigenvalues, alone.eigenvalues)
    assert eigh_tridiagonal(d[:0].to(device), e[:0].to(device)).eigenvectors.shape == (0, 9, 9)


def test_errors(device):
    d = torch.ones(2, 4, device=device)
    with pytest.raises(ValueError, match=r"eigh_tridiagonal: e must have shape \(2, 3\)"):
        eigh_tridiagonal(d, d)
    with pytest.raises(ValueError, match="a diagonal d of at least one entry"):
        eigh_tridiagonal(d[0, 0], d[0])
    with pytest.raises(ValueError, match="e must be torch.float32 on"):
        eigh_tridiagonal(d, d[:, :3].half())
    with pytest.raises(TypeError, match="e must be a tensor, not int"):
        eigh_tridiagonal(d, 1)
