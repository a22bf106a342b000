"""Networks of convolutions: batch norms are folded, and what follows a convolution is a part of it."""

import pytest
import torch
from checks import agree, operators
from nets import MobileNet, ResNet, perturb
from torch import nn

import metalcore
from metalcore.programs.patterns.conv import _lies_channels_last

FUSIONS = ["conv_batch_norm", "conv", "pointwise"]


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("net", [ResNet, MobileNet])
def test_with_and_without(device, net, memory_format):
    model = perturb(net()).to(device=device, memory_format=memory_format)
    x = torch.randn(2, 3, 20, 20).to(device).contiguous(memory_format=memory_format)
    fused = metalcore.compile(model, (x,), fusions=FUSIONS)
    plain = metalcore.compile(model, (x,), fusions=[name for name in FUSIONS if name != "conv"])
    with torch.no_grad():
        expected = model(x)
    agree(expected, fused(x))
    agree(expected, plain(x))
    assert "metalcore.conv2d" in operators(fused) and "conv2d" not in operators(fused)
    assert "metalcore.conv2d" not in operators(plain)


def test_one_pixel_has_the_strides_that_pytorch_gives_it(device):
    """They are those of channels_last or those of contiguous images, which PyTorch's devices choose differently."""
    x, weight = torch.randn(2, 8, 1, 1).to(device), torch.randn(4, 8, 1, 1).to(device)
    for channels_last, strides in ((False, (4, 1, 1, 1)), (True, (4, 1, 4, 4))):
        like = torch.empty(0, device=device).new_empty_strided((2, 4, 1, 1), strides)
        assert _lies_channels_last(like) == channels_last
        found = torch.ops.metalcore.conv2d(
            x, weight, None, None, None, (1, 1), (0, 0, 0, 0), (1, 1), 1, "none", channels_last
        )
        assert found.stride() == strides
        agree(torch.einsum("ncij,oc->noij", x, weight[..., 0, 0]), found)


def test_a_residual_block_is_three_operations(device):
    """Each convolution with its batch norm, the sum and the activation; the weights lie as the kernels read them."""
    model = perturb(ResNet()).blocks[0].to(device)
    x = torch.randn(1, 8, 9, 9).to(device)
    program = metalcore.compile(model, (x,), fusions=FUSIONS)
    assert list(operators(program)) == ["metalcore.conv2d"] * 3
    for node in program._module.graph.nodes:
        if node.op == "call_function":
            assert node.args[1].op == "get_attr" and node.args[1].meta["val"].stride(0) == 1
    agree(model(x), program(x))


def test_only_by_its_name(device):
    model, x = nn.Conv2d(8, 8, 3).to(device), torch.randn(1, 8, 5, 5).to(device)
    assert "metalcore.conv2d" not in operators(metalcore.compile(model, (x,)))


def test_a_value_that_others_use_stays(device):
    class Shown(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(4, 8, 3)

        def forward(self, x):
            y = self.conv(x)
            return y, y.relu()

    model, x = Shown().to(device), torch.randn(1, 4, 5, 5).to(device)
    program = metalcore.compile(model, (x,), fusions=["conv"])
    assert {"metalcore.conv2d", "relu"} <= set(operators(program))
    for found, expected in zip(program(x), model(x)):
        agree(expected, found)


def test_training(device):
    """The activation stays an operation of its own, whose derivative needs its argument; the sum becomes a part."""
    torch._dynamo.reset()
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)).to(device)
    x = torch.randn(2, 3, 8, 8).to(device)
    fast = torch.compile(model, backend="metalcore", options={"fusions": ["conv"], "fallback": False})
    with metalcore.programs.observe() as graphs:
        found = fast(x)
    found.square().sum().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    expected = model(x)
    expected.square().sum().backward()
    agree(expected, found)
    for parameter, gradient in zip(model.parameters(), gradients):
        agree(parameter.grad, gradient, 1e-4)
    assert any("metalcore.conv2d" in operators(program) for graph in graphs for program in graph.programs)
