"""qr's derivatives against PyTorch's, and as an operator under PyTorch's tracing tools."""

import pytest
import torch
from derivatives import derivatives
from matrices import EPS
from references import assert_same_error, check_operator

import metalcore

DIFFERENTIABLE = [
    ((4, 4), "reduced"),
    ((7, 4), "reduced"),
    ((4, 7), "reduced"),
    ((4, 4), "complete"),
    ((4, 7), "complete"),
    ((2, 3, 20, 12), "reduced"),
    ((70, 40), "reduced"),
    ((1100, 5), "reduced"),
    ((3, 0), "reduced"),
    ((0, 3), "reduced"),
]


@pytest.mark.parametrize("parts", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("shape, mode", DIFFERENTIABLE)
def test_derivatives(device, shape, mode, parts):
    A = torch.randn(shape)
    actual = derivatives(lambda A: metalcore.qr(A, mode), [A.to(device)], 2, parts)
    expected = derivatives(lambda A: torch.linalg.qr(A, mode), [A.double()], 2, parts)
    # Each order multiplies by R⁻¹ once more; the reference's own values show how large that makes things.
    condition = torch.linalg.cond(A[..., : min(shape[-2:])].double()).max().item() if 0 not in shape else 1.0
    for order, (ours, theirs) in enumerate(zip(actual, expected), 1):
        assert ours.shape == theirs.shape
        scale = max([1.0, *theirs.abs().flatten().tolist()])
        tolerance = 10 * max(8, *shape) * EPS * condition**order * scale
        torch.testing.assert_close(ours.cpu().double(), theirs, rtol=0, atol=tolerance)


@pytest.mark.parametrize("shape, mode", [((4, 4), "r"), ((5, 3), "r"), ((5, 3), "complete")])
def test_without_a_derivative(device, shape, mode):
    def gradient(qr, A):
        results = qr(A.requires_grad_(), mode)
        assert results.R.requires_grad
        results.R.sum().backward()

    assert_same_error(
        lambda: gradient(metalcore.qr, torch.randn(shape).to(device)),
        lambda: gradient(torch.linalg.qr, torch.randn(shape)),
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_has_gradients(device, dtype):
    A = torch.randn(6, 4).to(dtype)
    gradient = derivatives(lambda A: metalcore.qr(A, "reduced"), [A.to(device)], 1, (0, 1))[0]
    expected = derivatives(lambda A: torch.linalg.qr(A, "reduced"), [A.double()], 1, (0, 1))[0]
    assert gradient.dtype == dtype
    tolerance = 10 * 6 * torch.finfo(dtype).eps * torch.linalg.cond(A.double()).item() * expected.abs().max().item()
    torch.testing.assert_close(gradient.cpu().double(), expected, rtol=0, atol=tolerance)


def test_gradcheck_of_the_formulas():
    # The operator on CPU tensors: the same derivative, in float64.
    qr = torch.ops.metalcore.qr
    for shape, mode in [((4, 4), "reduced"), ((5, 3), "reduced"), ((3, 5), "reduced"), ((2, 3, 4), "complete")]:
        A = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(lambda A: qr(A, mode), (A,))
        assert torch.autograd.gradgradcheck(lambda A: qr(A, mode), (A,))


@pytest.mark.parametrize("mode", ["reduced", "complete", "r"])
@pytest.mark.parametrize(
    "where, shape", [("cpu", (2, 4, 3)), ("device", (2, 4, 3)), ("device", (3, 4)), ("device", (0, 3))]
)
def test_opcheck(device, where, shape, mode):
    A = torch.randn(shape, device=device if where == "device" else "cpu")
    differentiable = mode != "r" and not (mode == "complete" and shape[-2] > shape[-1])
    check_operator(torch.ops.metalcore.qr, A.requires_grad_(differentiable), mode)


@pytest.mark.parametrize("mode", ["reduced", "complete", "r"])
def test_compile(device, mode):
    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(A):
        Q, R = metalcore.qr(A * 2, mode)
        return Q + 1, R

    A = torch.randn(3, 5, 6, device=device, requires_grad=mode != "r")
    Q, R = compiled(A)
    expected = metalcore.qr(A.detach() * 2, mode)
    assert torch.equal(Q, expected.Q + 1) and torch.equal(R, expected.R)
    if mode != "r":
        R.sum().backward()
        gradient, A.grad = A.grad, None
        metalcore.qr(A * 2, mode).R.sum().backward()
        torch.testing.assert_close(gradient, A.grad)
