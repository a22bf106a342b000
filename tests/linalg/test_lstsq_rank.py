"""The drivers of lstsq that find the rank: LAPACK's gelsy, gelsd and gelss."""

import pytest
import torch
from derivatives import derivatives
from matrices import EPS, norm, of_spectrum

import metalcore

DRIVERS = ["gelsy", "gelsd", "gelss"]


def deficient(m, n, rank, batch=()):
    """Matrices whose first `rank` singular values go from 2 to 1, and whose others are 0."""
    k = min(m, n)
    values = torch.zeros(*batch, k, dtype=torch.float64)
    values[..., :rank] = torch.linspace(2, 1, rank, dtype=torch.float64)
    A = of_spectrum(values, max(m, n))
    return (A if m >= n else A.mT).float()


def compare(device, A, B, driver, rcond=None, tolerance=1.0):
    found = metalcore.lstsq(A.to(device), B.to(device), rcond, driver=driver)
    # The rank of what float32 holds, and not of its rounding.
    rcond = max(A.shape[-2:]) * EPS if rcond is None else rcond
    expected = torch.linalg.lstsq(A.double(), B.double(), rcond, driver=driver)
    assert [x.shape for x in found] == [x.shape for x in expected]
    assert [x.dtype for x in found] == [torch.float32, torch.float32, torch.int64, torch.float32]
    assert torch.equal(found.rank.cpu(), expected.rank)
    bound = tolerance * 40 * max(A.shape[-2:]) * EPS * norm(B.double().reshape(1, -1)).item()
    for ours, theirs in zip((found.solution, found.singular_values), (expected.solution, expected.singular_values)):
        torch.testing.assert_close(ours.cpu().double(), theirs, rtol=0, atol=bound)
    atol = bound * norm(B.double().reshape(1, -1)).item()
    torch.testing.assert_close(found.residuals.cpu().double(), expected.residuals, rtol=0, atol=atol)
    return found


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize(
    "m, n, rank", [(6, 4, 4), (6, 4, 2), (4, 6, 2), (5, 5, 3), (1, 1, 0), (40, 12, 1), (12, 40, 12), (90, 70, 35)]
)
def test_against_float64(device, m, n, rank, driver):
    compare(device, deficient(m, n, rank), torch.randn(m, 3), driver)


@pytest.mark.parametrize("driver", DRIVERS)
def test_each_matrix_has_its_rank(device, driver):
    """Batches, broadcasting, vectors, and strides."""
    A = torch.stack([deficient(8, 5, rank) for rank in (5, 0, 3)])
    found = compare(device, A, torch.randn(3, 8, 2), driver)
    assert found.rank.tolist() == [5, 0, 3] and not found.solution[1].any()
    compare(device, A[:, None], torch.randn(1, 4, 8, 2), driver)
    compare(device, A, torch.randn(3, 8), driver)
    compare(device, A.mT.contiguous().mT[::2], torch.randn(1, 8, 2), driver)


def test_many_threadgroups_share_the_columns(device):
    A = torch.stack([deficient(260, 300, 140), deficient(260, 300, 260)])
    assert metalcore.lstsq(A.to(device), A[..., :2].to(device), driver="gelsy").rank.tolist() == [140, 260]
    compare(device, A[:1], torch.randn(1, 260, 2), "gelsy")


@pytest.mark.parametrize("driver", DRIVERS)
def test_rcond(device, driver):
    """It decides between singular values of 1 and 1e-3, and R's estimated condition number is within a factor of 4."""
    A = of_spectrum(torch.tensor([1.0, 1.0, 1e-3, 1e-3], dtype=torch.float64), 7).float()
    B = torch.randn(7, 2)
    for rcond, rank in ((None, 4), (1e-4, 4), (1e-2, 2), (torch.tensor(1e-2), 2)):
        assert compare(device, A, B, driver, None if rcond is None else float(rcond), 1e3).rank.item() == rank
    assert metalcore.lstsq(A.to(device), B.to(device), -1.0, driver=driver).rank.item() == 4


def test_the_estimate_sees_what_the_diagonal_hides(device):
    """Kahan's matrix: R's diagonal stays large while its smallest singular value vanishes."""
    n, c = 30, 0.4
    s = (1 - c * c) ** 0.5
    R = (torch.eye(n) - c * torch.ones(n, n).triu(1)) * s ** torch.arange(n)[:, None] * (1 - 1e-5 * torch.arange(n))
    least = torch.linalg.svdvals(R.double())[-1].item() / torch.linalg.svdvals(R.double())[0].item()
    assert least < R[-1, -1].item() / R[0, 0].item() / 100
    assert metalcore.lstsq(R.to(device), R[:, :1].to(device), 30 * least, driver="gelsy").rank.item() < n


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("scale", [2.0**120, 2.0**-120])
def test_scale(device, driver, scale):
    A, B = deficient(9, 5, 3), torch.randn(9, 2)
    found = metalcore.lstsq((A * scale).to(device), B.to(device), driver=driver)
    expected = metalcore.lstsq(A.to(device), B.to(device), driver=driver)
    assert torch.equal(found.rank, expected.rank)
    torch.testing.assert_close(found.solution * scale, expected.solution, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize(
    "a, b",
    [
        ((0, 3), (0, 2)),
        ((3, 0), (3, 2)),
        ((0, 0), (0, 0)),
        ((0, 5, 3), (0, 5, 2)),
        ((2, 0, 3), (2, 0)),
        ((5, 3), (5, 0)),
    ],
)
def test_empty(device, a, b, driver):
    found = metalcore.lstsq(torch.randn(a, device=device), torch.randn(b, device=device), driver=driver)
    assert not found.solution.any()
    if b == (5, 0):  # which PyTorch's gelsd and gelss do not survive
        assert found.solution.shape == (3, 0) and found.rank.item() == 3
        return
    expected = torch.linalg.lstsq(torch.randn(a), torch.randn(b), driver=driver)
    assert [x.shape for x in found] == [x.shape for x in expected]
    assert torch.equal(found.rank.cpu(), expected.rank)


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("m, n, rank", [(6, 4, 4), (4, 6, 4), (6, 4, 2), (4, 6, 2)])
def test_derivatives(device, m, n, rank, driver):
    """The reference is the derivative of pinv(A) B for the constant rank. Directions that raise the rank have none, so
    that A's gradient is compared as it is, by the same formula in float64."""
    A, B = deficient(m, n, rank), torch.randn(m, 2)
    rcond = 1e-4

    def ours(A, B):
        return metalcore.lstsq(A, B, rcond, driver=driver).solution

    def by_pinv(A, B):
        return torch.linalg.pinv(A, rtol=rcond) @ B

    found = derivatives(ours, [A.to(device), B.to(device)], 2)
    expected = derivatives(by_pinv, [A.double(), B.double()], 2)
    for mine, theirs in zip(found, expected, strict=True):
        # Condition number 2, of which the second derivative takes the fourth power.
        atol = 10 * 16 * max(m, n) * EPS * max(1, theirs.abs().max().item())
        torch.testing.assert_close(mine.cpu().double(), theirs, rtol=0, atol=atol)


def test_derivatives_of_residuals_and_broadcasting(device):
    A, B = torch.randn(3, 1, 6, 4), torch.randn(1, 2, 6, 2)
    results = []
    for a, b, call in ((A.to(device), B.to(device), metalcore.lstsq), (A.double(), B.double(), torch.linalg.lstsq)):
        a, b = a.clone().requires_grad_(), b.clone().requires_grad_()
        loss = call(a, b, driver="gelsd").residuals.sum()
        results.append([g.cpu().double() for g in torch.autograd.grad(loss, (a, b))])
    for ours, theirs in zip(*results):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3 * theirs.abs().max().item())


@pytest.mark.parametrize("driver", DRIVERS)
def test_16_bits_and_nan(device, driver):
    A, B = torch.randn(2, 6, 3, device=device).bfloat16(), torch.randn(2, 6, 2, device=device).bfloat16()
    found, expected = (metalcore.lstsq(*pair, driver=driver) for pair in ((A, B), (A.float(), B.float())))
    assert found.solution.dtype == found.singular_values.dtype == torch.bfloat16 and found.rank.dtype == torch.int64
    assert torch.equal(found.solution, expected.solution.bfloat16())
    A[0, 1, 1] = torch.nan
    found = metalcore.lstsq(A.float(), B.float(), driver=driver).solution
    assert found[0].isnan().all() and torch.equal(found[1], expected.solution[1])


def test_the_cpus_kernel_agrees(device):
    A = torch.cat([deficient(5, 7, 3)[None], torch.randn(1, 5, 7), torch.zeros(1, 5, 7)])
    A = torch.cat([A, torch.randn(3, 5, 2)], -1)
    theirs = torch.ops.metalcore.qr_pivoted(A, 7, 1e-5)
    ours = [x.cpu() for x in torch.ops.metalcore.qr_pivoted(A.to(device), 7, 1e-5)]
    assert ours[2].tolist() == theirs[2].tolist() == [3, 5, 0]
    for matrix, rank in enumerate(ours[2].tolist()):
        assert torch.equal(ours[1][matrix, :rank], theirs[1][matrix, :rank])
        R, S = (  # the columns behind the pivots are in A's order
            torch.cat([W[matrix].mT[:rank, :7].triu()[:, order[matrix].argsort()], W[matrix].mT[:rank, 7:]], -1)
            for W, order, _ in (ours, theirs)
        )
        torch.testing.assert_close(R, S, rtol=0, atol=1e-5)
    torch.library.opcheck(torch.ops.metalcore.qr_pivoted.default, (A.to(device), 7, 1e-5))
    torch.library.opcheck(torch.ops.metalcore.lstsq.default, (A[1:2, :, 4:7].to(device), A[1:2, :, 7:].to(device)))
