"""Activations in place, as modules with inplace=True call them, run metalcore's kernels in both directions."""

import pytest
import torch
import torch.nn.functional as F

import metalcore

ACTIVATIONS = {
    "relu": torch.relu_,
    "silu": lambda x: F.silu(x, inplace=True),
    "gelu": torch.ops.aten.gelu_,
    "gelu, tanh": lambda x: torch.ops.aten.gelu_(x, approximate="tanh"),
}
LAYOUTS = {
    "contiguous": lambda x: x,
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(0, 2),
    "not aligned": lambda x: x.reshape(-1)[1:],
    "empty": lambda x: x[:0],
}


def ran(name, device):
    return {row.what: row.ran for row in metalcore.report().rows}[f"aten::{name.partition(',')[0]}_ on {device}"]


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16), ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_values_and_gradients(device, name, layout, dtype):
    leaf = torch.randn(2, 5, 3, 7, device=device).to(dtype).requires_grad_()
    grad = torch.randn(LAYOUTS[layout](leaf).shape, device=device).to(dtype)

    def both():
        x = LAYOUTS[layout](leaf * 1)
        y = ACTIVATIONS[name](x)
        assert y is x and y.data_ptr() == x.data_ptr()
        return y.detach(), torch.autograd.grad(y, leaf, grad)[0]

    expected = both()
    with metalcore.enable_pytorch_overrides():
        found = both()
    assert ran(name, device) == 1
    eps = torch.finfo(dtype).eps  # of each result's rounding, by PyTorch's kernels and by ours
    for value, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(value, wanted, rtol=4 * eps, atol=4 * eps)


def test_tensors_with_gaps_and_errors_are_pytorchs(device):
    x = torch.randn(4, 6, device=device)
    with metalcore.enable_pytorch_overrides("relu"):
        wide = x.clone()
        assert torch.relu_(wide[:, ::2]).equal(x[:, ::2].clamp(min=0))
        assert torch.equal(wide[:, 1::2], x[:, 1::2])
        with pytest.raises(RuntimeError, match="single memory location"):
            torch.relu_(x[:1].expand(4, 6))
        leaf = torch.ones(3, device=device, requires_grad=True)
        with pytest.raises(RuntimeError, match="leaf"):
            torch.relu_(leaf)
    assert ran("relu", device) == 0


def test_what_was_saved_before_is_an_error(device):
    """The version counter counts our writes, too."""
    with metalcore.enable_pytorch_overrides("silu"):
        x = torch.randn(5, device=device, requires_grad=True)
        y = x * 1
        z = y.square()
        F.silu(y, inplace=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            z.sum().backward()


def test_a_model(device):
    layers = [layer for _ in range(3) for layer in (torch.nn.Conv2d(4, 4, 3), torch.nn.ReLU(inplace=True))]
    model = torch.nn.Sequential(*layers).to(device)
    x = torch.randn(2, 4, 12, 12, device=device)
    model(x).sum().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    with metalcore.enable_pytorch_overrides("relu"):
        model(x).sum().backward()
    assert ran("relu", device) == 3
    for parameter, wanted in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, wanted)
