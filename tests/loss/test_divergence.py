"""kl_div, jsd and their forms over linear layers against float64."""

import pytest
import torch
import torch.nn.functional as F
from opinfo import compare, evaluate, placed, samples
from references import DTYPES, assert_near, check_operator, tensor, wide
from rows import tuned

import metalcore

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
each_family = pytest.mark.parametrize("family", ["baseline", "simulator"])
each_beta = pytest.mark.parametrize("beta", [0, 0.1, 0.5, 1.0])

SHAPES = [(5, 3), (4, 33), (3, 132), (2, 5, 8), (2, 5000)]


def definition(input, target, beta, temperature=1.0, reduction="batchmean"):
    log_q, log_p = (input / temperature).log_softmax(-1), (target / temperature).log_softmax(-1)

    def kl(a, b):
        return F.kl_div(b, a, reduction="none", log_target=True).sum(-1)

    if beta in (0, 1):
        losses = kl(log_p, log_q) if beta == 0 else kl(log_q, log_p)
    else:
        log_m = (beta * log_p.exp() + (1 - beta) * log_q.exp()).log()
        losses = beta * kl(log_p, log_m) + (1 - beta) * kl(log_q, log_m)
    return {"none": losses, "sum": losses.sum(), "batchmean": losses.mean()}[reduction]


def both(function, input, *rest, **options):
    input = input.detach().requires_grad_()
    loss = function(input, *rest, **options)
    return loss.detach(), torch.autograd.grad((loss * 1.5).sum(), input)[0]


@each_dtype
@each_family
@pytest.mark.parametrize("log_target", [False, True])
@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
def test_kl_div(device, dtype, family, log_target):
    for shape in SHAPES:
        input = torch.randn(shape).log_softmax(-1).to(dtype)
        target = torch.randn(shape).log_softmax(-1).to(dtype)
        target = target if log_target else target.exp()
        if not log_target:
            target[..., 0] = 0
        for reduction in ("mean", "sum", "batchmean"):
            options = {"reduction": reduction, "log_target": log_target}
            with tuned(family):
                found = both(metalcore.kl_div, input.to(device), target.to(device), **options)
            expected = both(F.kl_div, wide(input), wide(target), **options)
            for value, wanted in zip(found, expected, strict=True):
                assert value.dtype == dtype
                assert_near(value, wanted, terms=64, magnitude=1.0)


@each_dtype
@each_family
@each_beta
def test_jsd(device, dtype, family, beta):
    for shape in SHAPES:
        input, target = (tensor(*shape, dtype=dtype, device=device, scale=2) for _ in "qp")
        for options in ({}, {"reduction": "none", "temperature": 2.0}, {"reduction": "sum"}):
            with tuned(family):
                found = both(metalcore.jsd, input, target, beta, **options)
            expected = both(definition, wide(input), wide(target), beta, **options)
            assert found[0].dtype == dtype
            for value, wanted in zip(found, expected, strict=True):
                assert_near(value, wanted, terms=64, magnitude=1.0)


@each_family
@each_beta
def test_log_probabilities(device, family, beta):
    input, target = (tensor(4, 50, device=device).log_softmax(-1) for _ in "qp")
    with tuned(family):
        found = both(metalcore.jsd, input, target, beta, log_probabilities=True)

    def plain(log_q, log_p):
        q, p = log_q.exp(), log_p.exp()
        if beta in (0, 1):
            return (p * (log_p - log_q) if beta == 0 else q * (log_q - log_p)).sum(-1).mean()
        m = beta * p + (1 - beta) * q
        return (beta * p * (log_p - m.log()) + (1 - beta) * q * (log_q - m.log())).sum(-1).mean()

    for value, wanted in zip(found, both(plain, wide(input), wide(target)), strict=True):
        assert_near(value, wanted, terms=64)


@each_beta
def test_classes_without_probability(device, beta):
    """Classes that both leave out add nothing."""
    x, y = tensor(3, 20, device=device), tensor(3, 20, device=device)
    expected = both(definition, wide(x), wide(y), beta)
    x, y = (torch.cat((t, torch.full_like(t, -torch.inf)), 1) for t in (x, y))
    loss, gradient = both(metalcore.jsd, x, y, beta)
    assert_near(loss, expected[0], terms=64)
    assert_near(gradient[:, :20], expected[1], terms=64)
    assert not gradient[:, 20:].any()


@each_dtype
@pytest.mark.parametrize("chunk", [None, 16])
@each_beta
def test_fused(device, dtype, chunk, beta):
    hidden, weight = tensor(2, 20, 12, dtype=dtype, device=device), tensor(30, 12, dtype=dtype, device=device)
    teacher = tensor(2, 20, 10, dtype=dtype, device=device), tensor(30, 10, dtype=dtype, device=device)
    labels = torch.randint(2, (2, 20)) * 100 - 100

    def run(function, hidden, weight, teacher, labels):
        leaves = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
        loss = function(*leaves, *teacher, labels)
        return loss.detach(), *torch.autograd.grad(loss * 0.5, leaves)

    def ours(hidden, weight, t, u, labels):
        options = {"temperature": 2.0, "labels": labels, "chunk": chunk}
        if beta == 0:
            return metalcore.fused_linear_kl_div(hidden, weight, t, u, **options)
        return metalcore.fused_linear_jsd(hidden, weight, t, u, beta, **options)

    def theirs(hidden, weight, t, u, labels):
        return definition(hidden @ weight.mT, t @ u.mT, beta, 2.0, "none")[labels != -100].mean()

    found = run(ours, hidden, weight, teacher, labels.to(device))
    expected = run(theirs, wide(hidden), wide(weight), [wide(t) for t in teacher], labels)
    for value, wanted in zip(found, expected, strict=True):
        bound = 16 * torch.finfo(dtype).eps * wanted.abs().max()
        torch.testing.assert_close(wide(value), wanted, rtol=0, atol=bound.item())


def test_fused_without_gradients(device):
    tensors = [tensor(*shape, device=device) for shape in ((9, 4), (7, 4), (9, 5), (7, 5))]
    a, b, c, d = (wide(t) for t in tensors)
    assert_near(metalcore.fused_linear_jsd(*tensors), definition(a @ b.mT, c @ d.mT, 0.5), terms=64)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_double_backward(device, beta):
    input, target = tensor(3, 5, device=device), tensor(3, 5, device=device)

    def second(function, input, *rest):
        input = input.detach().requires_grad_()
        (first,) = torch.autograd.grad(function(input, *rest), input, create_graph=True)
        return torch.autograd.grad(first.square().sum(), input)[0]

    found = second(metalcore.jsd, input, target, beta)
    assert_near(found, second(definition, wide(input), wide(target), beta), terms=64)
    weight, teacher = tensor(6, 5, device=device), tensor(6, 5, device=device)
    found = second(metalcore.fused_linear_jsd, input, weight, target, teacher, beta)
    w, t, u = wide(weight), wide(target), wide(teacher)
    assert_near(found, second(lambda x: definition(x @ w.mT, t @ u.mT, beta), wide(input)), terms=256)
    # The hidden states depend on the weight, as those of a model with tied embeddings do.
    found = second(lambda w: metalcore.fused_linear_jsd(w[:3].tanh(), w, target, teacher, beta), weight)
    assert_near(found, second(lambda w: definition(w[:3].tanh() @ w.mT, t @ u.mT, beta), wide(weight)), terms=256)


@each_dtype
@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
def test_pytorch_samples(device, dtype):
    for sample in samples("nn.functional.kl_div", dtype):

        def of(function):  # targets with a derivative are left to PyTorch
            return lambda x, target, **options: function(x, target.detach(), **options)

        actual = evaluate(of(metalcore.kl_div), placed(sample, device, dtype, lambda value: value), 2, None)
        expected = evaluate(of(F.kl_div), placed(sample, "cpu", torch.float64, lambda value: value), 2, None)
        compare(actual, expected, sample, dtype, 1.0)


@pytest.mark.parametrize("place", ["cpu", "device"])
def test_opcheck(device, place):
    place = "cpu" if place == "cpu" else device
    input, target = tensor(3, 8, device=place).requires_grad_(), tensor(3, 8, device=place)
    operators, options = torch.ops.metalcore, (0.5, 0, 0, 0.5)
    check_operator(operators.divergence, input, target, *options)
    losses, saved = operators.divergence(input.detach(), target, *options)
    check_operator(operators.divergence_backward, losses, input, target, saved, *options)
    check_operator(operators.divergence_, input.detach().clone(), target, losses, *options)


def test_compiled(device):
    tensors = [tensor(*shape, device=device) for shape in ((9, 4), (7, 4), (9, 5), (7, 5))]
    hidden = tensors[0].requires_grad_()

    def function(hidden):
        return metalcore.fused_linear_jsd(hidden * 1, *tensors[1:], chunk=4) * 2

    (expected,) = torch.autograd.grad(function(hidden), hidden)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(torch.autograd.grad(compiled(hidden), hidden)[0], expected)


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
def test_override(device):
    input, target = (
        tensor(5, 20, device=device).log_softmax(1).requires_grad_(),
        tensor(5, 20, device=device).softmax(1),
    )
    with metalcore.enable_pytorch_overrides("kl_div"):
        losses = [F.kl_div(input, target, reduction=name) for name in ("mean", "sum", "batchmean")]
        (gradient,) = torch.autograd.grad(losses[2], input)
    assert next(row.ran for row in metalcore.report().rows if row.what == f"aten::kl_div on {device}") == 3
    for loss, name in zip(losses, ("mean", "sum", "batchmean"), strict=True):
        assert_near(loss.detach(), F.kl_div(wide(input), wide(target), reduction=name), terms=20)
    assert_near(gradient, -wide(target) / 5)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"beta": 1.5}, "beta must be in"),
        ({"temperature": 0}, "temperature must be a positive number"),
        ({"reduction": "mean"}, "reduction must be 'batchmean', 'sum' or 'none'"),
        ({"temperature": 2.0, "log_probabilities": True}, "log-probabilities have a temperature of 1"),
    ],
)
def test_bad_options(device, options, words):
    with pytest.raises(ValueError, match=f"jsd: {words}"):
        metalcore.jsd(tensor(3, 4, device=device), tensor(3, 4, device=device), **options)


def test_bad_shapes(device):
    with pytest.raises(RuntimeError, match=r"jsd: target must have the shape of input, \[3, 4\], not \[4\]"):
        metalcore.jsd(tensor(3, 4, device=device), tensor(4, device=device))
    assert metalcore.jsd(torch.randn(3, 4).double(), torch.randn(3, 4).double()).dtype == torch.float64
