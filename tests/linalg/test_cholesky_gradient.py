"""Derivatives of cholesky and cholesky_ex, by eager PyTorch and by a compiler."""

import pytest
import torch
from cholesky_cases import random
from derivatives import derivatives
from matrices import EPS
from opinfo import check_samples
from references import check_operator

import metalcore


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
