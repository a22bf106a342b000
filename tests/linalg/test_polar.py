"""polar: against an eigendecomposition in float64, its gradients, its kinds of input."""

import pytest
import torch

import metalcore
from metalcore._core.registry import OPS

reference = OPS["polar"].reference
SHAPES = ((3, 5, 5), (2, 40, 6), (2, 3, 7), (1, 1), (70, 70))
each_side = pytest.mark.parametrize("side", ("right", "left"))


def matrices(*shape, dtype=torch.float32):
    """Random matrices of full rank."""
    a = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return (a + 2 * torch.eye(*shape[-2:], dtype=a.dtype) * max(shape[-2:]) ** 0.5).to(dtype)


@each_side
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16), ids=str)
def test_values(device, side, shape, dtype):
    A = matrices(*shape, dtype=dtype)
    U, P = metalcore.polar(A.to(device), side=side)
    expected = reference(A.double(), side=side)
    eps = 8 * max(shape[-2:]) * torch.finfo(torch.float32).eps + 2 * torch.finfo(dtype).eps
    for value, wanted in zip((U, P), expected):
        assert value.dtype is dtype and value.device.type == torch.device(device).type
        torch.testing.assert_close(value.cpu().double(), wanted, rtol=0, atol=eps * float(wanted.abs().max()))


@each_side
@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
@pytest.mark.parametrize("dtype", (torch.float64, torch.complex128), ids=str)
def test_derivatives(side, shape, dtype):
    A = torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=dtype)[..., :4, :5].requires_grad_()

    def parts(A):
        return tuple(metalcore.polar(A, side=side))

    assert torch.autograd.gradcheck(parts, A)
    if dtype is torch.float64:
        assert torch.autograd.gradgradcheck(parts, A)


@each_side
def test_gradients_on_the_device(device, side):
    A = matrices(3, 9, 5)
    leaves = A.to(device).requires_grad_(), A.double().requires_grad_()
    for leaf, function in zip(leaves, (metalcore.polar, reference)):
        U, P = function(leaf, side=side)
        (U.sin().sum() + P.sin().sum()).backward()
    torch.testing.assert_close(leaves[0].grad.cpu().double(), leaves[1].grad, rtol=1e-4, atol=1e-5)


def test_equal_singular_values(device):
    """The gradient does not divide by their differences: that of U at the identity is the antisymmetric part."""
    A = torch.eye(6, device=device).expand(2, 6, 6).clone().requires_grad_()
    U, _ = metalcore.polar(A)
    direction = torch.randn(2, 6, 6, generator=torch.Generator().manual_seed(0)).to(device)
    (gradient,) = torch.autograd.grad(U, A, direction)
    torch.testing.assert_close(gradient, (direction - direction.mT) / 2, rtol=1e-5, atol=1e-6)


def test_empty_and_batches(device):
    for shape in ((0, 3, 3), (2, 0, 3), (2, 3, 0)):
        U, P = metalcore.polar(torch.zeros(shape, device=device))
        assert U.shape == shape and P.shape == (shape[0], shape[2], shape[2])
    A = matrices(4, 6, 6).to(device)
    for i, (U, P) in enumerate(zip(*metalcore.polar(A))):
        torch.testing.assert_close(U @ P, A[i], rtol=1e-5, atol=1e-4)


def test_errors(device):
    A = torch.zeros(3, 3, device=device)
    for call, error, text in (
        (lambda: metalcore.polar(None), TypeError, "A must be a tensor"),
        (lambda: metalcore.polar(A[0]), RuntimeError, "A must have at least 2 dimensions, not 1"),
        (lambda: metalcore.polar(A, side="both"), ValueError, "side must be 'left' or 'right', not 'both'"),
    ):
        with pytest.raises(error, match=text):
            call()
