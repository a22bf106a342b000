"""Gradients where all logits of a row are far from 0. Logits are multiples of 2^-4, so that they are exact there."""

import pytest
import torch
import torch.nn.functional as F
from references import assert_near, wide
from rows import tuned

import metalcore
from metalcore.distributed import vocabulary as sharded

each_offset = pytest.mark.parametrize("offset", [1e5, 2.0**19])  # float32 holds multiples of 2^-4 up to 2^20
each_family = pytest.mark.parametrize("family", ["baseline", "simulator"])
SHAPES = [(5, 3), (4, 17), (3, 200), (2, 1031)]


def logits(*shape, offset):
    return (torch.randn(shape) * 32).round() / 16 + offset


def gradient(function, x):
    x = x.detach().requires_grad_()
    return torch.autograd.grad(function(x).sum(), x)[0]


def near(function, x, device):
    """Differences of logits are exact, and so each exponential has few roundings, as their sum has and its quotient."""
    expected = gradient(function, x.double())
    for place in (device, "cpu"):
        found = gradient(function, x.to(place))
        assert_near(found, expected, terms=16)


def to(tensor, x):
    return tensor.to(x.device, x.dtype if tensor.is_floating_point() else tensor.dtype)


@each_offset
@each_family
@pytest.mark.parametrize(
    "options", [{}, {"label_smoothing": 0.2}, {"weight": True}, {"reduction": "none"}], ids=lambda o: "".join(o)
)
def test_cross_entropy(device, offset, family, options):
    for shape in SHAPES:
        x, target = logits(*shape, offset=offset), torch.randint(shape[1], shape[:1])
        weight = torch.rand(shape[1]) + 0.5 if options.get("weight") else None
        rest = {name: value for name, value in options.items() if name != "weight"}

        def function(x, target=target, weight=weight, rest=rest):
            given = None if weight is None else to(weight, x)
            return metalcore.cross_entropy(x, to(target, x), given, **rest)

        with tuned(family):
            near(function, x, device)


@each_offset
@each_family
def test_probabilities_and_pixels(device, offset, family):
    x, target = logits(3, 40, 2, offset=offset), torch.rand(3, 40, 2).softmax(1)
    with tuned(family):
        near(lambda x: metalcore.cross_entropy(x, to(target, x)), x, device)
        near(lambda x: metalcore.cross_entropy(x, to(target.argmax(1), x)), x, device)


@each_offset
@each_family
def test_selected_logarithms(device, offset, family):
    x, index = logits(3, 100, offset=offset), torch.randint(100, (3,))
    with tuned(family):
        near(lambda x: metalcore.selective_log_softmax(x, to(index, x)), x, device)


@each_offset
@each_family
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_divergences(device, offset, family, beta):
    for shape in SHAPES:
        x, y = logits(*shape, offset=offset), logits(*shape, offset=-offset)

        def function(x, y=y):
            return metalcore.jsd(x, to(y, x), beta)

        with tuned(family):
            near(function, x, device)


@each_offset
def test_fused_linear(device, offset):
    """A last feature is 1, and has the offset as its weight."""
    hidden, weight = torch.randint(-4, 5, (6, 8)) / 4, torch.randint(-4, 5, (50, 8)) / 4
    hidden[:, -1], weight[:, -1] = 1.0, offset
    target = torch.randint(50, (6,))

    def cross_entropy(x):
        return metalcore.fused_linear_cross_entropy(x, to(weight, x), to(target, x), chunk=4)

    def jsd(x):
        teacher = to(weight, x).flip(0)
        return metalcore.fused_linear_jsd(x, to(weight, x), x.detach().flip(0), teacher, chunk=4)

    for function in (cross_entropy, jsd):
        found, expected = gradient(function, hidden.to(device))[:, :-1], gradient(function, hidden.double())[:, :-1]
        assert_near(found, expected, terms=64)


@each_offset
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_shards(offset, smoothing):
    """What each rank computes of its part of the classes, where one has them all."""
    x, target = logits(4, 30, offset=offset), torch.randint(30, (4,))
    options = sharded._Options(-100, smoothing, 0.0, 0.0, 30, 0, ())
    losses, rows = sharded._losses(x, target, None, options)
    found = sharded._gradient(x, rows, None, torch.ones(4), options)

    def function(x):
        return F.cross_entropy(x, target, reduction="none", label_smoothing=smoothing)

    assert_near(losses, function(wide(x)), terms=64)
    assert_near(found, gradient(function, x.double()), terms=16)
