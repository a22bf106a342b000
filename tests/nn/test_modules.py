"""metalcore.nn: drop-ins for modules of torch.nn."""

import pytest
import torch

import metalcore.nn

MODULES = {
    "SiLU": {},
    "SiLU(inplace)": {"inplace": True},
    "GELU": {},
    "GELU(tanh)": {"approximate": "tanh"},
    "ReLU": {},
    "ReLU(inplace)": {"inplace": True},
    "LayerNorm": {"normalized_shape": 8},
    "LayerNorm(no bias)": {"normalized_shape": [6, 8], "bias": False},
    "Softmax": {"dim": 1},
    "LogSoftmax": {"dim": -1},
    "RMSNorm": {"normalized_shape": 8},
    "RMSNorm(two dimensions)": {"normalized_shape": [6, 8], "eps": 1e-3},
    "RMSNorm(no weight)": {"normalized_shape": 8, "elementwise_affine": False},
}


@pytest.mark.parametrize("name", MODULES)
def test_as_torch(device, name):
    kind, arguments = name.split("(")[0], MODULES[name]
    theirs = getattr(torch.nn, kind)(**arguments)
    ours = getattr(metalcore.nn, kind)(**arguments)
    assert isinstance(ours, getattr(torch.nn, kind)) and repr(ours) == repr(theirs)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter)
    ours.load_state_dict(theirs.state_dict())
    ours.to(device)

    x = torch.randn(4, 6, 8)
    ours_x, theirs_x = x.to(device).requires_grad_(), x.clone().requires_grad_()
    ours_y, theirs_y = ours(ours_x * 1), theirs(theirs_x * 1)
    bound = {"rtol": 1e-5, "atol": 64 * torch.finfo(torch.float32).eps}
    torch.testing.assert_close(ours_y.cpu(), theirs_y, **bound)
    ours_y.square().sum().backward()
    theirs_y.square().sum().backward()
    torch.testing.assert_close(ours_x.grad.cpu(), theirs_x.grad, **bound)
    for actual, expected in zip(ours.parameters(), theirs.parameters()):
        torch.testing.assert_close(actual.grad.cpu(), expected.grad, **bound)


def test_softmax_without_dim(device):
    with pytest.warns(UserWarning, match="Implicit dimension choice"):
        metalcore.nn.Softmax()(torch.randn(3, 4, device=device))


def test_add_rms_norm(device):
    module = metalcore.nn.AddRMSNorm(8, eps=1e-3).to(device)
    x, residual = torch.randn(3, 8, device=device), torch.randn(3, 8, device=device)
    y, total = module(x, residual)
    assert torch.equal(total, x + residual)
    assert torch.equal(y, metalcore.rms_norm(total, (8,), module.weight, 1e-3))


def test_add_layer_norm(device):
    module = metalcore.nn.AddLayerNorm(8, eps=1e-3).to(device)
    x, residual = torch.randn(3, 8, device=device), torch.randn(3, 8, device=device)
    y, total = module(x, residual)
    assert torch.equal(total, x + residual)
    assert torch.equal(y, metalcore.layer_norm(total, (8,), module.weight, module.bias, 1e-3))


def test_activations_that_torch_has_no_modules_for(device):
    x, gate = torch.randn(3, 8, device=device), torch.randn(3, 8, device=device)
    assert torch.equal(metalcore.nn.ReLU2()(x), metalcore.relu2(x))
    assert torch.equal(metalcore.nn.QuickGELU()(x), metalcore.quick_gelu(x))
    assert torch.equal(metalcore.nn.SwiGLU()(gate, x), metalcore.swiglu(gate, x))
    assert torch.equal(metalcore.nn.GeGLU("tanh")(gate, x), metalcore.geglu(gate, x, "tanh"))
    assert repr(metalcore.nn.GeGLU("tanh")) == "GeGLU(approximate='tanh')"
