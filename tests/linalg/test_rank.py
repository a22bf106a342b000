"""matrix_rank and cond as replacements for torch.linalg's."""

import pytest
import torch
from matrices import EPS, of_spectrum
from opinfo import check_samples
from spectral import same_error

import metalcore

INFINITY = float("inf")


def test_are_the_namesakes(device):
    assert metalcore.matrix_rank is metalcore.linalg.matrix_rank and metalcore.cond is metalcore.linalg.cond
    A = torch.diag(torch.tensor([4.0, 2, 1, 1e-9])).to(device)
    rank = lambda *args, **kwargs: metalcore.matrix_rank(A, *args, **kwargs).item()  # noqa: E731
    tensor = lambda value: torch.tensor(value, device=device)  # noqa: E731
    assert metalcore.matrix_rank(A).dtype == torch.int64 and metalcore.matrix_rank(A).shape == ()
    assert rank() == rank(hermitian=True) == 3
    assert rank(1.5) == rank(tol=tensor(1.5)) == rank(1.5, True) == rank(atol=1.5) == rank(rtol=0.3) == 2
    assert rank(atol=1.5, rtol=0.6) == rank(atol=tensor(2.5), rtol=tensor(0.3)) == 1
    assert rank(atol=1e-12) == rank(tol=0.0) == rank(atol=tensor(1e-12)) == 4
    assert rank(atol=0.0) == rank(atol=tensor(0.0)) == 3


@pytest.mark.parametrize("m, n", [(6, 6), (12, 7), (7, 12), (40, 40), (70, 66)])
def test_ranks(device, m, n):
    k = min(m, n)
    ranks = [0, 1, k // 2, k - 1, k]
    A = torch.stack([torch.randn(m, r) @ torch.randn(r, n) for r in ranks])
    assert metalcore.matrix_rank(A.to(device)).tolist() == ranks
    # Extreme magnitudes do not matter: the tolerance is relative.
    for factor in (1e-30, 1e30):
        assert metalcore.matrix_rank((A * factor).to(device)).tolist() == ranks
    if m == n:
        S = A.tril() + A.tril(-1).mT
        expected = torch.linalg.matrix_rank(S.double(), hermitian=True, rtol=n * EPS)
        garbage = S + torch.randn(n, n).triu(1)  # which is not read
        assert torch.equal(metalcore.matrix_rank(garbage.to(device), hermitian=True).cpu(), expected)


def test_tolerances_for_each_matrix(device):
    A = torch.diag(torch.tensor([4.0, 2, 1])).expand(3, 3, 3).to(device)
    rtol = torch.tensor([0.1, 0.3, 0.6], device=device)
    assert metalcore.matrix_rank(A, rtol=rtol).tolist() == [3, 2, 1]
    assert metalcore.matrix_rank(A[0], atol=4 * rtol).tolist() == [3, 2, 1]
    assert metalcore.matrix_rank(A, atol=1.5, rtol=rtol, hermitian=True).tolist() == [2, 2, 1]


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 0), (2, 0, 3), (2, 3, 0), (0, 3, 3)])
def test_empty(device, shape):
    A = torch.empty(shape)
    assert torch.equal(metalcore.matrix_rank(A.to(device)).cpu(), torch.linalg.matrix_rank(A))
    for p in (None, -2, "nuc", 1) if shape[-1] == shape[-2] else (None, -2):
        assert torch.equal(metalcore.cond(A.to(device), p).cpu(), torch.linalg.cond(A, p))


@pytest.mark.parametrize("bad", [float("nan"), INFINITY])
def test_a_bad_matrix_spoils_its_own_result_only(device, bad):
    A = torch.randn(3, 9, 9)
    good = [function(A.to(device)) for function in (metalcore.matrix_rank, metalcore.cond, metalcore.pinv)]
    A[1, 4, 5] = bad
    for function, before in zip((metalcore.matrix_rank, metalcore.cond, metalcore.pinv), good):
        assert torch.equal(function(A.to(device))[::2], before[::2])
    assert metalcore.matrix_rank(A.to(device))[1] == 0 and metalcore.cond(A.to(device))[1].isnan()
    assert metalcore.pinv(A.to(device))[1].isnan().all()


@pytest.mark.parametrize("p", [None, 2, 2.0, -2, "nuc", "fro", 1, -1, 1.0, INFINITY, -INFINITY])
def test_condition(device, p):
    spectra = [9, 5, 4, 2, 1 / 2], [1, 1, 1, 1, 1], [3, 1, 1, 1, 1e-3]
    A = torch.stack([of_spectrum(values) for values in spectra]).float()
    expected = torch.linalg.cond(A.double(), p)
    found = metalcore.cond(A.to(device), p).cpu().double()
    # The smallest singular value has the largest relative error, of eps times the condition.
    assert ((found - expected).abs() <= 10 * 8 * EPS * torch.linalg.cond(A.double()) * expected).all()


def test_condition_of_singular_matrices(device):
    A = torch.stack([torch.zeros(3, 3), torch.diag(torch.tensor([1.0, 2, 0])), torch.eye(3)])
    for p in (None, -2, "fro", 1, INFINITY):
        torch.testing.assert_close(metalcore.cond(A.to(device), p).cpu(), torch.linalg.cond(A, p), equal_nan=True)
    assert metalcore.cond(A[1].to(device)).item() == INFINITY


def test_condition_of_rectangles(device):
    A = torch.randn(3, 7, 4)
    torch.testing.assert_close(metalcore.cond(A.to(device)).cpu(), torch.linalg.cond(A), rtol=1e-4, atol=0)
    same_error(lambda linalg, device: linalg.cond(A.to(device), 1), metalcore, torch.linalg, device)


def new(device, dtype):
    return torch.empty(0, dtype=dtype, device=device)


@pytest.mark.parametrize(
    "call",
    [
        lambda linalg, device: linalg.matrix_rank(torch.randn(3, device=device)),
        lambda linalg, device: linalg.matrix_rank(torch.randn(3, 4, device=device), hermitian=True),
        lambda linalg, device: linalg.matrix_rank(torch.randn(3, 3, device=device), rtol=torch.tensor(1j).to(device)),
        lambda linalg, device: linalg.matrix_rank(torch.randn(3, 3, device=device), tol=1.0, rtol=1.0),
        lambda linalg, device: linalg.matrix_rank(torch.randn(3, 3, device=device), out=new(device, torch.bool)),
        lambda linalg, device: linalg.cond(torch.randn(3, device=device)),
        lambda linalg, device: linalg.cond(torch.randn(3, 3, device=device), 3),
        lambda linalg, device: linalg.cond(torch.randn(3, 3, device=device), "x"),
        lambda linalg, device: linalg.cond(torch.randn(3, 4, device=device), "fro"),
        lambda linalg, device: linalg.cond(torch.randn(3, 3, device=device), out=new(device, torch.int32)),
    ],
)
def test_errors_are_torchs(device, call):
    same_error(call, metalcore, torch.linalg, device)


@pytest.mark.parametrize("variant", ["", "hermitian"])
def test_opinfo_samples_of_matrix_rank(device, variant):
    check_samples(metalcore.matrix_rank, "linalg.matrix_rank", device, torch.float32, variant=variant)


def test_opinfo_samples_of_cond(device):
    check_samples(
        metalcore.cond,
        "linalg.cond",
        device,
        torch.float32,
        condition=lambda A, *_: torch.linalg.cond(A.detach().double()).max().item(),
    )


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(device, dynamic):
    torch.compiler.reset()

    @torch.compile(backend="aot_eager", fullgraph=True, dynamic=dynamic)
    def compiled(A):
        return metalcore.matrix_rank(A * 2) + 1, metalcore.cond(A * 2), metalcore.cond(A * 2, "nuc")

    A = torch.randn(3, 4, 4, device=device)
    for found, expected in zip(
        compiled(A), (metalcore.matrix_rank(A * 2) + 1, metalcore.cond(A * 2), metalcore.cond(A * 2, "nuc"))
    ):
        assert torch.equal(found, expected)
