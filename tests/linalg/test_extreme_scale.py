"""Matrices whose norms leave float32's range, above or below, on each side of every boundary of the plans."""

import pytest
import torch
from references import check_operator, flushes_subnormals, smallest

import metalcore

LARGEST = torch.finfo(torch.float32).max
# Where subnormal numbers are zero, a matrix and its results keep their digits down to here.
SMALL, SMALLEST = (2.0**-100, 2.0**-100) if flushes_subnormals() else (2.0**-124, 2.0**-136)
# The magnitudes of the largest entry.
SCALES = {"largest": LARGEST, "a quarter": LARGEST / 4, "small": SMALL, "smallest": SMALLEST}
# (rows, columns): Jacobi by a simdgroup and a threadgroup, after QR by a simdgroup, a threadgroup and in blocks, TSQR,
# by blocks, and all of these of full matrices.
SHAPES = [
    (1, 1),
    (2, 1),
    (8, 8),
    (32, 32),
    (33, 8),
    (33, 33),
    (64, 64),
    (65, 65),
    (128, 128),
    (129, 129),
    (200, 140),
    (1200, 40),
    (2100, 12),
]
FEW = [(2, 1), (33, 8), (65, 65), (130, 129)]
each_scale = pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)


def made(scale, *shape):
    A = torch.rand(shape, dtype=torch.float64) * 2 - 1
    return (A * (scale / A.abs().max())).float()


def close(actual, expected, tolerance):
    """The values in units of the largest; a value that overflows is infinite."""
    representable = expected.float().double()
    infinite = representable.isinf()
    assert torch.equal(actual[infinite].double(), representable[infinite])
    error = (actual.double() - representable)[~infinite].abs()
    # The precision of subnormal numbers is absolute.
    assert (error <= tolerance * expected.abs().max() + 2 * smallest(torch.float32)).all()


def check_svd(A, U, S, Vh, full):
    k = S.shape[-1]
    exact = A.double()
    close(S, torch.linalg.svdvals(exact), 1e-5)
    for vectors in (U.double(), Vh.double().mT):
        assert (vectors.mT @ vectors - torch.eye(vectors.shape[-1])).abs().max() < 1e-4
        assert not full or vectors.shape[0] == vectors.shape[1]
    values = torch.linalg.svdvals(exact)
    rebuilt = (U.double()[:, :k] * (values / values[0])) @ Vh.double()[:k]
    assert (rebuilt - exact / values[0]).abs().max() < 1e-4


def check_all_of_svd(A, device):
    given = A.to(device)
    check_svd(A, *[x.cpu() for x in metalcore.svd(given, False)], full=False)
    close(metalcore.svdvals(given).cpu(), torch.linalg.svdvals(A.double()), 1e-5)
    if max(A.shape) <= 100 and A.shape[0] != A.shape[1]:
        check_svd(A, *[x.cpu() for x in metalcore.svd(given)], full=True)


@pytest.mark.parametrize("m, n", SHAPES)
def test_svd_of_norms_that_overflow(device, m, n):
    check_all_of_svd(made(LARGEST, m, n), device)


@each_scale
@pytest.mark.parametrize("m, n", FEW)
def test_svd(device, m, n, scale):
    check_all_of_svd(made(scale, n, m), device)


def test_svd_scales_each_matrix_of_a_batch(device):
    for m, n in ((70, 30), (30, 70), (140, 130)):
        A = torch.stack([made(scale, m, n) for scale in (LARGEST, 1.0, SMALLEST)])
        A = torch.cat([A, torch.zeros(1, m, n), torch.full((1, m, n), float("nan"))])
        U, S, Vh = (x.cpu() for x in metalcore.svd(A.to(device), False))
        for i in range(3):
            check_svd(A[i], U[i], S[i], Vh[i], full=False)
        assert S[3].max() == 0 and S[4].isnan().all()


@each_scale
@pytest.mark.parametrize("n", [8, 33, 64, 129])
def test_eigh(device, n, scale):
    A = made(scale, n, n)
    A = A.tril() + A.tril(-1).mT
    L, V = (x.cpu() for x in metalcore.eigh(A.to(device)))
    expected = torch.linalg.eigvalsh(A.double())
    close(L, expected, 1e-5)
    V = V.double()
    assert (V.mT @ V - torch.eye(n)).abs().max() < 1e-4
    largest = expected.abs().max()
    assert ((V * (expected / largest)) @ V.mT - A.double() / largest).abs().max() < 1e-4


@each_scale
@pytest.mark.parametrize("m, n", [(8, 8), (33, 20), (100, 65), (1200, 40)])
def test_lstsq(device, m, n, scale):
    for A in (made(scale, m, n), made(scale, n, m)):
        A = A + torch.eye(*A.shape) * scale / 2 if scale < LARGEST / 2 else A
        B = made(min(max(scale, 2.0**-100), LARGEST / 1000), A.shape[0], 2)
        X = metalcore.lstsq(A.to(device), B.to(device)).solution.cpu().double()
        expected = torch.linalg.lstsq(A.double(), B.double(), driver="gelsd").solution
        assert (X - expected).abs().max() < 1e-3 * expected.abs().max()


def test_the_derivative_of_lstsq_takes_the_scale_along(device):
    A, B = made(2.0**-60, 12, 5), made(1.0, 12, 2)
    ours, theirs = (
        given.to(kind).requires_grad_() for given, kind in ((A.to(device), torch.float32), (A, torch.float64))
    )
    (found,) = torch.autograd.grad(metalcore.lstsq(ours, B.to(device)).solution.sum(), ours)
    (expected,) = torch.autograd.grad(torch.linalg.lstsq(theirs, B.double()).solution.sum(), theirs)
    assert (found.cpu().double() - expected).abs().max() < 1e-4 * expected.abs().max()


@pytest.mark.parametrize("m, n", [(8, 8), (65, 65), (130, 70)])
def test_what_is_made_of_singular_values_agrees_with_torch(device, m, n):
    """Where the values overflow, PyTorch's cond is infinite, and its pinv zero."""
    for scale in (LARGEST, SMALL):
        A = made(scale, m, n)
        assert metalcore.matrix_rank(A.to(device)).item() == torch.linalg.matrix_rank(A).item()
        ours, theirs = metalcore.cond(A.to(device)).cpu(), torch.linalg.cond(A)
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=0, equal_nan=True)


@pytest.mark.parametrize("m, n", [(5, 3), (3, 5), (0, 3), (3, 0)])
def test_qr_scaled_on_every_device(device, m, n):
    """The operator that lstsq takes: the CPU's kernel, the fake one and the derivative agree with the GPU's."""
    operator = torch.ops.metalcore.qr_scaled
    A = torch.randn(2, m, n) * torch.tensor([1e30, SMALLEST])[:, None, None]
    Q, R, scale = operator(A.to(device))
    for ours, cpus in zip((Q, R, scale), operator(A)):
        torch.testing.assert_close(ours.cpu(), cpus, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close((Q @ R).cpu(), A * scale.cpu(), rtol=1e-5, atol=1e-5)
    check_operator(operator, torch.randn(2, m, n, device=device, requires_grad=True))
    wide = torch.randn(2, m, n, dtype=torch.float64, requires_grad=True)
    assert m * n == 0 or torch.autograd.gradcheck(lambda A: operator(A)[:2], wide)


@pytest.mark.only_on("simulator")
@pytest.mark.parametrize("m, n", [(66, 20), (3, 70)])
def test_kernels_are_clean_in_checking_mode(device, m, n):
    A = made(LARGEST, 2, m, n).mT.contiguous().mT.to(device)
    with metalcore.simulator.checking():
        close(metalcore.svd(A, False).S.cpu(), torch.linalg.svdvals(A.cpu().double()), 1e-5)
        assert metalcore.lstsq(A, A[..., :1]).solution.isfinite().any()
