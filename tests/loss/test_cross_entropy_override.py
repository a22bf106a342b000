"""cross_entropy under overrides, whose gradient is computed ahead, against float64 in every plan."""

import pytest
import torch
import torch.nn.functional as F
from references import DTYPES, assert_near, check_operator, tensor, wide
from rows import tuned

import metalcore
from metalcore.loss import _cross_entropy

FORMS = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "smoothing": {"label_smoothing": 0.2},
    "weights": {"weight": True},
    "weights and smoothing": {"weight": True, "label_smoothing": 0.2, "reduction": "none"},
    "probabilities": {"probabilities": True},
    "probabilities, all": {"probabilities": True, "weight": True, "label_smoothing": 0.2},
}
SHAPES = ((5, 3), (7, 17), (3, 130), (4, 1027), (2, 8200), (2, 5, 3, 4))


@pytest.fixture(params=[False, True], ids=["divided backward", "divided ahead"])
def divided(request, monkeypatch):
    if request.param:
        monkeypatch.setattr(_cross_entropy, "_DIVIDED_FROM", 0)
    return request.param


@pytest.fixture(autouse=True)
def override():
    with metalcore.enable_pytorch_overrides("cross_entropy"):
        yield


def made(shape, dtype, device, weight=False, probabilities=False, **options):
    """Logits, and the other arguments on the device and in float64."""
    x = tensor(*shape, dtype=dtype, device=device, scale=3)
    target = torch.randint(shape[1], (shape[0], *shape[2:]))
    target.view(-1)[:: max(3, target.numel() // 4)] = -100
    target = torch.rand(shape).softmax(1).to(dtype) if probabilities else target
    weight = (torch.rand(shape[1]) + 0.5).to(dtype) if weight else None
    there = {**options, "target": target.to(device), "weight": None if weight is None else weight.to(device)}
    here = {**options, "target": wide(target) if probabilities else target}
    return x, there, {**here, "weight": None if weight is None else wide(weight)}


def gradients(x, options, grad=None, **more):
    x = x.detach().requires_grad_()
    y = x * 1
    loss = F.cross_entropy(y, **options)
    with torch.no_grad():
        y.fill_(7)
    grad = torch.tensor(1.5).expand(loss.shape) if grad is None else grad
    return loss.detach(), *[torch.autograd.grad(loss, x, grad.to(loss), **more)[0] for _ in range(2 if more else 1)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("family", ["baseline", "simulator"])
def test_forms(device, dtype, name, family, divided):
    for shape in SHAPES:
        x, there, here = made(shape, dtype, device, **FORMS[name])
        scale = torch.randn(shape[:1] + shape[2:]) if FORMS[name].get("reduction") == "none" else torch.tensor(1.5)
        scale = scale.to(dtype)
        with tuned(family):
            found = gradients(x, there, scale, retain_graph=True)
        loss, gradient = (value.detach() for value in gradients(wide(x), here, scale))
        for value, wanted in zip(found, (loss, gradient, gradient), strict=True):
            assert value.dtype == dtype
            assert_near(value, wanted, terms=64)  # 16 bits are rounded to nearest twice: before and after the scale


def test_no_scale_is_left_to_do(device, divided):
    """With an upstream gradient of 1 nothing is read backward, and a second walk has the same numbers."""
    x, there, here = made((6, 300), torch.float32, device)
    found = gradients(x, there, torch.tensor(1.0), retain_graph=True)
    assert torch.equal(found[1], found[2])
    assert_near(found[1], gradients(wide(x), here, torch.tensor(1.0))[1], terms=64)


def test_rows_anywhere(device):
    for make in (lambda n: tensor(6 * n + 1, device=device)[1:].view(6, n), lambda n: tensor(n, 6, device=device).t()):
        for count in (17, 1029):
            x, options = make(count), {"target": torch.arange(6)}
            found = gradients(x, {"target": options["target"].to(device)})
            for value, wanted in zip(found, gradients(wide(x), options), strict=True):
                assert_near(value, wanted, terms=64)


def test_rows_without_loss(device, divided):
    """They have zeros, also where all are ignored, which makes the mean NaN, or an upstream gradient is infinite."""
    x = tensor(4, 50, device=device)
    ignored = torch.full((4,), -100, device=device)
    loss, gradient = gradients(x, {"target": ignored})
    assert loss.isnan() and not gradient.any()
    scale = torch.tensor([1.0, torch.inf, torch.nan, 2.0])
    gradient = gradients(x, {"target": ignored, "reduction": "none"}, scale)[1]
    assert not gradient.any()
    wrong = gradients(x, {"target": torch.tensor([1, 50, -1, 2], device=device), "reduction": "none"})
    assert [value.isnan().flatten(1).all(1).tolist() for value in (wrong[0][:, None], wrong[1])] == [
        [False, True, True, False]
    ] * 2


@pytest.mark.parametrize("name", FORMS)
def test_derivatives_of_derivatives(device, name, divided):
    """They come from the saved gradient, and not from the logits."""

    def derivatives(x, options):
        x = x.detach().requires_grad_()
        y = x * 1
        loss = F.cross_entropy(y, **options)
        grad = torch.linspace(1, 2, loss.numel()).view(loss.shape).to(loss).requires_grad_()
        (first,) = torch.autograd.grad(loss, x, grad, create_graph=True)
        direction = torch.linspace(-1, 1, x.numel()).view(x.shape).to(x)
        second, of_grad = torch.autograd.grad((first * direction).sum(), (x, grad), create_graph=True)
        third = torch.autograd.grad((second * direction).sum(), x)[0]
        return first.detach(), second.detach(), of_grad.detach(), third

    for shape in ((6, 40), (2, 5, 3, 4)):
        x, there, here = made(shape, torch.float32, device, **FORMS[name])
        for value, wanted in zip(derivatives(x, there), derivatives(wide(x), here), strict=True):
            assert_near(value, wanted, terms=64)


def test_large_logits(device):
    """Where logits are so large that the gradient is not divided ahead in float16, and is in the other dtypes."""
    for dtype, ahead in ((torch.float32, True), (torch.float16, False)):
        x = tensor(1100, 4096, dtype=dtype, device=device)
        target = torch.arange(1100, device=device)
        assert _cross_entropy._is_divided_ahead(x) is ahead
        found = gradients(x, {"target": target}, torch.tensor(1024.0))
        for value, wanted in zip(
            found, gradients(wide(x), {"target": target.cpu()}, torch.tensor(1024.0)), strict=True
        ):
            assert_near(value, wanted, terms=64)


@pytest.mark.parametrize("place", ["cpu", "device"])
def test_opcheck(device, place):
    place = "cpu" if place == "cpu" else device
    x, target = tensor(4, 20, device=place).requires_grad_(), torch.tensor([0, 3, -100, 19], device=place)
    operators = torch.ops.metalcore
    check_operator(operators.cross_entropy_ahead, x, target, None, 1, -100, 0.1, True)
    check_operator(operators.cross_entropy_ahead, x, target, None, 0, -100, 0.0, False)
    _, gradient, total = operators.cross_entropy_ahead(x.detach(), target, None, 1, -100, 0.1, False)
    check_operator(operators.cross_entropy_finish_, gradient, tensor(1, device=place), target, total, -100)
