"""solve_triangular's solutions against float64, in every variant, and its derivatives."""

import itertools

import pytest
import torch
from matrices import EPS, ORDERS, check_below, matrices, norm
from opinfo import check_samples
from references import check_operator
from rows import FAMILIES, changes, tuned

import metalcore


def triangle(A, upper, unitriangular=False):
    """The part of A that solve_triangular reads, in float64."""
    T = A.double().triu() if upper else A.double().tril()
    return T - torch.diag_embed(T.diagonal(dim1=-2, dim2=-1) - 1) if unitriangular else T


def check_solution(A, B, X, *, upper, left=True, unitriangular=False, names=None):
    """The residual of each column of X (each row, where not left) is at most 10 n eps |A| |X|, in Frobenius norms."""
    T, B, X = triangle(A, upper, unitriangular), B.double(), X.cpu().double()
    if not left:
        T, B, X = T.mT, B.mT, X.mT
    assert X.shape == torch.broadcast_shapes(T.shape[:-2] + B.shape[-2:], B.shape)
    bound = 10 * max(1, T.shape[-1]) * EPS
    # T and X are scaled first, because norms of products of numbers about 1e30 are useless even in float64.
    scale_of_T = T.abs().amax((-2, -1), keepdim=True).clamp(min=1e-300)
    scale_of_X = X.abs().amax(-2, keepdim=True).clamp(min=1e-300)
    residual = (T / scale_of_T) @ (X / scale_of_X) - B / scale_of_X / scale_of_T
    size = norm(T / scale_of_T)[..., None] * (X / scale_of_X).norm(dim=-2)
    errors = (residual.norm(dim=-2) / size.clamp(min=1e-300)).amax(-1).flatten() if X.numel() else torch.zeros(0)
    check_below(errors, bound, "A X = B", names or ["random"] * len(errors))


def well_conditioned(*shape):
    """Matrices whose triangles are well-conditioned, also with a diagonal of ones: the random entries are small."""
    n = shape[-1]
    return torch.randn(shape) / max(n, 1) ** 0.5 / 2 + torch.eye(n)


def plan(family, n, columns, batch=1):
    """The variant and the kernels that n x n systems take on GPUs of a family."""
    with tuned(family):
        explanation = metalcore.explain("solve_triangular", (batch, n, n), (batch, n, columns))
    return explanation.variant, explanation.kernels


def boundaries(family):
    """(n, columns, batch) on both sides of each change of plan."""
    found = set()
    for columns in (1, 2, 5, 40, 200):
        for below, above in changes(lambda n: plan(family, n, columns), 1, 1100):
            found |= {(below, columns, 1), (above, columns, 1)}
    for n in (7, 20, 40):
        for batch in (1, 70, 300):
            for below, above in changes(lambda columns: plan(family, n, columns, batch), 1, 300):
                found |= {(n, below, batch), (n, above, batch)}
    return sorted(found)


FLAGS = list(itertools.product((False, True), repeat=3))  # upper, left, unitriangular
SIZES = [
    (1, 1),
    (4, 3),
    (8, 8),
    (9, 2),
    (16, 17),
    (20, 5),
    (32, 32),
    (33, 1),
    (33, 4),
    (33, 5),
    (70, 66),
    (128, 129),
    (129, 5),
    (200, 70),
]


def solve(device, A, B, **options):
    return metalcore.solve_triangular(A.to(device), B.to(device), **options)


def check(device, A, B, upper, left=True, unitriangular=False, names=None):
    options = {"upper": upper, "left": left, "unitriangular": unitriangular}
    check_solution(A, B, solve(device, A, B, **options), names=names, **options)


@pytest.mark.parametrize("upper, left, unitriangular", FLAGS)
@pytest.mark.parametrize("n, columns", SIZES)
def test_residuals(device, n, columns, upper, left, unitriangular):
    A = well_conditioned(2, n, n)
    A.masked_fill_(
        torch.ones(n, n, dtype=torch.bool).tril(-1) if upper else torch.ones(n, n, dtype=torch.bool).triu(1),
        float("nan"),
    )  # must not be read
    if unitriangular:
        A.diagonal(dim1=-2, dim2=-1).fill_(float("nan"))
    B = torch.randn(2, n, columns) if left else torch.randn(2, columns, n)
    X = solve(device, A, B, upper=upper, left=left, unitriangular=unitriangular)
    assert X.is_contiguous()
    A = A.nan_to_num(0)
    check_solution(A, B, X, upper=upper, left=left, unitriangular=unitriangular)
    T = triangle(A, upper, unitriangular)
    expected = torch.linalg.solve_triangular(T, B.double(), upper=upper, left=left)
    torch.testing.assert_close(X.cpu().double(), expected, rtol=0, atol=1e-5 * n * expected.abs().max().item())


@pytest.mark.parametrize("columns", [1, 3, 12])
def test_all_orders(device, columns):
    for n in ORDERS:
        check(device, well_conditioned(n, n), torch.randn(n, columns), upper=n % 2 == 0, left=True)


@pytest.mark.parametrize("n, columns", [(1025, 1), (1030, 4), (1100, 6), (256, 256), (512, 30)])
def test_large(device, n, columns):
    with tuned("baseline"):  # no variant is PyTorch's
        for upper in (False, True):
            check(device, well_conditioned(n, n), torch.randn(n, columns), upper)


@pytest.mark.only_on("cuda")
@pytest.mark.parametrize("columns", [1, 64, 2048])
def test_2048(device, columns):
    for family in ("baseline", "hopper"):
        with tuned(family):
            check(device, well_conditioned(2048, 2048), torch.randn(2048, columns), upper=False)


@pytest.mark.parametrize("family", FAMILIES)
def test_both_sides_of_every_boundary(device, family):
    for n, columns, batch in boundaries(family):
        if family == "baseline" or plan(family, n, columns, batch) != plan("baseline", n, columns, batch):
            with tuned(family):
                check(device, well_conditioned(batch, n, n), torch.randn(batch, n, columns), upper=False)


@pytest.mark.parametrize("batch", [7, 130, 4096])
@pytest.mark.parametrize("n, columns", [(3, 1), (8, 8), (12, 3), (30, 1), (31, 9)])
def test_many_systems(device, n, columns, batch):
    check(device, well_conditioned(batch, n, n), torch.randn(batch, n, columns), upper=True)


@pytest.mark.parametrize("n", [6, 30, 50, 140])
@pytest.mark.parametrize("columns", [1, 20])
@pytest.mark.parametrize("upper", [False, True])
def test_hard_matrices(device, n, columns, upper):
    """Adds a diagonal where a matrix has none. Solutions grow; those of about 1e30 may overflow."""
    cases = {}
    for name, A in matrices(n, n).items():
        diagonal = A.diagonal()
        typical = A.abs().max() if A.any() else 1.0
        A = A + torch.diag(torch.where(diagonal.abs() < 1e-3 * typical, typical, torch.zeros(n)))
        X = solve(device, A, typical * torch.ones(n, columns), upper=upper)
        if X.isfinite().all():
            cases[name] = A, typical * torch.ones(n, columns), X
    assert "columns from 1e-30 to 1e30" in cases and ({"identity", "zero", "random"} <= set(cases) or n > 100)
    for name, (A, B, X) in cases.items():
        check_solution(A[None], B[None], X[None], upper=upper, names=[name])


@pytest.mark.parametrize("value", [1.2e-38, 1e38, 3e38, -3e38])
@pytest.mark.parametrize("n, columns", [(5, 1), (20, 9), (40, 1), (40, 9)])
def test_diagonals_at_the_ends_of_the_range(device, n, columns, value):
    A, B = value * torch.eye(n), value * (1 - torch.rand(n, columns) / 2)
    if abs(value) < 1e-30:
        B *= 4
    torch.testing.assert_close(solve(device, A, B, upper=True).cpu(), B / value, rtol=4e-7, atol=0)


@pytest.mark.parametrize("n, columns", [(5, 1), (7, 9), (20, 3), (40, 1), (40, 9), (140, 5)])
def test_zero_on_the_diagonal_is_divided_by(device, n, columns):
    A, B = torch.eye(n), torch.ones(n, columns)
    A[2, 2] = 0
    B[2, -1] = 0 if columns > 1 else 1
    X = solve(device, A, B, upper=False).cpu()
    expected = torch.linalg.solve_triangular(A, B, upper=False)
    assert X[2, 0] == float("inf")
    assert torch.equal(X[:2], expected[:2])
    torch.testing.assert_close(X, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("n, columns", [(5, 1), (8, 8), (12, 3), (30, 40), (60, 1), (60, 20), (140, 7)])
def test_a_bad_number_stays_in_its_system_and_column(device, n, columns, bad):
    A, B = well_conditioned(5, n, n), torch.randn(5, n, columns)
    A[2, n // 2, 1] = bad
    B[4, 1, -1] = bad
    X = solve(device, A, B, upper=False).cpu()
    assert not X[2].isfinite().all() and not X[4, :, -1].isfinite().all()
    assert X[2, : n // 2].isfinite().all() or n // 2 == 0  # nor does it go to the rows above
    good = [0, 1, 3]
    check_solution(A[good], B[good], X[good], upper=False)
    if columns > 1:
        check_solution(A[4:], B[4:, :, :-1], X[4:, :, :-1], upper=False)


@pytest.mark.only_on("simulator")
@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_are_clean_in_checking_mode(device, family):
    with tuned(family), metalcore.simulator.checking():
        for n, columns in [(7, 1), (7, 3), (8, 40), (16, 5), (20, 9), (32, 17), (40, 1), (33, 3), (70, 40), (140, 70)]:
            for upper, left in itertools.product((False, True), repeat=2):
                B = torch.randn(3, n, columns) if left else torch.randn(3, columns, n)
                check(device, well_conditioned(3, n, n), B, upper, left)


BROADCASTS = [
    ((3, 4, 4), (4, 2)),
    ((4, 4), (3, 4, 2)),
    ((1, 4, 4), (3, 4, 2)),
    ((2, 1, 4, 4), (3, 4, 2)),
    ((3, 4, 4), (2, 1, 4, 2)),
    ((3, 1, 40, 40), (1, 2, 40, 6)),
    ((1, 1, 140, 140), (2, 140, 6)),
]


EMPTY = [
    ((0, 0), (0, 2)),
    ((3, 3), (3, 0)),
    ((0, 3, 3), (3, 2)),
    ((2, 0, 0), (2, 0, 3)),
    ((2, 40, 40), (2, 40, 0)),
    ((0, 1, 3, 3), (5, 3, 2)),
]


@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize("a, b", BROADCASTS + EMPTY)
def test_batches_broadcast(device, a, b, left):
    A, B = well_conditioned(*a), torch.randn(b)
    B = B if left else B.mT
    X = metalcore.solve_triangular(A.to(device), B.to(device), upper=True, left=left)
    expected = torch.linalg.solve_triangular(A.double(), B.double(), upper=True, left=left)
    assert X.shape == expected.shape
    torch.testing.assert_close(X.cpu().double(), expected, rtol=0, atol=1e-4)


class TestTrsm:
    @pytest.mark.parametrize("side, uplo, transa, diag", list(itertools.product("LR", "UL", "NTC", "NU")))
    def test_means_what_blas_means(self, device, side, uplo, transa, diag):
        A, B = well_conditioned(5, 5), torch.randn(5, 3) if side == "L" else torch.randn(3, 5)
        options = {"side": side, "uplo": uplo, "transa": transa, "diag": diag}
        X = metalcore.linalg.trsm(A.to(device), B.to(device), alpha=-2.5, **options)
        T = (A.triu() if uplo == "U" else A.tril()).double()
        if diag == "U":
            T.diagonal().fill_(1)
        T = T if transa == "N" else T.mT
        X = X.cpu().double()
        torch.testing.assert_close(T @ X if side == "L" else X @ T, -2.5 * B.double(), rtol=0, atol=1e-5)

    def test_zero_alpha_does_not_look_at_a(self, device):
        X = metalcore.linalg.trsm(torch.zeros(3, 3, device=device), torch.randn(3, 2, device=device), alpha=0.0)
        assert torch.equal(X.cpu(), torch.zeros(3, 2))

    def test_complex_conjugates(self):
        A, B = torch.randn(4, 4, dtype=torch.complex128), torch.randn(4, 2, dtype=torch.complex128)
        torch.testing.assert_close(A.tril().mH @ metalcore.linalg.trsm(A, B, transa="C", alpha=2j), 2j * B)

    @pytest.mark.parametrize("wrong", [{"side": "X"}, {"uplo": "l"}, {"transa": ""}, {"diag": None}])
    def test_letters(self, device, wrong):
        with pytest.raises(ValueError, match=f"trsm: {next(iter(wrong))} must be one of"):
            metalcore.linalg.trsm(torch.eye(3, device=device), torch.eye(3, device=device), **wrong)


def test_opinfo_samples(device):
    check_samples(metalcore.solve_triangular, "linalg.solve_triangular", device, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_has_gradients(device, dtype):
    A, B = well_conditioned(2, 9, 9).to(device, dtype), torch.randn(2, 9, 3, device=device).to(dtype)
    A.requires_grad_()
    metalcore.solve_triangular(A, B, upper=True).sum().backward()
    assert A.grad.dtype == dtype and A.grad.isfinite().all() and not A.grad.tril(-1).any()


def solve_flags(upper, left, unitriangular):
    return lambda A, B: torch.ops.metalcore.solve_triangular(A, B, upper, left, unitriangular)


@pytest.mark.parametrize("upper, left, unitriangular", list(itertools.product((False, True), repeat=3)))
@pytest.mark.parametrize("a, b", [((3, 3), (3, 2)), ((2, 1, 3, 3), (2, 3, 1))])
def test_gradcheck_of_the_formulas(a, b, upper, left, unitriangular):
    # The operator on CPU tensors: the same derivative, in float64.
    A = well_conditioned(*a).double().requires_grad_()
    B = torch.randn(b if left else (*b[:-2], b[-1], b[-2]), dtype=torch.float64, requires_grad=True)
    solve = solve_flags(upper, left, unitriangular)
    assert torch.autograd.gradcheck(solve, (A, B))
    assert torch.autograd.gradgradcheck(solve, (A, B))


@pytest.mark.parametrize("needs", [(True, False), (False, True)])
def test_gradients_are_made_for_what_needs_them(device, needs):
    A, B = well_conditioned(5, 5).to(device), torch.randn(5, 2, device=device)
    A.requires_grad_(needs[0]), B.requires_grad_(needs[1])
    metalcore.solve_triangular(A, B, upper=False).sum().backward()
    a, b = A.detach().cpu().double().requires_grad_(needs[0]), B.detach().cpu().double().requires_grad_(needs[1])
    torch.linalg.solve_triangular(a, b, upper=False).sum().backward()
    for ours, theirs in ((A.grad, a.grad), (B.grad, b.grad)):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours.cpu().double(), theirs, rtol=0, atol=100 * EPS * theirs.abs().max().item())


@pytest.mark.parametrize(
    "where, a, b",
    [
        ("cpu", (2, 1, 3, 3), (4, 3, 1)),
        ("device", (2, 1, 3, 3), (4, 3, 1)),
        ("device", (0, 3, 3), (3, 2)),
    ],
)
def test_opcheck(device, where, a, b):
    at = device if where == "device" else "cpu"
    check_operator(
        torch.ops.metalcore.solve_triangular,
        well_conditioned(*a).to(at).requires_grad_(),
        torch.randn(b).to(at).requires_grad_(),
        True,
        True,
        False,
    )


def test_compile(device):
    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(A, B):
        return metalcore.solve_triangular(A, 2 * B, upper=True) + 1

    A, B = well_conditioned(2, 5, 5).to(device).requires_grad_(), torch.randn(2, 5, 3, device=device)
    found, expected = compiled(A, B), metalcore.solve_triangular(A, 2 * B, upper=True) + 1
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(*(torch.autograd.grad(x.sum(), A)[0] for x in (found, expected)))
