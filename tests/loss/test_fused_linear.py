"""Fused linear losses against the loss of a linear layer's outputs in float64."""

import pytest
import torch
import torch.nn.functional as F
from references import DTYPES, assert_near, tensor, wide

import metalcore

OPTIONS = {
    "mean": {},
    "sum": {"reduction": "sum", "label_smoothing": 0.1},
    "none": {"reduction": "none", "softcap": 3.0},
    "weights": {"class_weight": True, "z_loss": 0.01},
}


def reference(hidden, weight, target, bias=None, class_weight=None, softcap=None, z_loss=0.0, **options):
    logits = F.linear(hidden, weight, bias).flatten(0, -2)
    return metalcore.cross_entropy(logits, target.flatten(), class_weight, softcap=softcap, z_loss=z_loss, **options)


def inputs(dtype, device, rows=(2, 21), depth=12, classes=30):
    hidden = tensor(*rows, depth, dtype=dtype, device=device)
    target = torch.randint(classes, rows)
    target[0, :3] = -100
    return (
        hidden,
        tensor(classes, depth, dtype=dtype, device=device),
        target,
        tensor(classes, dtype=dtype, device=device),
    )


def both(function, leaves, target, grad, **options):
    hidden, weight, bias = leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    loss = function(hidden, weight, target, bias, **options).flatten()
    return loss.detach(), *torch.autograd.grad(loss, leaves, grad.to(loss).expand(loss.shape))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("chunk", [None, 16, 42])
def test_cross_entropy(device, dtype, name, chunk):
    hidden, weight, target, bias = inputs(dtype, device)
    options = dict(OPTIONS[name])
    classes = torch.rand(30).to(dtype) if options.pop("class_weight", None) else None
    grad = torch.tensor(0.5)
    found = both(
        metalcore.fused_linear_cross_entropy,
        (hidden, weight, bias),
        target.to(device),
        grad,
        chunk=chunk,
        class_weight=None if classes is None else classes.to(device),
        **options,
    )
    leaves = [wide(leaf) for leaf in (hidden, weight, bias)]
    expected = both(reference, leaves, target, grad, class_weight=None if classes is None else wide(classes), **options)
    for value, wanted in zip(found, expected, strict=True):
        scale = wanted.abs().max().clamp(min=1e-3)
        torch.testing.assert_close(wide(value) / scale, wanted / scale, rtol=0, atol=8 * torch.finfo(dtype).eps)


def test_without_gradients(device):
    hidden, weight, target, _ = inputs(torch.float32, device)
    expected = reference(wide(hidden), wide(weight), target)
    assert_near(metalcore.fused_linear_cross_entropy(hidden, weight, target.to(device)), expected, terms=64)
    weight.requires_grad_()
    loss = metalcore.fused_linear_cross_entropy(hidden, weight, target.to(device))
    loss.backward()
    assert weight.grad is not None and hidden.grad is None


def test_logits_are_never_whole(device):
    _, recording = metalcore.recording.record(
        lambda x, w, t: metalcore.fused_linear_cross_entropy(x, w.requires_grad_(), t, chunk=8),
        tensor(64, 4, device=device),
        tensor(100, 4, device=device),
        torch.arange(64, device=device),
    )
    assert max(buffer.nbytes for buffer in recording.buffers) == 8 * 100 * 4


def test_backward_of_a_graph_that_is_kept(device):
    hidden, weight, target = torch.randn(5, 6), torch.randn(9, 6), torch.randint(0, 9, (5,))
    leaves = [tensor.to(device).requires_grad_() for tensor in (hidden, weight)]
    teacher = [tensor.to(device) for tensor in (torch.randn(5, 4), torch.randn(9, 4))]
    for loss in (
        metalcore.fused_linear_cross_entropy(*leaves, target.to(device)),
        metalcore.fused_linear_jsd(*leaves, *teacher),
    ):
        first = torch.autograd.grad(loss, leaves, retain_graph=True)
        kept = [gradient.clone() for gradient in first]
        second = torch.autograd.grad(2 * loss, leaves)
        for gradient, expected, twice in zip(first, kept, second, strict=True):
            assert torch.equal(gradient, expected)
            assert torch.equal(twice, 2 * expected)
        with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
            torch.autograd.grad(loss, leaves)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_double_backward(device, reduction):
    hidden, weight, target, bias = inputs(torch.float32, device, (1, 5), 4, 6)

    def second(function, leaves, target):
        leaves = [leaf.detach().requires_grad_() for leaf in leaves]
        loss = function(*leaves[:2], target, leaves[2], reduction=reduction, label_smoothing=0.1).square().sum()
        first = torch.autograd.grad(loss, leaves, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), leaves)

    leaves = hidden, weight, bias
    found = second(metalcore.fused_linear_cross_entropy, leaves, target.to(device))
    for value, expected in zip(found, second(reference, [wide(leaf) for leaf in leaves], target), strict=True):
        assert_near(value, expected, terms=512)


def test_compiled(device):
    hidden, weight, target, _ = inputs(torch.float32, device)
    hidden.requires_grad_(), weight.requires_grad_()
    target = target.to(device)

    def function(hidden, weight):
        return metalcore.fused_linear_cross_entropy(hidden * 1, weight, target, chunk=16) * 2

    expected = torch.autograd.grad(function(hidden, weight), (hidden, weight))
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for value, wanted in zip(torch.autograd.grad(compiled(hidden, weight), (hidden, weight)), expected):
        torch.testing.assert_close(value, wanted)


def test_autocast(device):
    hidden, weight, target, _ = inputs(torch.float32, device)
    hidden.requires_grad_()
    with torch.autocast(device, dtype=torch.bfloat16):
        loss = metalcore.fused_linear_cross_entropy(hidden, weight, target.to(device))
    assert loss.dtype == torch.float32
    loss.backward()
    assert hidden.grad.dtype == torch.float32


def test_what_is_left_to_pytorch():
    hidden, weight, target, bias = inputs(torch.float64, "cpu")
    found = metalcore.fused_linear_cross_entropy(hidden, weight, target, bias, reduction="none")
    assert found.shape == target.shape
    torch.testing.assert_close(found.flatten(), reference(hidden, weight, target, bias, reduction="none"))
