"""The norms' kernels in the place of PyTorch's operators: parameters and gradients that are left out, shapes of several
dimensions, and calls that are left to PyTorch."""

import itertools

import pytest
import torch
import torch.nn.functional as F

import metalcore

SHAPE = (3, 4, 10)


def leaves(place, dtype=torch.float32):
    generator = torch.Generator().manual_seed(5)
    shapes = (SHAPE, SHAPE[1:], SHAPE[1:])
    values = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [value.to(device=place, dtype=dtype).requires_grad_() for value in values]


def layer_norm(x, weight, bias):
    return F.layer_norm(x, SHAPE[1:], weight, bias)


def rms_norm(x, weight, bias):
    return F.rms_norm(x, SHAPE[1:], weight, 1e-5)


def group_norm(x, weight, bias):
    return F.group_norm(
        x, 2, None if weight is None else weight.flatten()[:4], None if bias is None else bias.flatten()[:4]
    )


def ran(operator, device):
    (row,) = [row for row in metalcore.report().rows if row.what == f"aten::{operator} on {device}"]
    return row.ran


@pytest.mark.parametrize(
    ("norm", "operator"),
    [
        (rms_norm, "_fused_rms_norm_backward"),
        (layer_norm, "native_layer_norm_backward"),
        (group_norm, "native_group_norm_backward"),
    ],
)
def test_parameters_and_gradients_that_are_left_out(device, norm, operator):
    for given in itertools.product((True, False), repeat=2):
        for wanted in itertools.product((True, False), repeat=3):
            found = []
            for place, dtype in ((device, torch.float32), ("cpu", torch.float64)):
                x, *parameters = leaves(place, dtype)
                parameters = [p if there else None for p, there in zip(parameters, given)]
                inputs = [t for t, there in zip((x, *parameters), wanted) if there and t is not None]
                if norm is rms_norm:
                    inputs = [t for t in inputs if t is not parameters[1]]
                # PyTorch's group_norm on the CPU refuses a bias without a weight.
                if not inputs or norm is group_norm and given == (False, True):
                    continue
                with metalcore.enable_pytorch_overrides("rms_norm", "layer_norm", "group_norm"):
                    before = ran(operator, device)
                    y = norm(x, *parameters)
                    gradients = torch.autograd.grad(y, inputs, torch.ones_like(y) * y.detach().cos())
                    assert (ran(operator, device) == before + 1) == (place == device)
                found.append([tensor.cpu().double() for tensor in (y, *gradients)])
            if found:
                for ours, exact in zip(*found):
                    assert ours.shape == exact.shape
                    torch.testing.assert_close(ours, exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("length", [7, 64, 3000, 20000])
def test_scales_of_rms_norm(device, length):
    x = torch.randn(3, length, dtype=torch.float64)
    weight = torch.randn(length, dtype=torch.float64)
    with metalcore.enable_pytorch_overrides("rms_norm"):
        y, scales = torch.ops.aten._fused_rms_norm(x.float().to(device), [length], weight.float().to(device), 1e-3)
    exact = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-3)
    assert scales.shape == (3, 1)
    torch.testing.assert_close(scales.cpu().double(), exact, rtol=1e-5, atol=0)
    torch.testing.assert_close(y.cpu().double(), x * exact * weight, rtol=1e-4, atol=1e-5)


def test_second_derivatives_of_rms_norm(device):
    with metalcore.enable_pytorch_overrides("rms_norm"):
        assert torch.autograd.gradgradcheck(
            lambda x, weight: rms_norm(x, weight, None), leaves("cpu", torch.float64)[:2]
        )
        found = []
        for place, dtype in ((device, torch.float32), ("cpu", torch.float64)):
            x, weight, _ = leaves(place, dtype)
            (gx,) = torch.autograd.grad(rms_norm(x, weight, None).square().sum(), x, create_graph=True)
            found.append(torch.autograd.grad(gx.square().sum(), (x, weight)))
    for ours, exact in zip(*found):
        torch.testing.assert_close(ours.cpu().double(), exact, rtol=1e-3, atol=1e-3)


def test_what_is_left_to_pytorch_has_derivatives(device):
    """PyTorch's kernel for cuda takes float64, and the one for mps a weight of another dtype."""
    dtypes = (torch.float64, torch.float64) if device == "cuda" else (torch.float32, torch.bfloat16)
    x = leaves(device, dtypes[0])[0]
    with metalcore.enable_pytorch_overrides("rms_norm"):
        weight = torch.ones(SHAPE[1:], device=device, dtype=dtypes[1])
        y = torch.ops.aten._fused_rms_norm(x, SHAPE[1:], weight, 1e-5)[0]
        (gx,) = torch.autograd.grad(y.sum(), x)
    reference = x.detach().cpu().double().requires_grad_()
    (expected,) = torch.autograd.grad(rms_norm(reference, None, None).sum(), reference)
    torch.testing.assert_close(gx.cpu().double(), expected, rtol=1e-2, atol=1e-2)


def test_empty_input(device):
    with metalcore.enable_pytorch_overrides("rms_norm"):
        x = torch.empty(0, 10, device=device, requires_grad=True)
        weight = torch.ones(10, device=device, requires_grad=True)
        F.rms_norm(x, (10,), weight).sum().backward()
    assert x.grad.shape == (0, 10)
    assert weight.grad.tolist() == [0] * 10
