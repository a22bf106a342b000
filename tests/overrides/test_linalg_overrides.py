"""enable_pytorch_overrides for linear algebra: torch.linalg's functions run metalcore's kernels, with the same results,
gradients and errors."""

import contextlib
import threading

import pytest
import torch
from ran import operators
from references import assert_same_error

import metalcore
from metalcore._core.registry import OPS
from metalcore.linalg import _triangular
from metalcore.overrides._report import Count

A, SPD = object(), object()  # a well-conditioned matrix; a symmetric positive definite one


def differentiable(f, *inputs):
    """The tensors that f returns, and the gradients of those that have one."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    results = f(*inputs)
    results = [results] if isinstance(results, torch.Tensor) else list(results)
    values = [x for x in results if x.requires_grad and x.is_floating_point()]
    directions = [torch.ones_like(x) for x in values]
    return [*(x.detach() for x in results), *torch.autograd.grad(values, inputs, directions)]


def by_ldl(a, b):
    """A solution by factors that the CPU has made. PyTorch has no gradient of either."""
    factors = torch.linalg.ldl_factor(a.detach().cpu())
    return torch.linalg.ldl_solve(*(x.to(a.device) for x in factors), b.detach()) + a + b


# override -> a function whose results do not depend on signs, the operator that must run, and the inputs
FUNCTIONS = {
    "qr": (lambda a: [x.abs() for x in torch.linalg.qr(a)], "qr", (A,)),
    "solve_triangular": (lambda a, b: torch.linalg.solve_triangular(a, b, upper=True), "solve_triangular", (A, A)),
    "cholesky": (torch.linalg.cholesky, "cholesky_ex", (SPD,)),
    "lu_factor": (torch.linalg.lu_factor, "lu_factor_ex", (A,)),
    "lu_solve": (lambda a, b: torch.linalg.lu_solve(*torch.linalg.lu_factor(a), b), "lu_solve", (A, A)),
    "solve": (torch.linalg.solve, None, (A, A)),
    "inv": (torch.linalg.inv, "inv_ex", (A,)),
    "det": (torch.linalg.det, "det", (A,)),
    "slogdet": (torch.linalg.slogdet, "slogdet", (A,)),
    "eigh": (lambda a: [torch.linalg.eigh(a).eigenvalues, torch.linalg.eigh(a).eigenvectors.square()], "eigh", (SPD,)),
    "eig": (
        lambda a: [
            torch.linalg.eig(a).eigenvalues.real.sort().values,
            torch.linalg.eig(a).eigenvectors.abs().sum(-1),
            torch.linalg.eigvals(a).abs().sort().values,
        ],
        "eig",
        (A,),
    ),
    "lstsq": (lambda a, b: torch.linalg.lstsq(a, b, driver="gelsy").solution, "qr_pivoted", (A, A)),
    "ldl_factor": (lambda a: torch.linalg.ldl_factor(a.detach()).LD + a, "ldl_factor_ex", (SPD,)),
    "ldl_solve": (by_ldl, "ldl_solve", (SPD, A)),
    "matrix_exp": (torch.linalg.matrix_exp, "matrix_exp", (A,)),
    "svd": (lambda a: [torch.linalg.svd(a, full_matrices=False).S, torch.linalg.svdvals(a)], "svd", (A,)),
}


def test_every_override_is_tried():
    assert set(FUNCTIONS) == {name for name in metalcore.linalg.__all__ if OPS[name].override}


def made(device, inputs, n):
    found = []
    for kind in inputs:
        a = torch.randn(2, n, n) / n**0.5 / 4
        # The eigenvalues are far from each other, since gradients divide by their differences.
        a = torch.diag(1 + torch.arange(n) / 2) + (a + a.mT if kind is SPD else a)
        found.append(a.to(device))
    return found


def assert_same(found, expected):
    """Compares results with PyTorch's own on the CPU. MPS has no kernel for some of the functions."""
    for ours, theirs in zip(found, expected):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-3, atol=1e-3 * max(1.0, theirs.abs().max().item()))


# PyTorch has the driver gels alone on NVIDIA GPUs.
NOT_ON_CUDA = {"lstsq": pytest.mark.only_on("mps", "simulator")}


@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("name", [pytest.param(name, marks=NOT_ON_CUDA.get(name, ())) for name in FUNCTIONS])
def test_results_and_gradients(device, name, contiguous):
    function, operator, kinds = FUNCTIONS[name]
    inputs = made(device, kinds, 6)
    inputs = inputs if contiguous else [x.mT for x in inputs]
    expected = differentiable(function, *(x.cpu() for x in inputs))
    with metalcore.enable_pytorch_overrides(name):
        ran = operators(lambda: function(*inputs))
        assert ran & ({operator} if operator else {"solve_ex", "lu_solve"})
        assert_same(differentiable(function, *inputs), expected)
    with metalcore.enable_pytorch_overrides():
        assert_same(differentiable(function, *inputs), expected)
    with contextlib.suppress(NotImplementedError):  # PyTorch has no MPS kernel for some of them
        assert operators(lambda: function(*inputs)) == set()


@pytest.mark.parametrize(
    "a, b, left",
    [
        ((4, 4), (4,), True),
        ((2, 4, 4), (2, 4), True),
        ((4, 4), (4, 3), True),
        ((4, 4), (3, 4), False),
        ((2, 4, 4), (4, 3), True),
        ((4, 4), (2, 4, 1), True),
    ],
)
def test_solve_of_every_shape(device, a, b, left):
    A, B = (torch.eye(4) * 3 + torch.randn(a) / 3).to(device), torch.randn(b, device=device)
    solve = lambda A, B: torch.linalg.solve(A, B, left=left)  # noqa: E731
    expected = differentiable(solve, A.cpu(), B.cpu())
    with metalcore.enable_pytorch_overrides():
        assert_same(differentiable(solve, A, B), expected)


def test_errors_are_pytorchs(device):
    zero, negative, wide = torch.zeros(2, 3, 3), -torch.eye(3), torch.randn(3, 4)
    for call in (
        lambda at: torch.linalg.inv(zero.to(at)),
        lambda at: torch.linalg.solve(zero.to(at), zero.to(at)),
        lambda at: torch.linalg.cholesky(negative.to(at)),
        lambda at: torch.linalg.det(wide.to(at)),
        *(
            lambda at, ex=ex: ex(zero.to(at), check_errors=True)
            for ex in (torch.linalg.lu_factor_ex, torch.linalg.inv_ex, torch.linalg.cholesky_ex)
        ),
        lambda at: torch.linalg.solve_ex(zero.to(at), zero.to(at), check_errors=True),
        lambda at: torch.linalg.inv(wide.to(at)),
        lambda at: torch.linalg.eigh(wide.to(at)),
    ):

        def overridden(call=call):
            with metalcore.enable_pytorch_overrides():
                call(device)

        assert_same_error(overridden, lambda: call(device))


class Previous:
    """Stands for the kernel that the override replaced."""

    def __init__(self):
        self.calls = 0

    def call_boxed(self, keyset, *args, **kwargs):
        self.calls += 1
        return "previous"


def test_an_op_that_calls_the_overridden_operator_gets_the_previous_kernel(device, monkeypatch):
    """A plan of the variant "torch" calls it so, on any thread; afterwards the kernel is metalcore's again."""
    previous, count = Previous(), Count()
    kernel = OPS["solve_triangular"].override[0].kernel(previous, count, previous.call_boxed)
    a = torch.eye(3, device=device)

    def op(A, B, upper, left, unitriangular):
        return kernel(None, A, B, upper=upper, left=left, unitriangular=unitriangular)  # as aten:: would

    monkeypatch.setattr(_triangular.ops, "solve_triangular", op)
    found = []
    threads = [threading.Thread(target=lambda: found.append(kernel(None, a, a, upper=True))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == ["previous"] * 3 and previous.calls == 3
    assert count.ran == 0 and sum(count.left.values()) == 3

    def fails(*args):
        raise ValueError("it fails")

    monkeypatch.setattr(_triangular.ops, "solve_triangular", fails)
    for _ in range(2):  # the guard opens again after an error
        with pytest.raises(ValueError, match="it fails"):
            kernel(None, a, a, upper=True)


@pytest.mark.only_on("cuda")
def test_sizes_that_plans_leave_to_pytorch(device):
    a = torch.eye(1200, device=device) * 40 + torch.randn(1200, 1200, device=device)
    spd = a @ a.mT
    for name, (function, _, kinds) in FUNCTIONS.items():
        if name in ("eigh", *NOT_ON_CUDA):
            continue  # the eigenvectors of so large a matrix are not determined well enough
        inputs = [spd if kind is SPD else a for kind in kinds]
        expected = function(*inputs)
        with metalcore.enable_pytorch_overrides(name):
            found = function(*inputs)
        expected, found = ([x] if isinstance(x, torch.Tensor) else list(x) for x in (expected, found))
        for ours, theirs in zip(found, expected):
            if ours.is_floating_point():
                torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-2 * theirs.abs().max().item())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_whatever_the_default_dtype_and_device(device, dtype):
    """Models are often made with 16-bit defaults, which PyTorch's LU on the CPU does not take."""
    A = torch.randn(3, 3, device=device) + 4 * torch.eye(3, device=device)
    expected = metalcore.solve(A, A[0])
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"), metalcore.enable_pytorch_overrides("solve", "det", "slogdet"):
            assert torch.equal(torch.linalg.solve(A, A[0]), expected)
    finally:
        torch.set_default_dtype(torch.float32)
