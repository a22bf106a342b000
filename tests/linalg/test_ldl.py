"""ldl_factor, ldl_factor_ex and ldl_solve: LAPACK's pivots and factors, residuals, on both sides of each plan."""

import pytest
import torch
from matrices import EPS, check_below
from opinfo import check_samples

import metalcore

norm = torch.linalg.matrix_norm
KINDS = [(False, False), (True, False), (True, True)]  # complex, hermitian


def hard(n, is_complex, hermitian):
    """Symmetric matrices by name, whose results LAPACK's choice of pivots decides."""
    A = torch.randn(4, n, n, dtype=torch.complex64 if is_complex else torch.float32)
    A = A + (A.mH if hermitian else A.mT)
    A[1].diagonal().zero_()  # pairs of rows
    scale = torch.logspace(-3, 3, n)
    return {
        "random": A[0],
        "without a diagonal": A[1],
        "graded": scale * A[2] * scale[:, None],
        "exchange": torch.eye(n, dtype=A.dtype).flip(0),
        "zero": torch.zeros_like(A[3]),
        "arrow": torch.eye(n, dtype=A.dtype).index_fill(0, torch.tensor([n - 1]), 3).tril()
        + torch.eye(n, dtype=A.dtype).index_fill(0, torch.tensor([n - 1]), 3).tril(-1).mT,
    }


@pytest.mark.parametrize("is_complex, hermitian", KINDS)
@pytest.mark.parametrize("n", [1, 2, 3, 7, 32, 33, 60, 61, 64, 65])
def test_factors_are_those_of_lapack(device, n, is_complex, hermitian):
    named = hard(n, is_complex, hermitian)
    A, names = torch.stack(list(named.values())), list(named)
    upper = torch.randn_like(A).triu(1)  # nobody reads it
    given = (A.tril() + upper).to(device)
    variant = "simd" if n <= 32 else "block" if n <= (60 if is_complex else 64) else "device"
    assert metalcore.explain("ldl_factor_ex", given).variant == variant
    LD, pivots, info = metalcore.ldl_factor_ex(given, hermitian=hermitian)
    expected = torch.linalg.ldl_factor_ex(A, hermitian=hermitian)
    assert torch.equal(pivots.cpu(), expected.pivots) and torch.equal(info.cpu(), expected.info)
    assert LD.is_contiguous() and not LD.triu(1).any()
    B = torch.randn(len(names), n, 6, dtype=A.dtype)
    X = metalcore.ldl_solve(LD, pivots, B.to(device), hermitian=hermitian).cpu()
    regular = (expected.info == 0).nonzero().flatten().tolist()
    residual = norm(A @ X - B)[regular] / (norm(A) * norm(X) + norm(B))[regular]
    # Bunch and Kaufman's growth is small here: |L| |D| |Lᵀ| is a few times |A|, with n roundings of it.
    check_below(residual, 4 * max(n, 8) * EPS, "A X = B", [names[i] for i in regular])


def test_a_bad_matrix_spoils_no_other(device):
    A = torch.randn(3, 9, 9)
    A[1, 4, 2] = torch.nan
    LD, pivots, _ = metalcore.ldl_factor_ex(A.to(device))
    alone = metalcore.ldl_factor_ex(A[[0, 2]].to(device))
    assert torch.equal(LD[[0, 2]], alone.LD) and torch.equal(pivots[[0, 2]], alone.pivots)
    assert LD[1].isnan().any()
    wild = pivots.clone()
    wild[1] = torch.tensor([-2147483648, 2147483647, 0, 99, -99, 5, -5, 1, -1], device=device)
    B = torch.randn(3, 9, 1, device=device)
    X = metalcore.ldl_solve(LD, wild, B)  # nothing outside of the matrix is read
    assert torch.equal(X[[0, 2]], metalcore.ldl_solve(*alone[:2], B[[0, 2]]))


@pytest.mark.parametrize("is_complex, hermitian", KINDS)
def test_solve_broadcasts_and_has_gradients(device, is_complex, hermitian):
    A = torch.randn(2, 1, 6, 6, dtype=torch.complex64 if is_complex else torch.float32)
    A = A + (A.mH if hermitian else A.mT)
    LD, pivots = metalcore.ldl_factor(A.to(device), hermitian=hermitian)
    B, direction = torch.randn(3, 6, 5, dtype=A.dtype), torch.randn(2, 3, 6, 5, dtype=A.dtype)
    right = B.to(device).requires_grad_()
    X = metalcore.ldl_solve(LD, pivots.long(), right, hermitian=hermitian)
    torch.testing.assert_close(X.cpu(), torch.linalg.solve(A, B), rtol=1e-3, atol=1e-3)
    (gradient,) = torch.autograd.grad(X, right, direction.to(device))
    expected = torch.linalg.solve(A.mH, direction).sum(0)
    torch.testing.assert_close(gradient.cpu(), expected, rtol=1e-3, atol=1e-3)


def test_arguments(device):
    A = torch.randn(3, 5, 5)
    A = A + A.mT
    strided = A.to(device).repeat_interleave(2, -1)[..., ::2]
    expected = metalcore.ldl_factor_ex(A.to(device))
    assert torch.equal(metalcore.ldl_factor_ex(strided).LD, expected.LD)
    assert metalcore.ldl_factor(A.half().to(device)).LD.dtype == torch.float16
    for shape in ((0, 3, 3), (2, 0, 0)):
        LD, pivots, info = metalcore.ldl_factor_ex(torch.ones(shape, device=device))
        assert LD.shape == shape and pivots.shape == shape[:-1] and not info.any()
        assert metalcore.ldl_solve(LD, pivots, LD).shape == shape
    with pytest.raises(RuntimeError, match="torch.linalg.ldl_factor"):
        metalcore.ldl_factor(torch.zeros(2, 2, device=device))
    with pytest.raises(RuntimeError, match="A must be batches of square matrices, but they are 3 by 2 matrices"):
        metalcore.ldl_factor(torch.zeros(3, 2, device=device))
    with pytest.raises(RuntimeError, match="Incompatible matrix sizes"):
        metalcore.ldl_solve(expected.LD, expected.pivots, torch.ones(4, 1, device=device))


def test_as_pytorch_tests_it(device):
    def lower(LD, pivots, info=None):
        return [LD]

    check_samples(
        metalcore.ldl_factor_ex,
        "linalg.ldl_factor_ex",
        device,
        torch.float32,
        orders=0,
        results=lambda results: lower(*results),
        condition=lambda *_: 30.0,  # its matrices are random, and entries of L are large
    )
