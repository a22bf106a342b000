"""svd against LAPACK in float64: hard matrices, every size, every kernel."""

import pytest
import torch
from jacobi_cases import check_svd, check_values, plan, square_boundaries, svd
from matrices import EPS, check_below, matrices, norm, unit
from rows import FAMILIES, tuned

# Below, at and above every boundary between the variants of the baseline: (m, n) -> variant.
SHAPES = {
    "simd": [
        (1, 1),
        (2, 3),
        (5, 1),
        (8, 8),
        (9, 8),
        (7, 17),
        (16, 16),
        (17, 5),
        (32, 9),
        (30, 32),
        (32, 32),
        (33, 32),
        (50, 3),
        (3, 200),
    ],
    "block": [(33, 33), (64, 40), (64, 64), (65, 64), (48, 100)],
}


# The matrices of sizes whose neighbours have all.
EVERYWHERE = ["random", "rank-deficient", "columns from 1e-30 to 1e30"]


def check(device, A, names, full_matrices=False):
    U, S, Vh = svd(A.to(device), full_matrices, True)
    check_svd(A, U.cpu(), S.cpu(), Vh.cpu(), names)
    _, values, _ = svd(A.to(device), False, False)
    A, largest = unit(A)
    check_values(A, values.cpu(), largest, names)


def check_named(device, m, n, full_matrices=False, only=None):
    cases = matrices(m, n)
    names = only or list(cases)
    check(device, torch.stack([cases[name] for name in names]), names, full_matrices)


@pytest.mark.parametrize("variant, m, n", [(variant, *shape) for variant in SHAPES for shape in SHAPES[variant]])
def test_hard_matrices(device, variant, m, n):
    with tuned("baseline"):
        assert plan("baseline", "svd", (m, n))[0] == variant
        check_named(device, m, n)


@pytest.mark.parametrize("m, n", [(3, 2), (2, 3), (20, 5), (5, 30), (40, 12), (60, 40), (1, 9), (100, 1)])
def test_full_matrices(device, m, n):
    check_named(device, m, n, full_matrices=True)


@pytest.mark.parametrize("first", range(1, 131, 10))
def test_every_size(device, first):
    # The simulator takes seconds for a matrix that a threadgroup holds, so it gets one random matrix in ten sizes.
    on_gpu = torch.device(device).type == "cuda"
    for n in range(first, first + 10):
        if on_gpu or n <= 32 or n % 10 == 7:
            only = None if on_gpu else EVERYWHERE if n <= 32 else ["random"]
            check_named(device, n, n, only=only)


@pytest.mark.parametrize("family", FAMILIES[1:])
def test_where_other_gpus_take_other_kernels(device, family):
    for n in square_boundaries(family, "svd"):
        if plan(family, "svd", (n, n)) != plan("baseline", "svd", (n, n)):
            with tuned(family):
                check_named(device, n, n, only=EVERYWHERE)


def test_rows_and_columns_of_any_magnitude(device):
    """The largest that a threadgroup holds."""
    check_named(device, 128, 128, only=["rows from 1e30 to 1e-30", "columns from 1e-30 to 1e30"])


@pytest.mark.parametrize("m, n", [(8, 8), (16, 12), (32, 32), (40, 10), (64, 64), (70, 70)])
def test_small_singular_values_of_graded_columns(device, m, n):
    """A = B D with well-conditioned B and diagonal D: each singular value to n eps of itself (Demmel and Veselić)."""
    B = torch.linalg.qr(torch.randn(3, m, n).double()).Q + 0.1 * torch.randn(3, m, n).double()
    A = (B * 2.0 ** -torch.arange(n).double().mul(60 / n).round()).float()
    expected = torch.linalg.svdvals(A.double())
    values = svd(A.to(device), False, True)[1].cpu().double()
    scaled = A.double() / torch.linalg.vector_norm(A.double(), dim=-2, keepdim=True)
    bound = 10 * max(m, n) * EPS * torch.linalg.cond(scaled).max()
    assert ((values - expected).abs() / expected).max() <= bound


@pytest.mark.parametrize("batch", [7, 130])
@pytest.mark.parametrize("m, n", [(4, 4), (8, 5), (12, 12), (20, 30)])
def test_many_matrices(device, m, n, batch):
    check(device, torch.randn(batch, m, n), ["random"] * batch)


def test_4096_matrices(device):
    check(device, torch.randn(4096, 4, 4), ["random"] * 4096)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("m, n", [(5, 4), (16, 16), (10, 30), (40, 10), (50, 40), (66, 65)])
def test_a_bad_matrix_spoils_its_own_batch_entry_only(device, m, n, bad):
    A = torch.randn(3, m, n)
    A[1, m - 1, 1] = bad
    results = [x.cpu() for x in svd(A.to(device), False, True)]
    assert all(x[1].isnan().all() for x in results)
    assert svd(A.to(device), False, False)[1].cpu()[1].isnan().all()
    check_svd(A[::2], *(x[::2] for x in results), ["random"] * 2)


@pytest.mark.parametrize("n", [6, 20, 40])
def test_the_same_bits_every_time(device, n):
    A = torch.randn(20, n, n, device=device)
    first = svd(A, False, True)
    for one, other in zip(first, svd(A, False, True)):
        assert torch.equal(one, other)
    # The result must not depend on the other matrices in the same simdgroup.
    for one, other in zip(first, svd(A[7:8], False, True)):
        assert torch.equal(one[7:8], other)


@pytest.mark.parametrize("n", [3, 8, 24, 48])
def test_exact_where_nothing_rotates(device, n):
    D = torch.diag(torch.arange(n, 0, -1).float())
    U, S, Vh = (x.cpu() for x in svd(D.to(device), False, True))
    assert torch.equal(S, D.diagonal()) and torch.equal(Vh, torch.eye(n))
    assert norm(U - torch.eye(n)) <= n * EPS


def test_rank_by_the_singular_values(device):
    A = torch.randn(4, 30, 10) @ torch.randn(4, 10, 20)
    _, S, _ = svd(A.to(device), False, True)
    check_below(S.cpu()[:, 10:].amax(-1) / S.cpu()[:, 0], 30 * EPS, "zero singular values", ["rank 10"] * 4)
