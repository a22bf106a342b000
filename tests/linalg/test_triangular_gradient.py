"""Derivatives of solve_triangular, by eager PyTorch and by a compiler."""

import itertools

import pytest
import torch
from matrices import EPS
from opinfo import check_samples
from references import check_operator
from triangular_cases import well_conditioned

import metalcore


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
