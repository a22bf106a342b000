"""solve, solve_ex, lu_solve, inv and inv_ex against float64, in every variant; pivots that are none."""

import pytest
import torch
from lu_cases import LARGE, check_solution, solve_boundaries, solve_plan
from matrices import EPS, ORDERS, matrices
from references import assert_same_error
from rows import FAMILIES, tuned

import metalcore


def solve(A, B, device, left=True):
    X, info = metalcore.solve_ex(A.to(device), B.to(device), left=left)
    return X.cpu(), info.cpu()


@pytest.mark.parametrize(
    "n, right",
    [(3, 3), (4, 1), (5, 5), (8, 20), (16, 4), (20, 16), (32, 40), (33, 1), (64, 64), (100, 7), (128, 128), (140, 5)],
)
def test_hard_matrices(device, n, right):
    cases = matrices(n, n)
    A = torch.stack(list(cases.values()))
    B = torch.randn(len(cases), n, right)
    X, info = solve(A, B, device)
    regular = info == 0
    check_solution(A[regular], X[regular], B[regular], [name for name, r in zip(cases, regular) if r])
    X, info = solve(A, B.mT, device, left=False)
    regular = info == 0
    check_solution(A[regular], X[regular], B.mT[regular], [name for name, r in zip(cases, regular) if r], left=False)


@pytest.mark.parametrize("family", FAMILIES)
def test_boundaries_of_the_plan(device, family):
    for n, right in solve_boundaries(family):
        if family != "baseline" and solve_plan(family, n, right) == solve_plan("baseline", n, right):
            continue
        A, B = torch.randn(2, n, n), torch.randn(2, n, right)
        with tuned(family):
            check_solution(A, solve(A, B, device)[0], B, [f"{n}, {right}"] * 2)


@pytest.mark.parametrize("part", range(6))
def test_all_sizes(device, part):
    for n in ORDERS[part::6]:
        A = torch.randn(2, n, n)
        LU, pivots = metalcore.lu_factor(A.to(device))
        for right in (1, n):
            B = torch.randn(2, n, right)
            check_solution(A, solve(A, B, device)[0], B, [f"{n}, {right}"] * 2)
            for left, adjoint in ((True, False), (True, True), (False, False), (False, True)):
                on_right = B if left else B.mT
                X = metalcore.lu_solve(LU, pivots, on_right.to(device), left=left, adjoint=adjoint).cpu()
                check_solution(A.mT if adjoint else A, X, on_right, [f"{n}, {right}"] * 2, left)
        check_inverse(A, metalcore.inv(A.to(device)).cpu(), [str(n)] * 2)


def check_inverse(A, X, names):
    identity = torch.eye(A.shape[-1]).expand(A.shape)
    check_solution(A, X, identity, names)


@pytest.mark.parametrize("n", LARGE)
def test_large(device, n):
    A, B = torch.randn(n, n), torch.randn(n, 3)
    check_solution(A, solve(A, B, device)[0], B, ["random"])
    check_inverse(A, metalcore.inv(A.to(device)).cpu(), ["random"])


@pytest.mark.parametrize("n", [1, 3, 4, 7, 16, 30, 50, 100, 140])
def test_inverses_of_hard_matrices(device, n):
    cases = matrices(n, n)
    A = torch.stack(list(cases.values()))
    X, info = (result.cpu() for result in metalcore.inv_ex(A.to(device)))
    regular = info == 0
    check_inverse(A[regular], X[regular], [name for name, r in zip(cases, regular) if r])


@pytest.mark.parametrize("batch, n", [(0, 4), (1, 2), (7, 12), (4096, 3), (4097, 5), (4096, 8)])
def test_batches(device, batch, n):
    A, B = torch.randn(batch, n, n), torch.randn(batch, n, 2)
    X, info = solve(A, B, device)
    assert X.shape == B.shape and info.shape == (batch,)
    check_solution(A, X, B, ["random"] * batch)


@pytest.mark.parametrize(
    "a, b, left",
    [
        ((3, 3), (3,), True),
        ((2, 3, 3), (3,), True),
        ((2, 3, 3), (2, 3), True),
        ((3, 3), (3, 4), True),
        ((5, 1, 6, 6), (4, 6, 2), True),
        ((6, 6), (5, 2, 6), False),
        ((2, 20, 20), (20, 7), True),
        ((2, 3, 4, 4), (2, 3, 4), True),
        ((3, 1, 40, 40), (1, 2, 40, 3), True),
        ((0, 3, 3), (3,), True),
        ((3, 0, 0), (3, 0, 4), True),
        ((4, 4), (4, 0), True),
        ((1, 4, 4), (5, 3, 4), False),
    ],
)
def test_vectors_and_broadcasting(device, a, b, left):
    A, B = torch.randn(a), torch.randn(b)
    expected = torch.linalg.solve(A.double(), B.double(), left=left)
    X, info = solve(A, B, device, left)
    assert X.shape == expected.shape and info.shape == torch.linalg.solve_ex(A, B, left=left).info.shape
    condition = torch.linalg.cond(A.double()).max().item() if A.numel() else 1.0
    scale = expected.abs().max().item() if expected.numel() else 1.0
    torch.testing.assert_close(X.double(), expected, rtol=0, atol=10 * a[-1] * EPS * condition * scale)


@pytest.mark.parametrize("n", [3, 20, 60, 150])
def test_singular_matrices(device, n):
    A = torch.randn(3, n, n)
    A[1, :, 0] = 0
    B = torch.randn(3, n, 2)
    X, info = solve(A, B, device)
    assert info.tolist() == [0, 1, 0] and not X[1].isfinite().all()
    check_solution(A[::2], X[::2], B[::2], ["random"] * 2)
    for name, call in {
        "solve": lambda f: f(A.to(device), B.to(device)),
        "inv": lambda f: f(A.to(device)),
        "lu_factor": lambda f: f(A.to(device)),
    }.items():
        # A corner has the same error; LAPACK on the CPU was seen not to return from larger ones.
        corners = [M[:, :3, :3] for M in ((A, B) if name == "solve" else (A,))]
        assert_same_error(lambda: call(getattr(metalcore, name)), lambda: getattr(torch.linalg, name)(*corners))


@pytest.mark.parametrize("n", [4, 12, 32, 50, 128, 140])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_inf_stay_in_their_matrix(device, n, value):
    A, B = torch.randn(5, n, n), torch.randn(5, n, 3)
    clean, _ = solve(A, B, device)
    A[1, n // 2, n // 3] = value
    B[3, 0, 0] = value
    spoilt, _ = solve(A, B, device)
    assert torch.equal(clean[[0, 2, 4]], spoilt[[0, 2, 4]])
    assert torch.equal(clean[3, :, 1:], spoilt[3, :, 1:])


@pytest.mark.parametrize("exponent", [-100, -30, 30, 100])
@pytest.mark.parametrize("n", [3, 20, 60])
def test_powers_of_two_change_nothing_but_the_exponent(device, n, exponent):
    A, B = torch.randn(n, n), torch.randn(n, 2)
    X, _ = solve(A, B, device)
    scaled, _ = solve(A * 2.0**exponent, B, device)
    assert torch.equal(scaled * 2.0**exponent, X)


@pytest.mark.only_on("simulator")
@pytest.mark.parametrize(
    "n, right", [(3, 5), (8, 8), (16, 3), (31, 20), (32, 40), (40, 40), (70, 1), (100, 200), (140, 3)]
)
def test_kernels_are_clean_in_checking_mode(device, n, right):
    A, B = torch.randn(2, n, n), torch.randn(2, n, right)
    with metalcore.simulator.checking():
        check_solution(A, solve(A, B, device)[0], B, ["random"] * 2)
        check_solution(A, solve(A, B.mT, device, left=False)[0], B.mT, ["random"] * 2, left=False)
        check_inverse(A, metalcore.inv(A.to(device)).cpu(), ["random"] * 2)
        LU, pivots = metalcore.lu_factor(A.to(device))
        for adjoint in (False, True):
            X = metalcore.lu_solve(LU, pivots, B.to(device), adjoint=adjoint).cpu()
            check_solution(A.mT if adjoint else A, X, B, ["random"] * 2)


SIZES = [1, 3, 5, 8, 9, 16, 17, 32, 33, 70]
BAD = {"zero": 0, "negative": -3, "one too many": None, "far": 2**31 - 1, "least": -(2**31)}
WAYS = [(True, False), (True, True), (False, False), (False, True)]
BATCH = 6  # on NVIDIA GPUs PyTorch's op takes up to four large matrices


def systems(n):
    A = torch.randn(BATCH, n, n) + 2 * n**0.5 * torch.eye(n)
    return *torch.linalg.lu_factor(A), torch.randn(BATCH, n, n)


def check_one_bad(device, n, value, left, adjoint):
    """The matrix with the bad pivot has NaN, and the others are right."""
    LU, pivots, B = systems(n)
    expected = torch.linalg.lu_solve(LU, pivots, B, left=left, adjoint=adjoint)
    pivots[2, n // 2] = n + 1 if value is None else value
    X = metalcore.lu_solve(LU.to(device), pivots.to(device), B.to(device), left=left, adjoint=adjoint).cpu()
    assert X[2].isnan().all()
    others = [0, 1, 3, 4, 5]
    torch.testing.assert_close(X[others], expected[others], rtol=100 * n * EPS, atol=100 * n * EPS)


@pytest.mark.parametrize("left, adjoint", WAYS)
@pytest.mark.parametrize("n", SIZES)
def test_a_row_that_is_not_there(device, n, left, adjoint):
    for value in BAD.values():
        check_one_bad(device, n, value, left, adjoint)


@pytest.mark.only_on("simulator")
@pytest.mark.parametrize("n", [8, 20, 40])
def test_nothing_outside_is_read(device, n):
    with metalcore.simulator.checking():
        for left, adjoint in WAYS:
            check_one_bad(device, n, None, left, adjoint)
            check_one_bad(device, n, 0, left, adjoint)


@pytest.mark.parametrize("n", [4, 32, 33])
def test_the_derivative(device, n):
    LU, pivots, B = systems(n)
    pivots[2, 0] = -7
    LU, B = (tensor.to(device).requires_grad_() for tensor in (LU, B))
    found = torch.autograd.grad(metalcore.lu_solve(LU, pivots.to(device), B).sum(), (LU, B))
    for gradient in found:
        assert gradient[2].isnan().all() or gradient is found[0]  # each triangle may have none
        assert gradient[3].isfinite().all() and not gradient[2].isfinite().all()


@pytest.mark.parametrize("n", [4, 16, 33])
def test_any_exchanges_of_rows_that_are_there(device, n):
    """Repeated pivots, pivots of rows above, and pivots with gaps in memory."""
    LU, _, B = systems(n)
    pivots = torch.randint(1, n + 1, (BATCH, 2 * n), dtype=torch.int32)[:, ::2]
    for left, adjoint in WAYS:
        X = metalcore.lu_solve(LU.to(device), pivots.to(device), B.to(device), left=left, adjoint=adjoint)
        expected = torch.linalg.lu_solve(LU, pivots, B, left=left, adjoint=adjoint)
        torch.testing.assert_close(X.cpu(), expected, rtol=100 * n * EPS, atol=100 * n * EPS)
        gaps = torch.empty(BATCH, 2 * n, dtype=torch.int32, device=device)[:, ::2].copy_(pivots)
        assert torch.equal(metalcore.lu_solve(LU.to(device), gaps, B.to(device), left=left, adjoint=adjoint), X)


@pytest.mark.parametrize(
    "change",
    [
        lambda pivots: pivots.long(),
        lambda pivots: pivots.float(),
        lambda pivots: pivots[:, 1:],
        lambda pivots: pivots[:4],
        lambda pivots: pivots.mT,
    ],
    ids=["int64", "float", "short", "batch", "turned"],
)
def test_other_pivots_are_refused(device, change):
    LU, pivots, B = (tensor.to(device) for tensor in systems(8))
    with pytest.raises(RuntimeError, match="pivots"):
        metalcore.lu_solve(LU, change(pivots), B)
