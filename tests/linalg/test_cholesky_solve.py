"""cholesky_solve against float64, and as a replacement for torch.cholesky_solve."""

import pytest
import torch
from cholesky_cases import random
from matrices import EPS, norm
from opinfo import check_samples
from references import check_operator

import metalcore


def check(B, L, X, upper):
    """A small residual: ‖B - A X‖ <= 10 n eps ‖L‖² ‖X‖ (Higham 2002, 10.1)."""
    B, L, X = B.double(), L.double(), X.double()
    A = L.triu().mT @ L.triu() if upper else L.tril() @ L.tril().mT
    bound = 10 * L.shape[-1] * EPS * norm(L).square() * norm(X)
    assert (norm(B - A @ X) <= bound).all()


@pytest.mark.parametrize("upper", [False, True])
@pytest.mark.parametrize(
    "n, columns", [(1, 1), (4, 1), (7, 9), (20, 3), (32, 40), (50, 1), (100, 70), (130, 5), (270, 8)]
)
def test_systems(device, n, columns, upper):
    L = torch.linalg.cholesky(random(3, n, n).double(), upper=upper).float()
    L += torch.randn(n, n).tril(-1) if upper else torch.randn(n, n).triu(1)  # no function may read these
    B = torch.randn(3, n, columns)
    X = metalcore.cholesky_solve(B.to(device), L.to(device), upper)
    assert X.is_contiguous() and X.device.type == torch.device(device).type
    check(B, L, X.cpu(), upper)


@pytest.mark.parametrize(
    "B, L",
    [
        ((3, 1, 5, 2), (4, 5, 5)),
        ((5, 2), (4, 5, 5)),
        ((2, 5, 2), (5, 5)),
        ((5, 0), (5, 5)),
        ((0, 2), (0, 0)),
        ((3, 0, 2), (0, 0)),
        ((0, 5, 2), (5, 5)),
        ((2, 0, 5, 2), (5, 5)),
    ],
)
def test_batches_are_broadcast(device, B, L):
    B, L = torch.randn(B), torch.linalg.cholesky(random(*L)) if 0 not in L else torch.empty(L)
    X = metalcore.cholesky_solve(B.to(device), L.to(device)).cpu()
    expected = torch.cholesky_solve(B.double(), L.double())
    assert X.shape == expected.shape
    if X.numel():
        check(B.expand(X.shape), L.expand(*X.shape[:-2], *L.shape[-2:]), X, False)


def test_batches_that_do_not_fit(device):
    with pytest.raises(RuntimeError, match="must match the size of tensor"):
        metalcore.cholesky_solve(torch.randn(2, 3, 1, device=device), torch.randn(4, 3, 3, device=device))


@pytest.mark.parametrize("n", [2, 10, 50])
def test_nan_stays_in_its_matrix(device, n):
    B, L = torch.randn(4, n, 2), torch.linalg.cholesky(random(4, n, n))
    B[1, 0, 0] = float("nan")
    L[2, 1, 0] = float("inf")
    X = metalcore.cholesky_solve(B.to(device), L.to(device)).cpu()
    assert [bool(x.isfinite().all()) for x in X] == [True, False, False, True]


def test_opinfo(device):
    check_samples(metalcore.cholesky_solve, "cholesky_solve", device, torch.float32)


def test_gradcheck_of_the_formulas():
    B = torch.randn(3, 1, 4, 2, dtype=torch.float64, requires_grad=True)
    for upper in (False, True):
        L = torch.linalg.cholesky(random(2, 4, 4).double(), upper=upper).requires_grad_()
        part = torch.triu if upper else torch.tril
        solve = lambda B, L: torch.ops.metalcore.cholesky_solve(B, part(L), upper)  # noqa: E731
        assert torch.autograd.gradcheck(solve, (B, L))
        assert torch.autograd.gradgradcheck(solve, (B, L))


@pytest.mark.parametrize("wanted", [(True, False), (False, True)])
def test_only_the_gradients_that_are_needed(device, wanted):
    B, L = torch.randn(3, 5, 2, device=device), metalcore.cholesky(random(5, 5).to(device))
    inputs = [x.requires_grad_(needed) for x, needed in zip((B, L), wanted)]
    metalcore.cholesky_solve(*inputs).sum().backward()
    assert [x.grad is not None for x in inputs] == list(wanted)


@pytest.mark.parametrize("where", ["cpu", "device"])
def test_opcheck(device, where):
    where = device if where == "device" else "cpu"
    B, L = torch.randn(2, 1, 5, 3, device=where), torch.linalg.cholesky(random(3, 5, 5)).to(where)
    check_operator(torch.ops.metalcore.cholesky_solve, B.requires_grad_(), L.requires_grad_(), False)


def test_explain():
    plan = metalcore.explain("cholesky_solve", (7, 40, 3), (7, 40, 40))
    once = metalcore.explain("solve_triangular", (7, 40, 40), (7, 40, 3), upper=False).steps
    assert [step[:4] for step in plan.steps] == 2 * [step[:4] for step in once]
    with pytest.raises(ValueError, match="needs the shape of L"):
        metalcore.explain("cholesky_solve", (40, 3))
