"""Fused linear losses against the loss of a linear layer's outputs in float64. Gradients of all losses where all
logits of a row are far from 0: they are multiples of 2^-4, so that they are exact there."""

import pytest
import torch
import torch.nn.functional as F
from references import DTYPES, assert_near, tensor, wide
from rows import tuned

import metalcore
from metalcore.distributed import vocabulary as sharded

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
def test_losses_of_logits_far_from_zero(device, offset, family, options):
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
def test_hidden_states_far_from_zero(device, offset):
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
