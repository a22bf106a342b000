"""cross_entropy and selective_log_softmax against float64, in every plan."""

import pytest
import torch
import torch.nn.functional as F
from opinfo import compare, evaluate, placed, samples
from references import DTYPES, assert_near, check_operator, tensor, wide
from rows import tuned
from torch.testing._internal.common_utils import noncontiguous_like

import metalcore
from metalcore.loss import _cross_entropy

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)

OPTIONS = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "smoothing": {"label_smoothing": 0.2},
    "weights": {"weight": True},
    "weights and smoothing": {"weight": True, "label_smoothing": 0.2, "reduction": "sum"},
    "softcap and z-loss": {"softcap": 2.0, "z_loss": 0.1},
    "all": {"weight": True, "label_smoothing": 0.1, "softcap": 3.0, "z_loss": 0.01, "reduction": "none"},
}


def reference(x, target, weight=None, softcap=None, z_loss=0.0, ignore_index=-100, reduction="mean", **options):
    """The definition, in PyTorch's ops."""
    x = softcap * torch.tanh(x / softcap) if softcap else x
    loss = F.cross_entropy(x, target, weight, ignore_index=ignore_index, reduction="none", **options)
    counted = target != ignore_index
    loss = loss + z_loss * x.logsumexp(1).square() * counted
    weights = counted if weight is None else weight[target * counted] * counted
    return {"none": loss, "sum": loss.sum(), "mean": loss.sum() / weights.sum()}[reduction]


def both(function, x, target, grad=None, **options):
    x = x.detach().requires_grad_()
    loss = function(x, target, **options)
    grad = torch.ones_like(loss) if grad is None else grad.to(loss)
    return loss.detach(), torch.autograd.grad(loss, x, grad)[0]


def classes(rows, count, *rest):
    target = torch.randint(count, (rows, *rest))
    target.view(-1)[:: max(3, target.numel() // 4)] = -100
    return target


def check(device, x, target, **options):
    weight = torch.rand(x.shape[1]).to(x.dtype) + 0.5 if options.pop("weight", False) else None
    grad = torch.randn(target.shape) if options.get("reduction") == "none" else torch.tensor(1.5)
    grad = grad.to(x.dtype)
    placed = {} if weight is None else {"weight": weight.to(device)}
    found = both(metalcore.cross_entropy, x, target.to(device), grad, **placed, **options)
    expected = both(reference, wide(x), target, grad, **({} if weight is None else {"weight": wide(weight)}), **options)
    for value, wanted in zip(found, expected):
        assert value.dtype == x.dtype
        assert_near(value, wanted, terms=64)


@each_dtype
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("family", ["baseline", "simulator"])
def test_options(device, dtype, name, family):
    with tuned(family):
        for rows, count in ((5, 3), (7, 17), (3, 130), (4, 1027), (2, 8200)):
            check(
                device, tensor(rows, count, dtype=dtype, device=device, scale=3), classes(rows, count), **OPTIONS[name]
            )


@each_dtype
@pytest.mark.parametrize("name", ["mean", "none", "softcap and z-loss"])
def test_rows_anywhere(device, dtype, name):
    with tuned("baseline"):
        for count in (17, 31, 513, 1029):
            for make in (
                lambda n: tensor(6 * n + 1, dtype=dtype, device=device)[1:].view(6, n),
                lambda n: tensor(6, n + 5, dtype=dtype, device=device)[:, 2 : n + 2],
                lambda n: tensor(6, n + 8, dtype=dtype, device=device)[:, :n],
                lambda n: tensor(n, 6, dtype=dtype, device=device).t(),
            ):
                check(device, make(count), classes(6, count), **OPTIONS[name])


@each_dtype
@pytest.mark.parametrize("name", OPTIONS)
def test_pixels(device, dtype, name):
    check(device, tensor(2, 5, 3, 4, dtype=dtype, device=device), classes(2, 5, 3, 4), **OPTIONS[name])


def test_many_rows(device):
    """Several threadgroups sum the losses."""
    for rows in (8192, 8193, 20000):
        check(device, tensor(rows, 4, device=device), classes(rows, 4), weight=True)


@each_dtype
@pytest.mark.parametrize("family", ["baseline", "simulator"])
def test_probabilities(device, dtype, family):
    x, target = tensor(6, 70, dtype=dtype, device=device), torch.rand(6, 70).softmax(1).to(dtype)
    weight = torch.rand(70).to(dtype)
    for options in ({}, {"weight": weight}, {"label_smoothing": 0.3, "reduction": "none"}):
        placed = {k: v.to(device) if k == "weight" else v for k, v in options.items()}
        wanted = {k: wide(v) if k == "weight" else v for k, v in options.items()}
        with tuned(family):
            found = both(metalcore.cross_entropy, x, target.to(device), **placed)
        for value, expected in zip(found, both(F.cross_entropy, wide(x), wide(target), **wanted)):
            assert_near(value, expected, terms=70)


@pytest.mark.parametrize("family", ["baseline", "simulator"])
def test_special_values(device, family):
    inf = float("inf")
    every = torch.zeros(5, 40)
    every[0, 3] = -inf  # not the target
    every[1, 0] = -inf  # the target
    every[2] = -inf
    every[3, 5] = float("nan")
    every[4] += 1e30
    target = torch.zeros(5, dtype=torch.long)
    with tuned(family):
        for options in ({}, {"label_smoothing": 0.1}):
            for x in (every, every[:, :12]):  # one thread has a short row
                found = metalcore.cross_entropy(x.to(device), target.to(device), reduction="none", **options)
                assert_near(found, F.cross_entropy(x.double(), target, reduction="none", **options), terms=4)
        weight = torch.ones(40)
        found = metalcore.cross_entropy(every.to(device), target.to(device), weight.to(device), reduction="none")
        assert_near(found, F.cross_entropy(every.double(), target, reduction="none"), terms=4)
        capped = metalcore.cross_entropy(every[:1].to(device), target[:1].to(device), softcap=2.0)
    assert_near(capped, torch.tensor(39.0).double().log(), terms=4)  # a class of -inf stays without probability


@pytest.mark.parametrize("family", ["baseline", "simulator"])
def test_targets_that_are_no_classes(device, family):
    """They give NaN in their rows only, and nothing is read for them."""
    x = tensor(4, 20, device=device).requires_grad_()
    target = torch.tensor([3, 20, -1, 2**62], device=device)
    with tuned(family):
        losses = metalcore.cross_entropy(x, target, reduction="none")
        (gradient,) = torch.autograd.grad(losses.sum(), x)
        chosen = metalcore.selective_log_softmax(x.detach(), target)
    for value in (losses, chosen, gradient.sum(1)):
        assert value.isnan().tolist() == [False, True, True, True]


def test_all_ignored(device):
    target = torch.full((3,), -100, device=device)
    loss, gradient = both(metalcore.cross_entropy, tensor(3, 20, device=device), target)
    assert loss.isnan() and not gradient[0].isfinite().any() or not gradient.any()
    assert metalcore.cross_entropy(tensor(3, 20, device=device), target, reduction="sum") == 0


@pytest.mark.parametrize("fused", [False, True])
def test_all_ignored_in_a_second_derivative(device, fused):
    """The loss is NaN. Its gradient is zero, and so are the derivatives of the gradient, as in PyTorch."""
    x, target = tensor(3, 20, device=device).requires_grad_(), torch.full((3,), -100, device=device)
    if fused:
        loss = metalcore.fused_linear_cross_entropy(x, torch.eye(20, device=device), target)
    else:
        loss = metalcore.cross_entropy(x, target)
    (first,) = torch.autograd.grad(loss, x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum() + first.sum(), x)
    assert not first.any() and not second.any()


@each_dtype
def test_in_place(device, dtype):
    """The gradient takes the place of the logits, and is the same."""
    for family in ("baseline", "simulator"):
        for count in (9, 130, 1031):
            start, target = tensor(6, count, dtype=dtype, device=device), classes(6, count).to(device)
            weight = torch.rand(count).to(device=device, dtype=dtype)
            for options in ({}, {"reduction": "sum", "weight": weight, "label_smoothing": 0.1}, {"z_loss": 0.1}):
                found = []
                for inplace in (False, True):
                    leaf = start.clone().requires_grad_()
                    logits = leaf * 1
                    with tuned(family):
                        loss = metalcore.cross_entropy(logits, target, inplace=inplace, **options)
                        (gradient,) = torch.autograd.grad(3 * loss, leaf)
                    found.append((loss.detach(), gradient))
                    assert torch.equal(logits.detach(), start) is not inplace
                for value, expected in zip(*reversed(found)):
                    assert_near(value, wide(expected), terms=64, magnitude=1.0)


def test_in_place_runs_backward_once(device):
    leaf = tensor(6, 20, device=device).requires_grad_()
    loss = metalcore.cross_entropy(leaf * 1, torch.arange(6, device=device), inplace=True)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward\\(\\) runs once"):
        loss.backward()


def test_in_place_and_what_autograd_saved(device):
    """Another node has saved the logits before, or something overwrites the gradient that stands in their place."""
    target = torch.arange(6, device=device)
    loss = metalcore.cross_entropy(tensor(6, 20, device=device).requires_grad_().exp(), target, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    logits = tensor(6, 20, device=device).requires_grad_() * 1
    loss = metalcore.cross_entropy(logits, target, inplace=True)
    logits.detach().zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_in_place_is_a_permission(device):
    """A leaf and its views, logits without a gradient, and losses of rows stay as they are."""
    target = torch.arange(6, device=device)
    for x, reduction in (
        (tensor(6, 20, device=device).requires_grad_(), "mean"),
        (tensor(2, 3, 20, device=device).requires_grad_().view(6, 20), "mean"),
        (tensor(6, 20, device=device), "mean"),
        (tensor(6, 20, device=device).requires_grad_() * 1, "none"),
    ):
        before = x.detach().clone()
        metalcore.cross_entropy(x, target, inplace=True, reduction=reduction)
        assert torch.equal(x.detach(), before)


@each_dtype
def test_selective_log_softmax(device, dtype):
    logits, index = tensor(3, 5, 40, dtype=dtype, device=device, scale=4), torch.randint(40, (3, 5))
    found = both(metalcore.selective_log_softmax, logits, index.to(device))
    expected = both(lambda x, i: x.log_softmax(-1).gather(-1, i[..., None])[..., 0], wide(logits), index)
    for value, wanted in zip(found, expected):
        assert_near(value, wanted, terms=40)
    with pytest.raises(RuntimeError, match=r"index must have the shape of logits without the last dimension, \[3, 5\]"):
        metalcore.selective_log_softmax(logits, index[0].to(device))


def test_double_backward(device):
    x, target = tensor(5, 7, device=device), classes(5, 7)
    weight = torch.rand(7)

    def second(function, x, place):
        x, grad = x.detach().requires_grad_(), torch.ones((), dtype=x.dtype, device=x.device, requires_grad=True)
        loss = function(x, target.to(place), weight=weight.to(x), softcap=2.0, z_loss=0.1, label_smoothing=0.1)
        (first,) = torch.autograd.grad(loss, x, grad, create_graph=True)
        return torch.autograd.grad(first.square().sum(), (x, grad))

    for value, expected in zip(
        second(metalcore.cross_entropy, x, device), second(reference, wide(x), "cpu"), strict=True
    ):
        assert_near(value, expected, terms=64)


@each_dtype
def test_pytorch_samples(device, dtype):
    def of(function):  # PyTorch has no derivative by weights, and probabilities with one are left to it
        return lambda x, *args, **kwargs: function(
            x, *(a.detach() for a in args), **{k: v.detach() if k == "weight" else v for k, v in kwargs.items()}
        )

    for sample in samples("nn.functional.cross_entropy", dtype):
        for prepare in (lambda value: value, noncontiguous_like):
            actual = evaluate(of(metalcore.cross_entropy), placed(sample, device, dtype, prepare), 2, None)
            expected = evaluate(of(F.cross_entropy), placed(sample, "cpu", torch.float64, prepare), 2, None)
            compare(actual, expected, sample, dtype, 1.0)


@pytest.mark.parametrize("place", ["cpu", "device"])
def test_opcheck(device, place):
    place = "cpu" if place == "cpu" else device
    x, target = tensor(3, 5, device=place).requires_grad_(), torch.tensor([1, 4, -100], device=place)
    options = (-100, 0.1, 2.0, 0.1)
    operators = torch.ops.metalcore
    check_operator(operators.cross_entropy, x, target, None, 1, *options)
    check_operator(operators.cross_entropy, x, target, None, 0, *options)
    loss, saved, total = operators.cross_entropy(x.detach(), target, None, 1, *options)
    check_operator(operators.cross_entropy_backward, loss, x, target, None, saved, total, 1, *options)
    check_operator(operators.cross_entropy_, x.detach().clone(), target, None, total, *options)
    check_operator(operators.scale_, x.detach().clone(), total)


def test_override(device):
    x, target = tensor(5, 20, device=device).requires_grad_(), torch.arange(5, device=device)
    with metalcore.enable_pytorch_overrides("cross_entropy"):
        loss = F.cross_entropy(x, target, label_smoothing=0.1)
        loss.backward()
    row = next(row for row in metalcore.report().rows if row.what == f"aten::cross_entropy_loss on {device}")
    assert row.ran == 1
    assert_near(loss.detach(), F.cross_entropy(wide(x), target.cpu(), label_smoothing=0.1), terms=20)


def test_autocast(device):
    x, target = tensor(5, 20, dtype=torch.bfloat16, device=device), torch.arange(5, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert metalcore.cross_entropy(x, target).dtype == F.cross_entropy(x, target).dtype == torch.float32
        probabilities = x.softmax(-1).bfloat16()
        for smoothing in (0.0, 0.1):
            found = metalcore.cross_entropy(x, probabilities, label_smoothing=smoothing)
            assert found.dtype == F.cross_entropy(x, probabilities, label_smoothing=smoothing).dtype


def test_reduction_by_older_names(device):
    x, target = tensor(5, 20, device=device), torch.arange(5, device=device)
    assert torch.equal(
        metalcore.cross_entropy(x, target, size_average=False), metalcore.cross_entropy(x, target, reduction="sum")
    )


def test_bad_input(device):
    x, target = tensor(5, 20, device=device), torch.arange(5, device=device)
    with pytest.raises((RuntimeError, ValueError)):
        metalcore.cross_entropy(x, target[:3])
    with pytest.raises(ValueError, match="is not a valid value for reduction"):
        metalcore.cross_entropy(x, target, reduction="median")
    with pytest.raises(RuntimeError, match="label_smoothing must be between"):
        metalcore.cross_entropy(x, target, label_smoothing=1.5)
    with pytest.raises(RuntimeError, match="metalcore::cross_entropy: target must have 5 classes, not 3"):
        torch.ops.metalcore.cross_entropy(x, target[:3], None, 1, -100, 0.0, 0.0, 0.0)
    with pytest.raises(RuntimeError, match="metalcore::cross_entropy: weight must have 20 elements, not 5"):
        torch.ops.metalcore.cross_entropy(x, target, x[:, 0], 1, -100, 0.0, 0.0, 0.0)


def test_what_is_left_to_pytorch_has_softcap_and_z_loss():
    x, target = torch.randn(4, 9).double(), torch.tensor([1, 8, -100, 3])
    for reduction in ("mean", "sum", "none"):
        options = {"softcap": 2.0, "z_loss": 0.1, "reduction": reduction, "weight": torch.rand(9).double()}
        torch.testing.assert_close(metalcore.cross_entropy(x, target, **options), reference(x, target, **options))
    assert metalcore.cross_entropy(x.half(), target, z_loss=0.1).dtype == torch.float16
    assert all(number == torch.nn._reduction.get_enum(name) for name, number in _cross_entropy.REDUCTIONS.items())
