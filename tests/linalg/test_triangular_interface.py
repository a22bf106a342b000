"""solve_triangular as a replacement for torch.linalg.solve_triangular: arguments, layouts, derivatives; trsm."""

import itertools

import pytest
import torch
from matrices import EPS
from opinfo import check_samples
from references import assert_same_error, check_operator
from rows import tuned
from triangular_cases import check_solution, well_conditioned

import metalcore


def test_is_the_namesake(device):
    assert metalcore.solve_triangular is metalcore.linalg.solve_triangular
    A, B = well_conditioned(4, 4).to(device), torch.randn(4, 2, device=device)
    X = metalcore.solve_triangular(A=A, B=B, upper=True)
    check_solution(A.cpu(), B.cpu(), X, upper=True)
    with pytest.raises(TypeError):
        metalcore.solve_triangular(A, B)  # upper has no default


def test_opinfo_samples(device):
    check_samples(metalcore.solve_triangular, "linalg.solve_triangular", device, torch.float32)


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


def layouts(make):
    """Batches of matrices of a shape, in each memory layout that matters."""
    return {
        "transposed": lambda *s: make(*s[:-2], s[-1], s[-2]).mT,
        "every other": lambda *s: make(*s[:-2], 2 * s[-2], 3 * s[-1])[..., ::2, ::3],
        "with an offset": lambda *s: make(*s[:-2], s[-2] + 3, s[-1] + 5)[..., 3:, 5:],
        "expanded batch": lambda *s: make(1, *s[-2:]).expand(s),
        "batch last": lambda *s: make(*s[-2:], s[0]).permute(2, 0, 1),
    }


@pytest.mark.parametrize("n, columns", [(6, 1), (20, 7), (40, 2), (70, 40), (150, 6)])
def test_layouts(device, n, columns):
    def on_device(tensor):
        # The layout on the device is the same: tensor.to(device) might pack the elements.
        elements = torch.empty(0).set_(tensor.untyped_storage())
        return elements.to(device).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    for make_A, make_B in itertools.product(layouts(torch.randn).values(), repeat=2):
        A, B = make_A(2, n, n), make_B(2, n, columns)
        for i in range(2 if A.stride(0) else 1):
            A[i].diagonal().add_(2 * n**0.5)
        for upper in (False, True):
            X = metalcore.solve_triangular(on_device(A), on_device(B), upper=upper)
            check_solution(A, B, X, upper=upper)
            X = metalcore.solve_triangular(on_device(A), on_device(B).mT, upper=upper, left=False)
            check_solution(A, B.mT, X, upper=upper, left=False)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_has_gradients(device, dtype):
    A, B = well_conditioned(2, 9, 9).to(device, dtype), torch.randn(2, 9, 3, device=device).to(dtype)
    A.requires_grad_()
    metalcore.solve_triangular(A, B, upper=True).sum().backward()
    assert A.grad.dtype == dtype and A.grad.isfinite().all() and not A.grad.tril(-1).any()


def test_out(device):
    A, B = well_conditioned(3, 5, 5).to(device), torch.randn(3, 5, 4, device=device)
    expected = metalcore.solve_triangular(A, B, upper=True)
    for out in (torch.empty(0, device=device), torch.empty(3, 4, 5, device=device).mT, B):
        assert metalcore.solve_triangular(A, B.clone(), upper=True, out=out) is out
        assert torch.equal(out, expected)
    with pytest.raises(RuntimeError, match="Expected out tensor to have dtype"):
        metalcore.solve_triangular(A, B, upper=True, out=torch.empty(0, device=device, dtype=torch.int32))


@pytest.mark.parametrize(
    "call",
    [
        lambda solve, device: solve(torch.randn(3, device=device), torch.randn(3, 3, device=device), upper=True),
        lambda solve, device: solve(torch.randn(3, 3, device=device), torch.randn(3, device=device), upper=True),
        lambda solve, device: solve(torch.randn(3, 4, device=device), torch.randn(3, 3, device=device), upper=True),
        lambda solve, device: solve(torch.randn(3, 3, device=device), torch.randn(4, 3, device=device), upper=True),
        lambda solve, device: solve(
            torch.eye(3, device=device), torch.randn(3, 4, device=device), upper=True, left=False
        ),
        lambda solve, device: solve(
            torch.randn(2, 3, 3, device=device), torch.randn(5, 3, 3, device=device), upper=True
        ),
        lambda solve, device: solve(torch.randn(3, 3, device=device), None, upper=True),
    ],
)
def test_errors_are_torchs(device, call):
    assert_same_error(
        lambda: call(metalcore.solve_triangular, device), lambda: call(torch.linalg.solve_triangular, "cpu")
    )


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


@pytest.mark.parametrize(
    "a, b, left, variant, kernels",
    [
        ((3, 3), (3, 1), True, "simd", ["trsv_simd_8x1"]),
        ((100, 12, 12), (100, 12, 4), True, "simd", ["trsv_simd_16x4"]),
        ((5, 32, 32), (32, 40), True, "simd", ["trsm_simd_32x32"]),
        ((33, 33), (1, 33), False, "block", ["trsv_block_1x2"]),
        ((1024, 128, 128), (1024, 128, 128), True, "block", ["trsm_block_128"]),
        ((300, 300), (300, 20), True, "blocked", ["trsm_panel", "trsm_update"]),
        ((1100, 1100), (1100, 2), True, "blocked", ["trsv_block_4x4", "trsv_update_4"]),
        ((0, 5, 5), (5, 2), True, "empty", []),
    ],
)
def test_explain(a, b, left, variant, kernels):
    with tuned("baseline"):
        plan = metalcore.explain("solve_triangular", a, b, left=left)
    assert plan.variant == variant
    assert list(plan.kernels) == kernels
    assert all(step.threadgroup[0] <= 1024 for step in plan.steps)
    with pytest.raises(ValueError, match="Incompatible shapes"):
        metalcore.explain("solve_triangular", a, (7, 7))


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
