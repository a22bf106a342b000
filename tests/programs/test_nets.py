"""Networks of many kinds, with their patterns and without each of them, in metalcore.compile and in torch.compile: what
programs join to generated kernels or to convolutions, and what they leave to PyTorch."""

import pytest
import torch
import torch.nn.functional as F
from agreement import Calls, agree, operators
from nets import ConvNeXt, EfficientNet, Encoder, MobileNet, Pyramid, ResNet, Swin, UNet, perturb
from torch import nn

import metalcore
from metalcore import programs
from metalcore.programs.patterns.conv import _lies_channels_last

ALL = [*(pattern.name for pattern in programs.PATTERNS), "pointwise"]


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def made(make, device):
    """A network with perturbed norms, and an input."""
    shape = (2, 6, 32) if make is Encoder else (2, 3, 16, 16)
    return perturb(make()).to(device), torch.randn(shape).to(device)


def used(program):
    report = program.report()
    return {rewritten.pattern for rewritten in report.fused} | ({"pointwise"} if report.count("generated") else set())


@pytest.mark.parametrize("make", [ResNet, UNet, Encoder, Swin])
def test_fusions_off_one_by_one(device, make):
    model, x = made(make, device)
    exported = torch.export.export(model, (x,))
    with torch.no_grad():
        expected = model(x)
    whole = metalcore.compile(exported, fusions=ALL)
    agree(expected, whole(x))
    assert len(used(whole)) >= 2
    for left_out in used(whole):
        program = metalcore.compile(exported, fusions=[name for name in ALL if name != left_out])
        assert left_out not in used(program)
        agree(expected, program(x))


def test_every_pattern_is_tested_with_and_without():
    from test_patterns import CASES

    nets = {"conv_batch_norm"}  # in the networks above alone
    assert {case[0] for case in CASES} | nets == {pattern.name for pattern in programs.PATTERNS}


@pytest.mark.parametrize("make", [Pyramid, ConvNeXt, EfficientNet, Swin])
def test_results(device, make):
    model, x = made(make, device)
    compiled = torch.compile(model, backend="metalcore", dynamic=False, options={"fallback": False})
    with torch.no_grad():
        expected = model(x)
        agree(expected, compiled(x))
    program = metalcore.compile(model, (x,))
    agree(expected, program(x))
    assert not program.report().count("cpu") and not program.report().count("transfer")


@pytest.mark.parametrize("make", [UNet, ConvNeXt, Swin])
def test_gradients(device, make):
    model, x = made(make, device)
    parameters = list(model.parameters())

    def gradients(call):
        return torch.autograd.grad(call(x).square().mean(), parameters)

    compiled = torch.compile(model, backend="metalcore", dynamic=False, options={"fallback": False})
    agree(gradients(model), gradients(compiled), 1e-4)


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


def operators_of(function, *tensors):
    """The names of a program's operations, whose results agree with PyTorch's."""
    program = metalcore.compile(Calls(function), tensors)
    agree(function(*tensors), program(*tensors))
    return [name for name, step in zip(operators(program), program.report().steps) if step.place != "view"]


def test_windows_and_parts_join_what_comes_before(device):
    torch.manual_seed(0)
    x, r = torch.randn(2, 4, 6, 6).to(device), torch.randn(2, 4, 3, 3).to(device)
    assert operators_of(lambda x, r: F.max_pool2d((x * 2).relu(), 3, 2, 1) + r, x, r) == ["mul+relu+max_pool2d+add"]
    assert operators_of(lambda x: F.pad(x.exp(), (1, 1))[..., ::2] * 2, x) == ["exp+pad+slice+mul"]
    # Each element would be computed nine times.
    assert operators_of(lambda x: F.avg_pool2d(x.exp(), 3, 1, 1).sin(), x) == ["exp", "avg_pool2d+sin"]
    # Somebody else reads what is cut.
    assert operators_of(lambda x: (y := x.exp(), y[:, 1:].flip(1)), x) == ["exp", "flip"]


def test_views_join_what_they_are_between_alone(device):
    torch.manual_seed(0)
    x, i = torch.randn(4, 6).to(device), torch.tensor([3, 0]).to(device)
    assert operators_of(lambda x, i: (x.exp().view(2, 12).t() + 1).reshape(-1), x, i) == ["exp+view+t+add+reshape"]
    assert operators_of(lambda x, i: x.view(2, 12)[:, i], x, i) == ["index"]
    assert operators_of(lambda x, i: torch.cat([x, x]), x, i) == ["cat"]
    assert operators_of(lambda x, i: x.index_copy(0, i, x[2:] * 2) + 1, x, i) == ["mul+index_copy+add"]
    assert operators_of(lambda x, i: F.embedding(i, x * 2), x, i) == ["mul+embedding"]


def test_readers_of_one_tensor_join(device):
    torch.manual_seed(0)
    x, y = torch.randn(2, 4, 6).to(device)
    assert operators_of(lambda x, y: (x * y + 1, torch.exp(-(x * x))), x, y) == ["mul+add+mul+neg+exp"]
    assert operators_of(lambda x, y: (x.exp(), x.sin()), x, y) == ["exp+sin"]
    # One depends on the other through a product of matrices, or is needed before all that the other reads.
    assert operators_of(lambda x, y: x.sin() * ((x.exp() @ y.mT) @ y), x, y).count("matmul") == 2
    found = operators_of(lambda x, y: (z := x.exp() @ y.mT, x.sin() * (z @ y)), x, y)
    assert found == ["exp", "matmul", "matmul", "sin+mul"]
    # Nothing is saved where they read it at other places.
    assert operators_of(lambda x, y: (x.exp(), x.t().contiguous() * 2), x, y) == ["exp", "contiguous+mul"]


def test_operators_without_a_kernel_on_macs_are_generated_alone(device):
    program = metalcore.compile(Calls(torch.heaviside), (torch.randn(5).to(device), torch.ones(5).to(device)))
    assert [step.place for step in program.report().steps] == ["generated" if device == "mps" else "torch"]


def test_a_group_stays_behind_writes_to_what_it_reads(device):
    class Shifted(nn.Module):
        def forward(self, ids):
            shifted = ids.new_zeros(ids.shape)
            shifted[:, 1:] = ids[:, :-1].clone()
            shifted[:, 0] = 2
            return shifted.masked_fill(shifted == 5, 1)

    model, ids = Shifted(), torch.arange(12, device=device).reshape(2, 6)
    program = metalcore.compile(model, (ids,))
    assert program.report().count("generated")
    assert torch.equal(program(ids), model(ids))
