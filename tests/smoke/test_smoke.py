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
    "rms_norm": (lambda x: metalcore.rms_norm(x, x.shape[-1:], eps=1e-6), lambda x: F.rms_norm(x, x.shape[-1:], eps=1e-6)),
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
