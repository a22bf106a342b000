"""Networks of many kinds, with their patterns and without each of them, in metalcore.compile and in torch.compile."""

import pytest
import torch
from checks import agree
from nets import ConvNeXt, EfficientNet, Encoder, Pyramid, ResNet, Swin, UNet, perturb

import metalcore
from metalcore import programs

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
