"""torch.compile with inductor: metalcore's operators stay in the graph, between Triton's kernels."""

import pytest
import torch

import metalcore

pytest.importorskip("triton")


def block(x, residual, weight):
    y, total = metalcore.add_rms_norm(x * 1.5, residual, weight)
    y = metalcore.gelu(metalcore.silu(y) + 0.1, "tanh")
    return metalcore.softmax(y, -1) + metalcore.log_softmax(total, 0)


def test_forward_and_backward():
    inputs = [torch.randn(shape, device="cuda", requires_grad=True) for shape in ((64, 128), (64, 128), (128,))]
    direction = torch.randn(64, 128, device="cuda")
    expected = block(*inputs)
    gradients = torch.autograd.grad(expected, inputs, direction)
    found = torch.compile(block, fullgraph=True)(*inputs)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    for gradient, wanted in zip(torch.autograd.grad(found, inputs, direction), gradients):
        torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-5)


def test_cuda_graphs():
    """mode="reduce-overhead" captures what it compiles."""
    compiled = torch.compile(block, fullgraph=True, mode="reduce-overhead")
    for seed in range(4):
        torch.manual_seed(seed)
        inputs = [torch.randn(shape, device="cuda") for shape in ((64, 128), (64, 128), (128,))]
        torch.testing.assert_close(compiled(*inputs).clone(), block(*inputs), rtol=1e-5, atol=1e-5)


def test_other_shapes():
    compiled = torch.compile(
        lambda x: metalcore.softmax(metalcore.rms_norm(x * 2, x.shape[-1:]), -1), dynamic=True, fullgraph=True
    )
    for shape in ((3, 8), (5, 70), (2, 3000)):
        x = torch.randn(shape, device="cuda")
        torch.testing.assert_close(
            compiled(x), metalcore.softmax(metalcore.rms_norm(x * 2, shape[-1:]), -1), rtol=1e-5, atol=1e-6
        )


def test_qr():
    def solve(a, b):
        q, r = metalcore.qr(a + 0)
        return torch.linalg.solve_triangular(r, q.mT @ b, upper=True)

    a, b = torch.randn(5, 20, 8, device="cuda", requires_grad=True), torch.randn(5, 20, 1, device="cuda")
    expected = solve(a, b)
    found = torch.compile(solve, fullgraph=True)(a, b)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(*(torch.autograd.grad(y.sum(), a)[0] for y in (found, expected)), rtol=1e-3, atol=1e-3)
