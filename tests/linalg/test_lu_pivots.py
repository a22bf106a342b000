"""Pivots given to lu_solve: whatever they are, nothing outside of the matrix is read."""

import pytest
import torch
from matrices import EPS

import metalcore

SIZES = [1, 3, 5, 8, 9, 16, 17, 32, 33, 70]
BAD = {"zero": 0, "negative": -3, "one too many": None, "far": 2**31 - 1, "least": -(2**31)}
WAYS = [(True, False), (True, True), (False, False), (False, True)]
BATCH = 6  # on NVIDIA GPUs PyTorch's op takes up to four large matrices


def systems(n):
    A = torch.randn(BATCH, n, n) + 2 * n**0.5 * torch.eye(n)
    return *torch.linalg.lu_factor(A), torch.randn(BATCH, n, n)


def check_one_bad(device, n, value, left, adjoint):
    """The matrix with the bad pivot has NaN, and the others are right."""
    LU, pivots, B = systems(n)
    expected = torch.linalg.lu_solve(LU, pivots, B, left=left, adjoint=adjoint)
    pivots[2, n // 2] = n + 1 if value is None else value
    X = metalcore.lu_solve(LU.to(device), pivots.to(device), B.to(device), left=left, adjoint=adjoint).cpu()
    assert X[2].isnan().all()
    others = [0, 1, 3, 4, 5]
    torch.testing.assert_close(X[others], expected[others], rtol=100 * n * EPS, atol=100 * n * EPS)


@pytest.mark.parametrize("left, adjoint", WAYS)
@pytest.mark.parametrize("n", SIZES)
def test_a_row_that_is_not_there(device, n, left, adjoint):
    for value in BAD.values():
        check_one_bad(device, n, value, left, adjoint)


@pytest.mark.only_on("simulator")
@pytest.mark.parametrize("n", [8, 20, 40])
def test_nothing_outside_is_read(device, n):
    with metalcore.simulator.checking():
        for left, adjoint in WAYS:
            check_one_bad(device, n, None, left, adjoint)
            check_one_bad(device, n, 0, left, adjoint)


@pytest.mark.parametrize("n", [4, 32, 33])
def test_the_derivative(device, n):
    LU, pivots, B = systems(n)
    pivots[2, 0] = -7
    LU, B = (tensor.to(device).requires_grad_() for tensor in (LU, B))
    found = torch.autograd.grad(metalcore.lu_solve(LU, pivots.to(device), B).sum(), (LU, B))
    for gradient in found:
        assert gradient[2].isnan().all() or gradient is found[0]  # each triangle may have none
        assert gradient[3].isfinite().all() and not gradient[2].isfinite().all()


@pytest.mark.parametrize("n", [4, 16, 33])
def test_any_exchanges_of_rows_that_are_there(device, n):
    """Repeated pivots, pivots of rows above, and pivots with gaps in memory."""
    LU, _, B = systems(n)
    pivots = torch.randint(1, n + 1, (BATCH, 2 * n), dtype=torch.int32)[:, ::2]
    for left, adjoint in WAYS:
        X = metalcore.lu_solve(LU.to(device), pivots.to(device), B.to(device), left=left, adjoint=adjoint)
        expected = torch.linalg.lu_solve(LU, pivots, B, left=left, adjoint=adjoint)
        torch.testing.assert_close(X.cpu(), expected, rtol=100 * n * EPS, atol=100 * n * EPS)
        gaps = torch.empty(BATCH, 2 * n, dtype=torch.int32, device=device)[:, ::2].copy_(pivots)
        assert torch.equal(metalcore.lu_solve(LU.to(device), gaps, B.to(device), left=left, adjoint=adjoint), X)


@pytest.mark.parametrize(
    "change",
    [
        lambda pivots: pivots.long(),
        lambda pivots: pivots.float(),
        lambda pivots: pivots[:, 1:],
        lambda pivots: pivots[:4],
        lambda pivots: pivots.mT,
    ],
    ids=["int64", "float", "short", "batch", "turned"],
)
def test_other_pivots_are_refused(device, change):
    LU, pivots, B = (tensor.to(device) for tensor in systems(8))
    with pytest.raises(RuntimeError, match="pivots"):
        metalcore.lu_solve(LU, change(pivots), B)
