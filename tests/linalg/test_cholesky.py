"""cholesky's factors against the matrices, in every variant; matrices without a factor."""

import pytest
import torch
from cholesky_cases import boundaries, check_factor, plan, random, symmetric_part
from matrices import ORDERS as ALL_ORDERS
from matrices import positive_definite
from references import assert_same_error
from rows import FAMILIES, tuned

import metalcore


def check(device, n, upper=False):
    cases = positive_definite(n)
    A = torch.stack(list(cases.values()))
    L, info = metalcore.cholesky_ex(A.to(device), upper=upper)
    assert L.device.type == info.device.type == torch.device(device).type
    assert not info.any()
    check_factor(symmetric_part(A, upper), L.cpu(), upper, list(cases))


@pytest.mark.parametrize("part", range(6))
def test_every_small_order(device, part):
    for n in ALL_ORDERS[part::6]:
        check(device, n, upper=n % 2 == 0)


@pytest.mark.parametrize("upper", [False, True])
@pytest.mark.parametrize("n", [150, 255, 256, 257, 300, 385, 512])
def test_large_orders(device, n, upper):
    check(device, n, upper)


@pytest.mark.only_on("cuda", "mps")
@pytest.mark.parametrize("n", [1024, 2048])
def test_larger_orders(device, n):
    with tuned("baseline"):
        check(device, n)
    check(device, n)


@pytest.mark.parametrize("family", FAMILIES)
def test_where_other_gpus_take_other_kernels(device, family):
    for n in boundaries(family):
        if family == "baseline" or plan(family, n) != plan("baseline", n):
            with tuned(family):
                check(device, n, upper=False)
                check(device, n, upper=True)


@pytest.mark.parametrize("batch", [7, 130])
@pytest.mark.parametrize("n", [3, 4, 7, 15, 30, 45, 70])
def test_many_matrices(device, batch, n):
    A = random(batch, n, n)
    check_factor(A, metalcore.cholesky(A.to(device)).cpu(), False, ["random"] * batch)


@pytest.mark.parametrize("n", [2, 8, 20])
def test_4096_matrices(device, n):
    A = random(4096, n, n)
    check_factor(A, metalcore.cholesky(A.to(device)).cpu(), False, ["random"] * 4096)


NAN, INF = float("nan"), float("inf")
ORDERS = [5, 8, 13, 32, 50, 64, 100, 129, 300]


@pytest.mark.parametrize("upper", [False, True])
@pytest.mark.parametrize("bad", [-1.0, 0.0, NAN])
@pytest.mark.parametrize("n", ORDERS)
def test_info_is_torchs(device, n, bad, upper):
    """Entry i of the batch is spoiled at row i's diagonal, or at a place left of it; one is not spoiled at all."""
    rows = sorted({0, 1, 4, n // 2, n - 2, n - 1})
    A = random(2 * len(rows) + 1, n, n)
    for i, row in enumerate(rows):
        A[i, row, row] = bad
        if bad != 0.0 and row > 0:
            A[i + len(rows), row, row // 2] = A[i + len(rows), row // 2, row] = bad * 1e3
    L, info = (x.cpu() for x in metalcore.cholesky_ex(A.to(device), upper=upper))
    assert info.dtype == torch.int32
    assert torch.equal(info, torch.linalg.cholesky_ex(A.double(), upper=upper).info)
    L = L.mT if upper else L
    assert not L.triu(1).any()
    for found, order, matrix in zip(L, info.tolist(), A):
        minor = n if order == 0 else order - 1
        if minor > 0:
            check_factor(matrix[None, :minor, :minor], found[None, :minor, :minor], False, ["leading minor"])
        if bad != bad or order == 0:
            continue
        assert found.isfinite().all()


@pytest.mark.parametrize("n", ORDERS)
def test_an_infinite_entry_is_no_pivot(device, n):
    A = random(4, n, n)
    A[1, n - 1, n - 1] = INF
    A[2, 3, 1] = A[2, 1, 3] = -INF
    assert metalcore.cholesky_ex(A.to(device)).info.tolist() == [0, n, 4, 0]


@pytest.mark.parametrize("bad", [NAN, INF, -1.0])
@pytest.mark.parametrize("n", ORDERS)
def test_a_bad_matrix_spoils_its_own_batch_entry_only(device, n, bad):
    A = random(5, n, n)
    good = metalcore.cholesky(A.to(device)).cpu()
    A[2, n // 2, n // 3] = bad
    A[2, n // 2, n // 2] = bad
    L, info = (x.cpu() for x in metalcore.cholesky_ex(A.to(device)))
    assert info[2] != 0
    for i in (0, 1, 3, 4):
        assert info[i] == 0 and torch.equal(L[i], good[i])


@pytest.mark.parametrize("upper", [False, True])
@pytest.mark.parametrize("n", ORDERS)
def test_only_one_triangle_is_read(device, n, upper):
    A = random(3, n, n)
    ones = torch.ones(n, n)
    spoiled = A.masked_fill((ones.tril(-1) if upper else ones.triu(1)).bool(), NAN)
    expected = metalcore.cholesky(A.to(device), upper=upper)
    assert torch.equal(metalcore.cholesky(spoiled.to(device), upper=upper), expected)
    L = metalcore.cholesky(A.to(device), upper=not upper)
    torch.testing.assert_close(L.mT, expected, rtol=0, atol=0)


@pytest.mark.only_on("simulator")
@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_are_clean_in_checking_mode(device, family):
    for n in boundaries(family):
        for upper in (False, True):
            A = random(3, n, n)
            with tuned(family), metalcore.simulator.checking():
                L = metalcore.cholesky(A.to(device), upper=upper)
            check_factor(A, L.cpu(), upper, ["random"] * 3)


@pytest.mark.parametrize("shape", [(3, 3), (4, 3, 3), (2, 3, 40, 40)])
def test_the_error_of_a_matrix_without_a_factor_is_torchs(device, shape):
    A = random(*shape)
    A.view(-1, *shape[-2:])[-1, 2, 2] = -1
    for name, options in (("cholesky", {}), ("cholesky_ex", {"check_errors": True})):
        assert_same_error(
            lambda: getattr(metalcore, name)(A.to(device), **options), lambda: getattr(torch.linalg, name)(A, **options)
        )


def test_large_single_matrices_go_to_torch_on_nvidia(device):
    with tuned("hopper"):
        plan = metalcore.explain("cholesky", (1, 1024, 1024))
        assert plan.variant == "torch" and plan.kernels == ("info_any",) and "PyTorch" in plan.why
        assert metalcore.explain("cholesky", (1024, 1024), upper=True).variant == "blocked"
        assert metalcore.explain("cholesky", (2, 1024, 1024)).variant == "blocked"
        A = random(1, 1024, 1024)
        L, info = metalcore.cholesky_ex(A.to(device))
    check_factor(A, L.cpu(), False, ["random"])
    assert info.tolist() == [0]
