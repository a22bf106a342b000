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
    "GroupNorm": {"num_groups": 3, "num_channels": 6},
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


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("name", [name for name in MODULES if "inplace" not in name])
def test_traced(device, name):
    """torch.jit.trace compares the trace with another one, without gradients, line by line."""
    module = getattr(metalcore.nn, name.split("(")[0])(**MODULES[name]).to(device)
    x = torch.randn(4, 6, 8, device=device)
    torch.testing.assert_close(torch.jit.trace(module, x)(x + 1), module(x + 1))


CLASSES = {
    "CrossEntropyLoss": ({}, (5, 7), (5,)),
    "CrossEntropyLoss(options)": (
        {"weight": torch.linspace(0.5, 2, 7), "ignore_index": 1, "reduction": "sum", "label_smoothing": 0.1},
        (2, 7, 4),
        (2, 4),
    ),
}


@pytest.mark.parametrize("name", CLASSES)
def test_losses(device, name):
    arguments, shape, targets = CLASSES[name]
    ours, theirs = (module.CrossEntropyLoss(**arguments) for module in (metalcore.nn, torch.nn))
    assert isinstance(ours, torch.nn.CrossEntropyLoss) and repr(ours) == repr(theirs)
    x, target = torch.randn(shape), torch.randint(7, targets)
    torch.testing.assert_close(ours.to(device)(x.to(device), target.to(device)).cpu(), theirs(x, target))


@pytest.mark.parametrize("bias", [False, True])
def test_linear_cross_entropy(device, bias):
    module = metalcore.nn.LinearCrossEntropyLoss(6, 9, bias=bias, label_smoothing=0.1, chunk=4).to(device)
    x, target = torch.randn(10, 6), torch.randint(9, (10,))
    loss = module(x.to(device), target.to(device))
    loss.backward()
    linear = torch.nn.Linear(6, 9, bias=bias)
    linear.load_state_dict({name: value.cpu() for name, value in module.linear.state_dict().items()})
    expected = torch.nn.functional.cross_entropy(linear(x), target, label_smoothing=0.1)
    expected.backward()
    torch.testing.assert_close(loss.cpu(), expected)
    for parameter, wanted in zip(module.parameters(), linear.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad.cpu(), wanted.grad)


TABLES = {
    "Embedding": {"padding_idx": 2},
    "EmbeddingBag": {"mode": "sum", "padding_idx": 2},
    "EmbeddingBag(means)": {},
    "EmbeddingBag(maxima)": {"mode": "max"},
}


@pytest.mark.parametrize("name", TABLES)
def test_tables(device, name):
    kind = name.split("(")[0]
    ours, theirs = (getattr(module, kind)(9, 6, **TABLES[name]) for module in (metalcore.nn, torch.nn))
    assert isinstance(ours, getattr(torch.nn, kind)) and repr(ours) == repr(theirs)
    ours.load_state_dict(theirs.state_dict())
    indices = torch.randint(9, (4, 5))
    found, expected = ours.to(device)(indices.to(device)), theirs(indices)
    torch.testing.assert_close(found.cpu(), expected)
    found.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(ours.weight.grad.cpu(), theirs.weight.grad)


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
