"""eigh against LAPACK in float64: hard matrices, every size, every kernel."""

import pytest
import torch
from jacobi_cases import check_eigenvalues, check_eigh, eigh, plan, square_boundaries
from matrices import EPS, symmetric, unit
from rows import FAMILIES, tuned

SIZES = {"simd": [1, 2, 8, 9, 16, 17, 32], "block": [33, 64]}


# The matrices of sizes whose neighbours have all.
EVERYWHERE = ["random", "rank-deficient", "graded"]


def check(device, A, names):
    L, V = eigh(A.to(device), "L", True)
    check_eigh(A, L.cpu(), V.cpu(), names)
    L, _ = eigh(A.to(device), "U", False)
    A, largest = unit(A)
    check_eigenvalues(A, L.cpu(), largest, names)


def check_named(device, n, only=None):
    cases = symmetric(n)
    names = only or list(cases)
    check(device, torch.stack([cases[name] for name in names]), names)


@pytest.mark.parametrize("variant, n", [(variant, n) for variant in SIZES for n in SIZES[variant]])
def test_hard_matrices(device, variant, n):
    with tuned("baseline"):
        assert plan("baseline", "eigh", (n, n))[0] == variant
        check_named(device, n)


@pytest.mark.parametrize("first", range(1, 131, 10))
def test_every_size(device, first):
    # The simulator takes seconds for a matrix that a threadgroup holds, so it gets one random matrix in ten sizes.
    on_gpu = torch.device(device).type == "cuda"
    for n in range(first, first + 10):
        if on_gpu or n <= 32 or n % 10 == 7:
            only = None if on_gpu else EVERYWHERE if n <= 32 else ["random"]
            check_named(device, n, only=only)


@pytest.mark.parametrize("family", FAMILIES[1:])
def test_where_other_gpus_take_other_kernels(device, family):
    for n in square_boundaries(family, "eigh"):
        if plan(family, "eigh", (n, n)) != plan("baseline", "eigh", (n, n)):
            with tuned(family):
                check_named(device, n, only=EVERYWHERE)


def test_the_largest_that_a_threadgroup_holds(device):
    check_named(device, 128, only=["clustered", "plus and minus one", "graded", "all about 1e30"])


@pytest.mark.parametrize("batch", [7, 130])
@pytest.mark.parametrize("n", [4, 8, 12, 20])
def test_many_matrices(device, n, batch):
    A = torch.randn(batch, n, n)
    check(device, A + A.mT, ["random"] * batch)


def test_4096_matrices(device):
    A = torch.randn(4096, 4, 4)
    check(device, A + A.mT, ["random"] * 4096)


@pytest.mark.parametrize("upper", [False, True])
@pytest.mark.parametrize("n", [3, 16, 40])
def test_reads_the_triangle_that_is_named(device, n, upper):
    A = torch.randn(2, n, n)
    whole = A.triu() + A.triu(1).mT if upper else A.tril() + A.tril(-1).mT
    other = torch.where(torch.ones(n, n).tril(-1).bool() if upper else torch.ones(n, n).triu(1).bool(), float("nan"), A)
    L, V = eigh(other.mT.contiguous().mT.to(device), "U" if upper else "L", True)
    check_eigh(whole, L.cpu(), V.cpu(), ["random"] * 2)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("n", [2, 5, 16, 30, 50, 70])
def test_a_bad_matrix_spoils_its_own_batch_entry_only(device, n, bad):
    A = torch.randn(3, n, n)
    A = A + A.mT
    A[1, n - 1, 0] = bad
    L, V = (x.cpu() for x in eigh(A.to(device), "L", True))
    assert L[1].isnan().all() and V[1].isnan().all()
    check_eigh(A[::2], L[::2], V[::2], ["random"] * 2)


@pytest.mark.parametrize("n", [6, 20, 40])
def test_the_same_bits_every_time(device, n):
    A = torch.randn(20, n, n, device=device)
    first = eigh(A, "L", True)
    for one, other in zip(first, eigh(A, "L", True)):
        assert torch.equal(one, other)
    # The result must not depend on the other matrices in the same simdgroup.
    for one, other in zip(first, eigh(A[7:8], "L", True)):
        assert torch.equal(one[7:8], other)


@pytest.mark.parametrize("n", [1, 8, 24, 48])
def test_of_zeros(device, n):
    L, V = (x.cpu() for x in eigh(torch.zeros(2, n, n, device=device), "L", True))
    assert not L.any()
    assert torch.equal(V.abs().sum(-1), torch.ones(2, n)) and (V.mT @ V - torch.eye(n)).abs().max() <= n * EPS
