"""lu_factor, lu_factor_ex and lu against float64, in every variant."""

import pytest
import torch
from lu_cases import LARGE, SHAPES, boundaries, check_factors, plan, unpack
from matrices import EPS, ORDERS, matrices, norm
from opinfo import error_inputs
from references import assert_same_error
from rows import FAMILIES, tuned

import metalcore
from metalcore import _C

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


@pytest.mark.only_on("simulator")
@pytest.mark.parametrize("m, n", [(161, 161), (200, 165)])
def test_blocked_kernels_are_clean_in_checking_mode(device, m, n):
    """The last panel has fewer columns than others, so that it lies at the end of the permutation."""
    A = torch.randn(m, n)
    with metalcore.simulator.checking():
        P, L, U = metalcore.lu(A.to(device))
        assert plan("baseline", m, n)[0] == "blocked"
        assert norm(P.cpu() @ L.cpu() @ U.cpu() - A) <= 10 * m * EPS * norm(A)


@pytest.mark.parametrize("family", FAMILIES)
def test_boundaries_of_the_plan(device, family):
    for m, n in boundaries(family):
        if family != "baseline" and plan(family, m, n) == plan("baseline", m, n):
            continue
        A = torch.randn(2, m, n)
        with tuned(family):
            check_factors(A, *factors(A, device), [f"{m}x{n}"] * 2)


@pytest.mark.parametrize("part", range(3))
def test_all_sizes(device, part):
    for n in ORDERS[part::3]:
        A = torch.randn(2, n, n)
        LU, pivots, info = factors(A, device)
        check_factors(A, LU, pivots, info, [str(n)] * 2)
        # With random entries it is clear which one is the largest, except for rounding.
        assert torch.equal(pivots, torch.linalg.lu_factor(A.double()).pivots)


@pytest.mark.parametrize("n", LARGE)
def test_large(device, n):
    A, tried = torch.randn(n, n), set()
    for family in FAMILIES:
        if (chosen := plan(family, n, n, batch=1)) not in tried:
            tried.add(chosen)
            with tuned(family):
                check_factors(A, *factors(A, device), ["random"])


@pytest.mark.parametrize("m, n", [(2048, 40), (2049, 40), (4097, 20), (8193, 9), (16384, 5), (16385, 3)])
def test_panels_of_many_rows(device, m, n):
    """With more rows a thread of a panel holds more of them, and fewer columns; the last panel is in memory."""
    A = torch.randn(m, n)
    LU, pivots, info = factors(A, device)
    exact = torch.linalg.lu_factor(A.double())
    assert torch.equal(pivots, exact.pivots) and info == 0
    # Each entry has at most n roundings of products whose factors are at most 1 and max |U|.
    assert (LU - exact.LU).abs().max() <= 10 * n * EPS * exact.LU.abs().max()


@pytest.mark.parametrize("columns", [32, 96, 1024])
def test_blocks_of_panels(device, columns):
    """Blocks of one panel, of some, and of all, also of a singular matrix."""
    A = torch.randn(2, 200, 331)
    A[1, :, 70] = A[1, :, 3]
    _C.use_measured(device, _C.gpu_family(device), [("lu", "torch", []), ("lu", "blocked_columns", [columns])])
    try:
        check_factors(A, *factors(A, device), ["random", "equal columns"])
    finally:
        _C.use_measured(device, _C.gpu_family(device), [])


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
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
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


@pytest.mark.parametrize("of_factors, of_columns", [((), (3,)), ((1,), (2, 3)), ((3,), (1,))], ids=str)
def test_lu_solve_in_vmap(device, of_factors, of_columns):
    """PyTorch's rule for vmap takes wrong pivots where the batches broadcast."""
    A, B = torch.randn(2, *of_factors, 4, 4, device=device), torch.randn(2, *of_columns, 4, 3, device=device)
    LU, pivots = metalcore.lu_factor(A)
    found = torch.func.vmap(metalcore.lu_solve)(LU, pivots, B)
    expected = torch.stack([metalcore.lu_solve(LU[i], pivots[i], B[i]) for i in range(2)])
    scale = expected.abs().max().item()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-3 * scale)


@pytest.mark.parametrize("name", ["inv", "inv_ex", "lu_factor", "lu_factor_ex", "solve", "solve_ex", "lu_solve"])
def test_error_inputs(device, name):
    for error in error_inputs(f"linalg.{name}", device):
        sample = error.sample_input
        with pytest.raises(error.error_type):
            getattr(metalcore, name)(sample.input, *sample.args, **sample.kwargs)


@pytest.mark.parametrize("name", ["inv_ex", "lu_factor_ex", "solve_ex"])
def test_check_errors(device, name):
    A = torch.ones(2, 3, 3)
    inputs = (A, A) if name == "solve_ex" else (A,)
    assert getattr(metalcore, name)(*[t.to(device) for t in inputs])[-1].tolist() == [2, 2]
    assert_same_error(
        lambda: getattr(metalcore, name)(*[t.to(device) for t in inputs], check_errors=True),
        lambda: getattr(torch.linalg, name)(*inputs, check_errors=True),
    )


@pytest.mark.parametrize("n", [1, 3, 8, 20, 50, 140])
def test_determinants(device, n):
    A = torch.randn(4, n, n) / n**0.5
    A[3, :, 0] = 0
    value, (sign, logarithm) = metalcore.det(A.to(device)).cpu().double(), metalcore.slogdet(A.to(device))
    expected, exact = torch.linalg.det(A.double()), torch.linalg.slogdet(A.double())
    condition = torch.linalg.cond(A[:3].double())
    # The factors are those of a matrix that differs by 10 n eps at most; a determinant's derivative is det(A) A⁻ᵀ.
    bound = 10 * n**2 * EPS * condition
    assert ((value - expected)[:3].abs() <= bound * expected[:3].abs()).all() and value[3] == 0
    assert torch.equal(sign.cpu().double(), exact.sign) and logarithm[3] == -torch.inf
    assert ((logarithm.cpu() - exact.logabsdet)[:3].abs() <= bound).all()


def test_determinants_do_not_overflow_on_the_way(device):
    A = torch.diag(torch.tensor([1e30, 1e30, 1e-30, 1e-30, 2.0])).to(device)
    torch.testing.assert_close(metalcore.det(A).item(), 2.0, rtol=8 * EPS, atol=0)
    assert metalcore.det(A[:2, :2]).item() == torch.inf and metalcore.det(A[2:4, 2:4]).item() == 0
