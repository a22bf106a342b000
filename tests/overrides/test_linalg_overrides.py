"""enable_pytorch_overrides for linear algebra: torch.linalg's functions run metalcore's kernels, with the same results,
gradients and errors."""

import contextlib
import functools
import threading
from dataclasses import replace

import pytest
import torch
from cases import operators
from references import assert_same_error

import metalcore
from metalcore._core.registry import OPS
from metalcore.linalg import _triangular
from metalcore.overrides._report import Count


def differentiable(f, *inputs):
    """The tensors that f returns, and the gradients of those that have one."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    results = f(*inputs)
    results = [results] if isinstance(results, torch.Tensor) else list(results)
    values = [x for x in results if x.requires_grad and x.is_floating_point()]
    directions = [torch.ones_like(x) for x in values]
    return [*(x.detach() for x in results), *torch.autograd.grad(values, inputs, directions)]


# The override that takes each of PyTorch's functions.
OVERRIDES = {name: name for name in metalcore.linalg.__all__ if OPS[name].override}
OVERRIDES |= {"eigvals": "eig", "svdvals": "svd"}


def call_of(name, device, n=None):
    """PyTorch's function with results that do not depend on signs, and the tensors of the first sample of the op, or
    square matrices of size n."""
    op = OPS[name]
    sample = op.samples()[0]
    if name == "lstsq":  # PyTorch keeps the default driver
        sample = replace(sample, options={"driver": "gelsy"})
    if n:
        sample = replace(sample, shapes=tuple((n, n) for _ in sample.shapes))
    return lambda *x: op.compute(sample, x, op.pytorch), sample.make(device, torch.float32)


def assert_same(found, expected):
    """Compares results with PyTorch's own on the CPU. MPS has no kernel for some of the functions."""
    for ours, theirs in zip(found, expected):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-3, atol=1e-3 * max(1.0, theirs.abs().max().item()))


# PyTorch has the driver gels alone on NVIDIA GPUs.
NOT_ON_CUDA = {"lstsq": pytest.mark.only_on("mps", "simulator")}


@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("name", [pytest.param(name, marks=NOT_ON_CUDA.get(name, ())) for name in OVERRIDES])
def test_results_and_gradients(device, name, contiguous):
    function, inputs = call_of(name, device)
    inputs = inputs if contiguous else [x.mT.contiguous().mT for x in inputs]
    compute = functools.partial(differentiable, function) if OPS[name].backward else function
    expected = compute(*(x.cpu() for x in inputs))
    with metalcore.enable_pytorch_overrides(OVERRIDES[name]):
        assert operators(lambda: function(*inputs)).intersection(OPS[name].operators)
        assert_same(compute(*inputs), expected)
    with metalcore.enable_pytorch_overrides():
        assert_same(compute(*inputs), expected)
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
    for name in OVERRIDES.keys() - {"eig", "eigh", *NOT_ON_CUDA}:  # eigenvectors of such matrices are hardly determined
        function, inputs = call_of(name, device, 1200)
        inputs = [x / 16 + 8 * torch.eye(1200, device=device) for x in inputs]  # no rounding changes their pivots
        # cuSOLVER solves with factors of LDL wrongly, or fails, for as many columns of B.
        expected = function(*(x.cpu() for x in inputs) if name == "ldl_solve" else inputs)
        with metalcore.enable_pytorch_overrides(OVERRIDES[name]):
            found = function(*inputs)
        for ours, theirs in zip(found, expected):
            theirs = theirs.to(ours.device)
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
