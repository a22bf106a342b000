"""svd_lowrank and pca_lowrank: results for matrices with few large singular values, and as torch's namesakes."""

import pytest
import torch
from matrices import EPS, norm, of_spectrum
from opinfo import check_samples
from spectral import LAYOUTS, placed, same_error

import metalcore


def product(U, S, V):
    return U * S.unsqueeze(-2) @ V.mT


def unique(results):
    U, S, V = results
    return U @ V.mT, S


@pytest.mark.parametrize("shape", [(40, 30), (30, 40), (3, 50, 20), (200, 300), (6, 6)])
def test_of_low_rank(device, shape):
    """The whole matrix is found where q is the rank or more."""
    *batch, m, n = shape
    A = (torch.randn(*batch, m, 4, dtype=torch.float64) @ torch.randn(*batch, 4, n, dtype=torch.float64)).float()
    for q in (4, 6):
        U, S, V = metalcore.svd_lowrank(A.to(device), q)
        assert U.shape == (*batch, m, q) and S.shape == (*batch, q) and V.shape == (*batch, n, q)
        U, S, V = (x.cpu().double() for x in (U, S, V))
        assert norm(product(U, S, V) - A).max() <= 10 * max(m, n) * EPS * norm(A).max()
        for Q in (U, V):
            assert norm(Q.mT @ Q - torch.eye(q)).max() <= 10 * max(m, n) * EPS
        expected = torch.linalg.svdvals(A.double())[..., :q]
        assert ((S - expected).abs() <= 10 * max(m, n) * EPS * expected[..., :1]).all()


@pytest.mark.parametrize("niter", [0, 1, 2])
def test_of_values_that_decay(device, niter):
    """The error is at most ten times the bound on its expectation (Halko, Martinsson, Tropp 2011, corollary 10.10)."""
    values = 2.0 ** -torch.arange(60)
    A, k, q = of_spectrum(values, 90).float(), 5, 10
    found = product(*metalcore.svd_lowrank(A.to(device), q, niter)).cpu()
    error = torch.linalg.matrix_norm(A.double() - found, 2)
    power = 2 * niter + 1
    ratio = 1 + (k / (q - k - 1)) ** 0.5 + 2.718 * q**0.5 / (q - k) * (60 - k) ** 0.5
    assert error <= 10 * ratio ** (1 / power) * values[k] + 10 * 90 * EPS


@pytest.mark.parametrize("shape", [(30, 20), (20, 30), (2, 12, 12)])
def test_of_a_difference(device, shape):
    """With the same random numbers M acts as if it were subtracted, except for rounding; a full q finds everything."""
    A, q = torch.randn(shape), min(shape[-2:])
    for M in (torch.randn(shape), torch.randn(shape[-1]), torch.randn(1, shape[-1])):
        found = metalcore.svd_lowrank(A.to(device), q, M=M.to(device))
        assert norm(product(*found).cpu() - (A - M)).max() <= 10 * max(shape) * EPS * norm(A - M).max()


def test_is_the_namesake(device):
    assert metalcore.svd_lowrank is metalcore.linalg.svd_lowrank
    assert metalcore.pca_lowrank is metalcore.linalg.pca_lowrank
    A = torch.randn(20, 9, device=device)
    assert [x.shape for x in metalcore.svd_lowrank(A)] == [(20, 6), (6,), (9, 6)]
    assert [x.shape for x in metalcore.svd_lowrank(A, None, None)] == [(20, 6), (6,), (9, 6)]
    for q in (0, 9, 12):
        assert [x.shape for x in metalcore.svd_lowrank(A, q)] == [x.shape for x in torch.svd_lowrank(A.cpu(), q)]
    # The random numbers are those that torch draws.
    torch.manual_seed(1)
    ours = metalcore.svd_lowrank(A, 3, 0)[1]
    torch.manual_seed(1)
    theirs = torch.svd_lowrank(A, 3, 0)[1]
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=0)


def test_pca(device):
    A = torch.randn(30, 8) * 2.0 ** -torch.arange(8) + torch.arange(8)
    centered = A.double() - A.double().mean(0)
    U, S, V = (x.cpu().double() for x in metalcore.pca_lowrank(A.to(device), q=8))
    assert norm(product(U, S, V) - centered) <= 10 * 30 * EPS * norm(A)
    variances = torch.linalg.eigvalsh(torch.cov(A.T.double())).flip(0)
    torch.testing.assert_close(S**2 / 29, variances, rtol=0, atol=10 * 30 * EPS * variances[0].item())
    assert [x.shape for x in metalcore.pca_lowrank(A[:4].to(device))] == [(4, 4), (4,), (8, 4)]
    torch.testing.assert_close(
        metalcore.pca_lowrank(A.to(device), 8, center=False)[1].cpu(),
        torch.linalg.svdvals(A),
        rtol=0,
        atol=10 * 30 * EPS * norm(A).item(),
    )


@pytest.mark.parametrize("layout", ["transposed", "every other", "permuted batches", "expanded rows"])
def test_strides(device, layout):
    A = LAYOUTS[layout]()
    U, S, V = metalcore.svd_lowrank(placed(A, device), A.shape[-1])
    assert norm(product(U, S, V).cpu() - A).max() <= 10 * 12 * EPS * norm(A).max()


@pytest.mark.parametrize("function", ["svd_lowrank", "pca_lowrank"])
def test_other_input_goes_to_torch(function):
    for A in (
        torch.randn(9, 7, dtype=torch.float64),
        torch.randn(9, 7).to_sparse(),
        torch.randn(2, 5, 5, dtype=torch.complex64),
    ):
        torch.manual_seed(1)
        found = getattr(metalcore, function)(A, 3)
        torch.manual_seed(1)
        for ours, theirs in zip(found, getattr(torch, function)(A, 3)):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    "call",
    [
        lambda module, device: module.svd_lowrank(torch.randn(5, device=device)),
        lambda module, device: module.svd_lowrank(torch.randn(5, 4, device=device), M=torch.randn(3, 3, device=device)),
        lambda module, device: module.pca_lowrank(torch.randn(5, 4, device=device), 5),
        lambda module, device: module.pca_lowrank(torch.randn(5, 4, device=device), -1),
        lambda module, device: module.pca_lowrank(torch.randn(5, 4, device=device), niter=-1),
        lambda module, device: module.pca_lowrank(torch.randn(5, device=device)),
    ],
)
def test_errors_are_torchs(device, call):
    same_error(call, metalcore, torch, device)


def condition(a, args, kwargs):
    """Of a product of two factors with two columns each: the larger value over their distance or the smaller value."""
    values = torch.linalg.svdvals((a @ args[0].mT).detach().double())[..., :2]
    return (values[..., :1] / torch.minimum(values[..., 1:], -values.diff())).max().item()


@pytest.mark.parametrize("name", ["svd_lowrank", "pca_lowrank"])
def test_opinfo_samples(device, name):
    function = getattr(metalcore, name)
    # With an M more than rounding is left out, so results depend on the random numbers.
    check_samples(
        lambda a, b, **options: function(a @ b.mT, **options),
        name,
        device,
        torch.float32,
        results=unique,
        select=lambda a, args, kwargs: kwargs.get("M") is None and not kwargs.get("center"),
        condition=condition,
    )


def test_compile(device):
    torch.compiler.reset()

    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(A):
        return metalcore.svd_lowrank(A * 2, 7)[1] + 1

    A = torch.randn(9, 7, device=device)
    expected = torch.linalg.svdvals(A.cpu() * 2) + 1
    torch.testing.assert_close(compiled(A).cpu(), expected, rtol=0, atol=10 * 9 * EPS * expected.max().item())
