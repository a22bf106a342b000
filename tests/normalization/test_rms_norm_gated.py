"""rms_norm_gated, beside its definition in float64."""

import pytest
import torch
from references import DTYPES, assert_near, layouts, tensor, wide

import metalcore

LENGTHS = (1, 31, 128, 136, 512, 520, 4097, 8192, 8200)  # the ends of each variant, and rows that are not aligned


def expected(x, gate, weight, eps, group, before, activation):
    a = torch.sigmoid(gate) * (gate if activation == "silu" else 1)
    u = (x if before else x * a).unflatten(-1, (-1, group))
    y = (u / (u.square().mean(-1, keepdim=True) + eps).sqrt()).flatten(-2)
    y = y if weight is None else y * weight
    return y * a if before else y


def check(x, gate, weight, group=None, before=True, activation="silu", eps=1e-5):
    group = group or x.shape[-1]
    leaves = [t.detach().requires_grad_() for t in (x, gate, weight) if t is not None]
    wides = [wide(t).requires_grad_() for t in leaves]
    y = metalcore.rms_norm_gated(*leaves, eps=eps, group_size=group, norm_before_gate=before, activation=activation)
    reference = expected(*wides[:2], wides[2] if weight is not None else None, eps, group, before, activation)
    assert y.dtype == x.dtype and y.is_contiguous()
    assert_near(y, reference.detach(), terms=8)
    grad = tensor(*x.shape, dtype=x.dtype, device=x.device)
    found = torch.autograd.grad(y, leaves, grad)
    wanted = torch.autograd.grad(reference, wides, wide(grad))
    rows = x.numel() // x.shape[-1]
    for number, (ours, theirs) in enumerate(zip(found, wanted)):
        # Gradients of rows are differences of terms that are as large as the scale of a row times what comes in.
        largest = max(theirs.abs().max().item(), (wide(grad).abs().max() * 10 * (1 + wide(x).abs().max())).item())
        terms = 8 + (rows if number == 2 else group) ** 0.5
        assert_near(ours, theirs, terms=terms, magnitude=largest if number < 2 else None)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("before", [True, False])
def test_lengths(device, length, before):
    x, gate = (tensor(5, length, device=device) for _ in range(2))
    check(x, gate, tensor(length, device=device), before=before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weight_dtype", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
def test_dtypes(device, dtype, weight_dtype, activation):
    x, gate = (tensor(3, 5, 96, dtype=dtype, device=device) for _ in range(2))
    weight = None if weight_dtype is None else tensor(96, dtype=weight_dtype, device=device)
    for before in (True, False):
        check(x, gate, weight, 32, before, activation)


def test_layouts(device):
    """Gates are a part of a projection's rows, as in the models."""
    for x in layouts(lambda *shape: tensor(*shape, device=device)).values():
        both = tensor(*x.shape[:-1], 2 * x.shape[-1], device=device)
        check(x, both[..., x.shape[-1] :], tensor(x.shape[-1], device=device), before=False)


def test_extremes(device):
    """Gates beyond the range of exp, and a NaN, which stays in its group."""
    x, gate = torch.ones(4, 64, device=device), torch.full((4, 64), 200.0, device=device)
    gate[1], gate[2, 5] = -200.0, float("nan")
    x.requires_grad_(), gate.requires_grad_()
    y = metalcore.rms_norm_gated(x, gate, norm_before_gate=False, group_size=32)
    gradients = torch.autograd.grad(y.sum(), (x, gate))
    for one in (y, *gradients):
        bad = one.isnan().view(8, 32).any(1)
        assert bad.tolist() == [number == 4 for number in range(8)]


def test_empty(device):
    for shape in ((0, 8), (3, 0)):
        x = torch.empty(shape, device=device, requires_grad=True)
        y = metalcore.rms_norm_gated(x, x, torch.ones(shape[-1], device=device))
        assert y.shape == shape and torch.autograd.grad(y.sum(), x)[0].shape == shape


def test_gradients_of_any_order(device):
    x, gate, weight = (torch.randn(3, 6, dtype=torch.float64, requires_grad=True) for _ in range(3))
    for before in (True, False):

        def norm(x, gate, weight, before=before):
            return metalcore.rms_norm_gated(x, gate, weight[0], group_size=3, norm_before_gate=before)

        assert torch.autograd.gradcheck(norm, (x, gate, weight))
        assert torch.autograd.gradgradcheck(norm, (x, gate, weight))
        ours = [t.detach().float().to(device).requires_grad_() for t in (x, gate, weight)]
        first = torch.autograd.grad(norm(*ours).square().sum(), ours, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), ours)
        first = torch.autograd.grad(norm(x, gate, weight).square().sum(), (x, gate, weight), create_graph=True)
        for mine, theirs in zip(second, torch.autograd.grad(sum(g.square().sum() for g in first), (x, gate, weight))):
            torch.testing.assert_close(mine.cpu().double(), theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(group_size=3), "group_size must divide the last dimension, 8, and is 3"),
        (dict(group_size=-8), "group_size must divide"),
        (dict(activation="relu"), "activation must be 'silu' or 'sigmoid', not 'relu'"),
        (dict(weight=torch.ones(7)), r"weight must have shape \(8,\), not \(7,\)"),
    ],
)
def test_errors(device, change, message):
    x = torch.ones(2, 8, device=device)
    change = {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in change.items()}
    with pytest.raises(RuntimeError, match=f"metalcore::rms_norm_gated: {message}"):
        metalcore.rms_norm_gated(x, x, **change)
    with pytest.raises(RuntimeError, match="x must have a dimension to normalize"):
        metalcore.rms_norm_gated(x.sum(), x.sum())
    with pytest.raises(TypeError, match="gate"):
        metalcore.rms_norm_gated(x, None)
