"""lu_factor, lu_factor_ex and lu against float64, in every variant."""

import pytest
import torch
from lu_cases import SHAPES, boundaries, check_factors, plan, unpack
from matrices import EPS, matrices, norm
from rows import FAMILIES, tuned

import metalcore

CASES = [(variant, m, n) for variant, shapes in SHAPES.items() for m, n in shapes]


def factors(A, device, pivot=True):
    return [result.cpu() for result in metalcore.lu_factor_ex(A.to(device), pivot=pivot)]


@pytest.mark.parametrize("variant, m, n", CASES)
def test_factors_of_hard_matrices(device, variant, m, n):
    assert plan("baseline", m, n)[0] == variant
    cases = matrices(m, n)
    A = torch.stack(list(cases.values()))
    with tuned("baseline"):
        check_factors(A, *factors(A, device), list(cases))


@pytest.mark.parametrize("family", FAMILIES)
def test_boundaries_of_the_plan(device, family):
    for m, n in boundaries(family):
        A = torch.randn(2, m, n)
        with tuned(family):
            check_factors(A, *factors(A, device), [f"{m}x{n}"] * 2)


@pytest.mark.parametrize("first", range(1, 131, 26))
def test_all_sizes(device, first):
    for n in range(first, min(first + 26, 131)):
        A = torch.randn(2, n, n)
        LU, pivots, info = factors(A, device)
        check_factors(A, LU, pivots, info, [str(n)] * 2)
        # With random entries it is clear which one is the largest, except for rounding.
        assert torch.equal(pivots, torch.linalg.lu_factor(A.double()).pivots)


@pytest.mark.parametrize(
    "n",
    [
        256,
        512,
        pytest.param(1024, marks=pytest.mark.only_on("cuda", "mps")),
        pytest.param(2048, marks=pytest.mark.only_on("cuda", "mps")),
    ],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_large(device, family, n):
    A = torch.randn(n, n)
    with tuned(family):
        check_factors(A, *factors(A, device), ["random"])


@pytest.mark.parametrize("batch, n", [(0, 5), (1, 3), (7, 20), (7, 40), (4096, 2), (4096, 3), (4096, 8), (4099, 6)])
def test_batches(device, batch, n):
    A = torch.randn(batch, n, n)
    check_factors(A, *factors(A, device), ["random"] * batch)


@pytest.mark.parametrize("m, n", [(3, 3), (6, 4), (20, 20), (20, 32), (40, 40), (150, 140)])
def test_lu_is_what_the_factors_say(device, m, n):
    A = torch.randn(3, m, n)
    P, L, U = (part.cpu() for part in metalcore.lu(A.to(device)))
    LU, pivots, _ = factors(A, device)
    for ours, theirs in zip((P, L, U), unpack(LU, pivots)):
        assert torch.equal(ours.double(), theirs)


@pytest.mark.parametrize("n", [1, 2, 4, 7, 16, 30, 40, 100, 140])
def test_without_pivoting(device, n):
    A = torch.randn(3, n, n) + 2 * n * torch.eye(n)
    P, L, U = metalcore.lu(A.to(device), pivot=False)
    assert P.shape == (0,)
    assert norm(L.cpu().double() @ U.cpu().double() - A).max() <= 10 * n * EPS * norm(A).max()
    _, pivots, info = factors(A, device, pivot=False)
    assert torch.equal(pivots, torch.arange(1, n + 1, dtype=torch.int32).expand(3, n)) and not info.any()


@pytest.mark.parametrize("n", [2, 5, 20, 40, 140])
def test_without_pivoting_zeros_are_divided_by(device, n):
    A = torch.eye(n)
    A[0, 0], A[1, 0] = 0, 1
    LU, _, info = factors(A, device, pivot=False)
    assert info == 1 and not LU[1:].isfinite().all()


@pytest.mark.parametrize("n", [2, 3, 4, 8, 20, 32, 33, 70, 129, 150])
def test_exact_zeros_are_found(device, n):
    A = torch.randint(-3, 4, (4, n, n)).float() + 0.0
    A[0, n - 1] = A[0, 0]  # equal rows
    A[1, :, n - 1] = 0  # a zero column
    A[2] = 0
    A[3] = torch.eye(n).flip(0)
    LU, pivots, info = factors(A, device)
    check_factors(A, LU, pivots, info, ["equal rows", "zero column", "zero", "permutation"])
    assert info.tolist()[1:] == [n, 1, 0]
    assert torch.equal(unpack(LU, pivots)[0][3], A[3].double())


@pytest.mark.parametrize("m, n", [(4, 4), (12, 12), (32, 20), (50, 70), (150, 150)])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_inf_stay_in_their_matrix(device, m, n, value):
    A = torch.randn(5, m, n)
    clean = factors(A, device)
    A[1, m // 2, n // 2] = value
    A[3] = value
    spoilt = factors(A, device)
    for before, after in zip(clean, spoilt):
        assert torch.equal(before[[0, 2, 4]], after[[0, 2, 4]])
    assert not spoilt[0][1].isfinite().all() and not spoilt[0][3].isfinite().all()


@pytest.mark.parametrize("m, n", [(3, 3), (20, 20), (90, 100), (200, 190)])
def test_the_same_bits_on_every_run(device, m, n):
    A = torch.randn(4, m, n).to(device)
    first = metalcore.lu_factor_ex(A)
    for again in (metalcore.lu_factor_ex(A), metalcore.lu_factor_ex(A.mT.contiguous().mT)):
        assert all(torch.equal(a, b) for a, b in zip(first, again))


@pytest.mark.only_on("simulator")
@pytest.mark.parametrize("m, n", [(3, 3), (8, 5), (16, 16), (20, 31), (40, 40), (70, 20), (140, 150), (1030, 20)])
def test_kernels_are_clean_in_checking_mode(device, m, n):
    A = torch.randn(2, m, n)
    with metalcore.simulator.checking():
        check_factors(A, *factors(A, device), ["random"] * 2)
        metalcore.lu(A.to(device))
