"""cholesky's factors against the matrices, in every variant; cholesky_solve; derivatives."""

import pytest
import torch
from matrices import EPS, check_below, norm, positive_definite
from matrices import ORDERS as ALL_ORDERS
from opinfo import check_samples
from references import assert_same_error, check_operator, derivatives
from rows import FAMILIES, changes, tuned

import metalcore


def check_factor(A, L, upper, names):
    """L has zeros in its other triangle and a positive diagonal, and L Lᵀ is A. The bound of the error of entry (i, j)
    is 10 n eps sqrt(A_ii A_jj), which is what rounding allows (Demmel 1989). Batch entry i is names[i]."""
    A, L = A.double(), L.double()
    L = L.mT if upper else L
    assert L.shape == A.shape
    assert not L.triu(1).any()
    diagonal = A.diagonal(dim1=-2, dim2=-1).sqrt()
    assert (L.diagonal(dim1=-2, dim2=-1) > 0).all()
    scaled = L / diagonal[..., None]  # no product overflows
    residual = scaled @ scaled.mT - A / diagonal[..., None] / diagonal[..., None, :]
    check_below(residual.abs().amax(dim=(-2, -1)), 10 * A.shape[-1] * EPS, "A = L Lᵀ", names)


def symmetric_part(A, upper):
    """The symmetric matrix whose one triangle A holds."""
    return A.triu() + A.triu(1).mT if upper else A.tril() + A.tril(-1).mT


def random(*shape):
    """Random positive-definite matrices."""
    A = torch.randn(shape)
    return A @ A.mT / shape[-1] + torch.eye(shape[-1])


def plan(family, n):
    with tuned(family):
        explanation = metalcore.explain("cholesky", (n, n))
    return explanation.variant, explanation.kernels


def boundaries(family):
    """The orders on both sides of each change of plan."""
    return sorted({n for pair in changes(lambda n: plan(family, n), 1, 600) for n in pair})


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


def check_solution(B, L, X, upper):
    """A small residual: ‖B - A X‖ <= 10 n eps ‖L‖² ‖X‖ (Higham 2002, 10.1)."""
    B, L, X = B.double(), L.double(), X.double()
    A = L.triu().mT @ L.triu() if upper else L.tril() @ L.tril().mT
    bound = 10 * L.shape[-1] * EPS * norm(L).square() * norm(X)
    assert (norm(B - A @ X) <= bound).all()


@pytest.mark.parametrize("upper", [False, True])
@pytest.mark.parametrize(
    "n, columns", [(1, 1), (4, 1), (7, 9), (20, 3), (32, 40), (50, 1), (100, 70), (130, 5), (270, 8)]
)
def test_systems(device, n, columns, upper):
    L = torch.linalg.cholesky(random(3, n, n).double(), upper=upper).float()
    L += torch.randn(n, n).tril(-1) if upper else torch.randn(n, n).triu(1)  # no function may read these
    B = torch.randn(3, n, columns)
    X = metalcore.cholesky_solve(B.to(device), L.to(device), upper)
    assert X.is_contiguous() and X.device.type == torch.device(device).type
    check_solution(B, L, X.cpu(), upper)


@pytest.mark.parametrize(
    "B, L",
    [
        ((3, 1, 5, 2), (4, 5, 5)),
        ((5, 2), (4, 5, 5)),
        ((2, 5, 2), (5, 5)),
        ((5, 0), (5, 5)),
        ((0, 2), (0, 0)),
        ((3, 0, 2), (0, 0)),
        ((0, 5, 2), (5, 5)),
        ((2, 0, 5, 2), (5, 5)),
    ],
)
def test_batches_are_broadcast(device, B, L):
    B, L = torch.randn(B), torch.linalg.cholesky(random(*L)) if 0 not in L else torch.empty(L)
    X = metalcore.cholesky_solve(B.to(device), L.to(device)).cpu()
    expected = torch.cholesky_solve(B.double(), L.double())
    assert X.shape == expected.shape
    if X.numel():
        check_solution(B.expand(X.shape), L.expand(*X.shape[:-2], *L.shape[-2:]), X, False)


def test_batches_that_do_not_fit(device):
    with pytest.raises(RuntimeError, match="must match the size of tensor"):
        metalcore.cholesky_solve(torch.randn(2, 3, 1, device=device), torch.randn(4, 3, 3, device=device))


@pytest.mark.parametrize("n", [2, 10, 50])
def test_nan_stays_in_its_matrix(device, n):
    B, L = torch.randn(4, n, 2), torch.linalg.cholesky(random(4, n, n))
    B[1, 0, 0] = float("nan")
    L[2, 1, 0] = float("inf")
    X = metalcore.cholesky_solve(B.to(device), L.to(device)).cpu()
    assert [bool(x.isfinite().all()) for x in X] == [True, False, False, True]


def test_opinfo_of_solutions(device):
    check_samples(metalcore.cholesky_solve, "cholesky_solve", device, torch.float32)


def test_gradcheck_of_the_formulas():
    B = torch.randn(3, 1, 4, 2, dtype=torch.float64, requires_grad=True)
    for upper in (False, True):
        L = torch.linalg.cholesky(random(2, 4, 4).double(), upper=upper).requires_grad_()
        part = torch.triu if upper else torch.tril
        solve = lambda B, L: torch.ops.metalcore.cholesky_solve(B, part(L), upper)  # noqa: E731
        assert torch.autograd.gradcheck(solve, (B, L))
        assert torch.autograd.gradgradcheck(solve, (B, L))


@pytest.mark.parametrize("wanted", [(True, False), (False, True)])
def test_only_the_gradients_that_are_needed(device, wanted):
    B, L = torch.randn(3, 5, 2, device=device), metalcore.cholesky(random(5, 5).to(device))
    inputs = [x.requires_grad_(needed) for x, needed in zip((B, L), wanted)]
    metalcore.cholesky_solve(*inputs).sum().backward()
    assert [x.grad is not None for x in inputs] == list(wanted)


@pytest.mark.parametrize("where", ["cpu", "device"])
def test_opcheck_of_solutions(device, where):
    where = device if where == "device" else "cpu"
    B, L = torch.randn(2, 1, 5, 3, device=where), torch.linalg.cholesky(random(3, 5, 5)).to(where)
    check_operator(torch.ops.metalcore.cholesky_solve, B.requires_grad_(), L.requires_grad_(), False)


def test_explain():
    plan = metalcore.explain("cholesky_solve", (7, 40, 3), (7, 40, 40))
    once = metalcore.explain("solve_triangular", (7, 40, 40), (7, 40, 3), upper=False).steps
    assert [step[:4] for step in plan.steps] == 2 * [step[:4] for step in once]
    with pytest.raises(ValueError, match="needs the shape of L"):
        metalcore.explain("cholesky_solve", (40, 3))


@pytest.mark.parametrize("name", ["cholesky", "cholesky_ex"])
def test_opinfo(device, name):  # PyTorch defines no error inputs for either
    check_samples(
        getattr(metalcore, name),
        f"linalg.{name}",
        device,
        torch.float32,
        results=lambda output: output[0] if name == "cholesky_ex" else output,
    )


@pytest.mark.parametrize("upper", [False, True])
@pytest.mark.parametrize("n", [1, 5, 20, 70, 260])
def test_derivatives(device, n, upper):
    A = random(2, n, n)
    actual = derivatives(lambda A: metalcore.cholesky(A, upper=upper), [A.to(device)], 2)
    expected = derivatives(lambda A: torch.linalg.cholesky(A, upper=upper), [A.double()], 2)
    condition = torch.linalg.cond(A.double()).max().item()
    for order, (ours, theirs) in enumerate(zip(actual, expected), 1):
        tolerance = 10 * max(8, n) * EPS * condition**order * theirs.abs().max().item()
        torch.testing.assert_close(ours.cpu().double(), theirs, rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_has_gradients(device, dtype):
    A = random(6, 6).to(device=device, dtype=dtype).requires_grad_()
    metalcore.cholesky(A).sum().backward()
    B = A.detach().float().requires_grad_()
    metalcore.cholesky(B).to(dtype).sum().backward()
    assert A.grad.dtype == dtype and torch.equal(A.grad, B.grad.to(dtype))


def test_gradcheck_of_the_formula():
    # The operator on CPU tensors: the same derivative, in float64.
    A = random(2, 4, 4).double().requires_grad_()
    for upper in (False, True):
        factor = lambda A: torch.ops.metalcore.cholesky_ex((A + A.mT) / 2, upper)[0]  # noqa: E731
        assert torch.autograd.gradcheck(factor, (A,))
        assert torch.autograd.gradgradcheck(factor, (A,))


@pytest.mark.parametrize("where, shape", [("cpu", (2, 4, 4)), ("device", (2, 4, 4)), ("device", (0, 0))])
def test_opcheck(device, where, shape):
    A = random(*shape).to(device if where == "device" else "cpu")
    check_operator(torch.ops.metalcore.cholesky_ex, A.requires_grad_(), False)
    check_operator(torch.ops.metalcore.cholesky_ex, A.detach(), True)


def test_compile(device):
    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(A):
        L, info = metalcore.cholesky_ex(2 * A)
        return L + 1, info

    A = random(3, 5, 5).to(device).requires_grad_()
    L, info = compiled(A)
    assert torch.equal(L, metalcore.cholesky(2 * A.detach()) + 1) and not info.any()
    L.sum().backward()
    gradient, A.grad = A.grad, None
    metalcore.cholesky(2 * A).sum().backward()
    torch.testing.assert_close(gradient, A.grad)


def test_compile_with_the_check_of_errors(device):
    A = random(3, 5, 5).to(device)
    compiled = torch.compile(metalcore.cholesky, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(A), metalcore.cholesky(A))
