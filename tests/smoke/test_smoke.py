"""Every op once on small input, forward and backward. `make test` runs this a second time in checking mode."""

import pytest
import torch
import torch.nn.functional as F

import metalcore

FUNCTIONS = {
    "silu": (metalcore.silu, F.silu),
    "gelu": (metalcore.gelu, F.gelu),
    "gelu_tanh": (lambda x: metalcore.gelu(x, approximate="tanh"), lambda x: F.gelu(x, approximate="tanh")),
    "softmax": (lambda x: metalcore.softmax(x, -1), lambda x: F.softmax(x, -1)),
    "rms_norm": (
        lambda x: metalcore.rms_norm(x, x.shape[-1:], eps=1e-6),
        lambda x: F.rms_norm(x, x.shape[-1:], eps=1e-6),
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("shape", [(5, 37), (2, 1500)])
def test_function(device, name, shape):
    ours, theirs = FUNCTIONS[name]
    torch.manual_seed(0)
    host = torch.randn(shape, requires_grad=True)
    x = host.detach().to(device).requires_grad_()
    expected, found = theirs(host), ours(x)
    torch.testing.assert_close(found.cpu(), expected)
    grad = torch.randn(shape)
    expected.backward(grad)
    found.backward(grad.to(device))
    torch.testing.assert_close(x.grad.cpu(), host.grad)


@pytest.mark.parametrize("shape", [(3, 8, 8), (2, 40, 24), (70, 66)])
def test_qr(device, shape):
    torch.manual_seed(0)
    a = torch.randn(shape)
    q, r = (t.cpu().double() for t in metalcore.qr(a.to(device)))
    bound = 10 * max(shape[-2:]) * torch.finfo(torch.float32).eps
    eye = torch.eye(shape[-1], dtype=torch.float64)
    assert (q.mT @ q - eye).norm(dim=(-2, -1)).max() <= bound
    assert ((a.double() - q @ r).norm(dim=(-2, -1)) / a.double().norm(dim=(-2, -1))).max() <= bound


@pytest.mark.parametrize("shape", [(3, 8, 8), (2, 40, 40), (140, 140)])
def test_cholesky(device, shape):
    torch.manual_seed(0)
    a = torch.randn(shape)
    a = metalcore.linalg.syrk(a.to(device), torch.eye(shape[-1], device=device), alpha=1 / shape[-1])
    b = torch.randn(shape)
    x = metalcore.cholesky_solve(b.to(device), metalcore.cholesky(a)).cpu()
    torch.testing.assert_close(a.cpu() @ x, b, rtol=0, atol=100 * shape[-1] * torch.finfo(torch.float32).eps)


def test_spectral(device):
    torch.manual_seed(0)
    a = torch.randn(3, 6, 4)
    x = a.to(device).requires_grad_()
    values, inverse = metalcore.svdvals(x), metalcore.pinv(x)
    expected = a.clone().requires_grad_()
    for found, reference in ((values, torch.linalg.svdvals(expected)), (inverse, torch.linalg.pinv(expected))):
        torch.testing.assert_close(found.cpu(), reference, rtol=1e-4, atol=1e-5)
        gradients = [torch.autograd.grad(y.square().sum(), leaf)[0] for y, leaf in ((found, x), (reference, expected))]
        torch.testing.assert_close(gradients[0].cpu(), gradients[1], rtol=1e-3, atol=1e-4)
    s = a @ a.mT
    torch.testing.assert_close(metalcore.eigvalsh(s.to(device)).cpu(), torch.linalg.eigvalsh(s), rtol=1e-4, atol=1e-4)
    assert metalcore.matrix_rank(s.to(device)).tolist() == [4, 4, 4]


@pytest.mark.parametrize("shape", [(3, 8, 8), (2, 12, 40), (36, 34), (140, 140)])
def test_svd(device, shape):
    torch.manual_seed(0)
    a = torch.randn(shape)
    u, s, vh = (t.cpu().double() for t in metalcore.svd(a.to(device), full_matrices=False))
    bound = 10 * max(shape[-2:]) * torch.finfo(torch.float32).eps
    for q in (u, vh.mT):
        assert (q.mT @ q - torch.eye(q.shape[-1])).norm(dim=(-2, -1)).max() <= bound
    residual = a.double() - u * s.unsqueeze(-2) @ vh
    assert (residual.norm(dim=(-2, -1)) / a.double().norm(dim=(-2, -1))).max() <= bound


@pytest.mark.parametrize("shape", [(3, 8, 8), (2, 20, 20), (34, 34), (140, 140)])
def test_eigh(device, shape):
    torch.manual_seed(0)
    a = torch.randn(shape)
    a = a + a.mT
    values, q = (t.cpu().double() for t in metalcore.eigh(a.to(device)))
    bound = 10 * shape[-1] * torch.finfo(torch.float32).eps
    assert (q.mT @ q - torch.eye(shape[-1])).norm(dim=(-2, -1)).max() <= bound
    residual = a.double() @ q - q * values.unsqueeze(-2)
    assert (residual.norm(dim=(-2, -1)) / a.double().norm(dim=(-2, -1))).max() <= bound


@pytest.mark.parametrize("shape", [(3, 8, 8), (2, 40, 24), (140, 70)])
def test_reflectors(device, shape):
    torch.manual_seed(0)
    A = torch.randn(shape)
    a, tau = metalcore.geqrf(A.to(device))
    R = metalcore.ormqr(a, tau, A.to(device), transpose=True)
    Q = metalcore.householder_product(a, tau).cpu().double()
    bound = 10 * max(shape[-2:]) * torch.finfo(torch.float32).eps * A.double().norm()
    assert (Q @ a.cpu()[..., : shape[-1], :].triu().double() - A).norm() <= bound
    assert (R - a.triu()).norm() <= bound


def test_adamw(device):
    torch.manual_seed(0)
    host = [torch.nn.Parameter(torch.randn(shape)) for shape in [(7,), (33, 5)]]
    parameters = [torch.nn.Parameter(p.detach().to(device)) for p in host]
    theirs, ours = torch.optim.AdamW(host), metalcore.optim.AdamW(parameters)
    for _ in range(3):
        for p, q in zip(host, parameters):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.to(device)
        theirs.step()
        ours.step()
    for p, q in zip(host, parameters):
        torch.testing.assert_close(q.detach().cpu(), p.detach(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("n", [3, 12, 40, 170])
def test_lu(device, n):
    torch.manual_seed(0)
    a, b = torch.randn(2, n, n) + 2 * n**0.5 * torch.eye(n), torch.randn(2, n, 2)
    bound = 10 * n * torch.finfo(torch.float32).eps * a.norm()
    p, lower, upper = (part.cpu() for part in metalcore.lu(a.to(device)))
    assert (p @ lower @ upper - a).norm() <= bound
    x, inverse = metalcore.solve(a.to(device), b.to(device)).cpu(), metalcore.inv(a.to(device)).cpu()
    assert (a @ x - b).norm() <= bound * x.norm()
    assert (a @ inverse - torch.eye(n)).norm() <= bound * inverse.norm()
    # One by one: PyTorch's factorization of a batch on the CPU was seen to be wrong where threads share it.
    expected = torch.stack([torch.linalg.slogdet(matrix)[1] for matrix in a])
    torch.testing.assert_close(metalcore.slogdet(a.to(device))[1].cpu(), expected)


@pytest.mark.parametrize("n, columns", [(8, 1), (20, 9), (70, 1), (40, 20), (150, 5)])
def test_solve_triangular(device, n, columns):
    torch.manual_seed(0)
    a, b = torch.randn(2, n, n) / n**0.5 / 2 + torch.eye(n), torch.randn(2, n, columns)
    x = metalcore.solve_triangular(a.to(device), b.to(device), upper=False).cpu()
    bound = 10 * n * torch.finfo(torch.float32).eps * a.norm() * x.norm()
    assert (a.tril() @ x - b).norm() <= bound


@pytest.mark.parametrize("shape", [(6, 4), (4, 6)])
def test_lstsq(device, shape):
    torch.manual_seed(0)
    a, b = torch.randn(shape), torch.randn(shape[0], 2)
    found, expected = metalcore.lstsq(a.to(device), b.to(device)), torch.linalg.lstsq(a, b, driver="gels")
    torch.testing.assert_close(found.solution.cpu(), expected.solution, rtol=1e-4, atol=1e-4)
