"""Derivatives of svd and eigh where values repeat, by `broadening`."""

import pytest
import torch

import metalcore

ORTHOGONAL = torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))[0]
REPEATED = torch.tensor([3.0, 3.0, 3.0, 1.0, 1.0, 1.0], dtype=torch.float64)
WEIGHTS = torch.linspace(-1, 1, 36, dtype=torch.float64).view(6, 6)


def tall():
    """A 6x4 matrix with two singular values of 2 and two of 1."""
    return ORTHOGONAL[:, :4] * torch.tensor([2.0, 2.0, 1.0, 1.0], dtype=torch.float64) @ ORTHOGONAL[:4, :4].T


def symmetric():
    return ORTHOGONAL * REPEATED @ ORTHOGONAL.T


def by_svd(A, weights, broadening):
    """It depends on the space of the larger singular values only, and on its share of A."""
    U, S, Vh = metalcore.svd(A, full_matrices=False, broadening=broadening)
    return (weights[: A.shape[-2], : A.shape[-2]] * (U[..., :2] @ U[..., :2].mT)).sum() + (
        weights[:4, :4] * (Vh[..., :2, :].mT @ (S[..., :2, None] * Vh[..., :2, :]))
    ).sum()


def by_eigh(A, weights, broadening):
    L, V = metalcore.eigh((A + A.mT) / 2, broadening=broadening)
    return (weights * (V[..., :3] @ (L[..., :3].sum() * V[..., :3]).mT)).sum()


@pytest.mark.parametrize("call, matrix", [(by_svd, tall), (by_eigh, symmetric)])
def test_functions_of_invariant_spaces(device, call, matrix):
    """A broadening of b changes the factor of a gap g by (b * largest / g)² of it: 9e-12 at most here."""
    A = matrix().requires_grad_()
    assert torch.autograd.gradcheck(lambda A: call(A, WEIGHTS, 1e-6), (A,), atol=1e-6, rtol=1e-6)
    (expected,) = torch.autograd.grad(call(A, WEIGHTS, 1e-6), A)
    ours = A.detach().float().to(device).requires_grad_()
    (found,) = torch.autograd.grad(call(ours, WEIGHTS.float().to(device), 1e-4), ours)
    # (1e-4 * 3)² of broadening, and rounding of n eps over the gap of 1, for terms of up to 20.
    torch.testing.assert_close(found.cpu().double(), expected, rtol=0, atol=20 * (9e-8 + 6 * 6e-8))


@pytest.mark.parametrize(
    "A",
    [
        torch.eye(4),
        torch.zeros(4, 4),
        torch.zeros(6, 4),
        torch.ones(4, 6),
        torch.eye(6)[:, :3] * 1e30,
        torch.eye(4) * 1e-30,
    ],
    ids=["identity", "zeros", "tall zeros", "rank one", "large", "small"],
)
def test_no_derivative_overflows(device, A):
    """Without broadening all of them have NaN, infinity or nearly so. The bound: each factor is at most 1 / 2d."""
    for call in (metalcore.svd, metalcore.eigh)[: 1 + (A.shape[-2] == A.shape[-1])]:
        results = []
        for options in ({}, {"broadening": 1e-3}):
            B = A.to(device).requires_grad_()
            parts = call(B, **({"full_matrices": False} if call is metalcore.svd else {}), **options)
            # Weights, so that no term cancels.
            loss = sum(
                (part * torch.arange(1.0, part.numel() + 1, device=device).view(part.shape)).sum() for part in parts
            )
            results.append(torch.autograd.grad(loss, B)[0].cpu())
        largest = torch.linalg.matrix_norm(A.double(), 2).item() or 1.0
        assert results[1].isfinite().all()
        assert results[1].double().abs().max().item() <= 1e3 / largest * 24**2 * 6 + 24
        assert not (results[0].abs() < 1e30).all()  # a GPU's rounding errors may lie between equal values


def test_second_derivatives_and_16_bits(device):
    A = torch.eye(4, device=device).requires_grad_()
    (first,) = torch.autograd.grad(metalcore.svd(A, broadening=0.1).U.square().sum(), A, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum() + first.sum(), A)
    assert second.isfinite().all()
    half = torch.eye(4, device=device, dtype=torch.bfloat16).requires_grad_()
    (gradient,) = torch.autograd.grad(metalcore.eigh(half, broadening=0.1).eigenvectors.float().exp().sum(), half)
    assert gradient.dtype == torch.bfloat16 and gradient.isfinite().all()


def test_without_repeated_values_it_is_pytorchs_derivative(device):
    A = torch.randn(3, 5, 4, dtype=torch.float64)
    A = A + 3 * torch.eye(5, 4)
    expected = torch.autograd.grad(by_svd(A.requires_grad_(), WEIGHTS, 0.0), A)[0]
    found = torch.autograd.grad(by_svd(A, WEIGHTS, 1e-9), A)[0]
    torch.testing.assert_close(found, expected)
    assert not metalcore.svd(A.detach().float().to(device), broadening=1e-3).S.requires_grad


@pytest.mark.parametrize("call", [metalcore.svd, metalcore.eigh])
def test_errors(device, call):
    A = torch.eye(3, device=device)
    for wrong in (-1.0, float("inf"), float("nan"), True, "1"):
        with pytest.raises(ValueError, match=f"metalcore.{call.__name__}: broadening must be a finite number"):
            call(A, broadening=wrong)
    with pytest.raises(ValueError, match="broadening is for real matrices, and A is torch.complex64"):
        call(torch.eye(3, dtype=torch.complex64), broadening=0.1)
