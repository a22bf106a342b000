"""compile_train_step(): recorded steps train as ordinary ones do, with schedules, checkpoints and other options."""

import copy

import pytest
import torch
from torch.nn.functional import nll_loss

import metalcore
from metalcore.replay import CaptureError

pytestmark = pytest.mark.only_on("simulator", "mps")


def model_of(device):
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(16, 32),
        metalcore.nn.SiLU(),
        metalcore.nn.RMSNorm(32),
        torch.nn.Linear(32, 8),
        metalcore.nn.LogSoftmax(-1),
    ).to(device)


def batches(device, count):
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        x, y = torch.randn(12, 16, generator=generator), torch.randint(0, 8, (12,), generator=generator)
        yield x.to(device), y.to(device)


def eager_step(model, optimizer, max_norm=None):
    def step(x, y):
        optimizer.zero_grad()
        loss = nll_loss(model(x), y)
        loss.backward()
        if max_norm is not None:
            metalcore.optim.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        return loss.detach()

    return step


def train(device, captured, make=None, max_norm=0.5, change=None, steps=20):
    """The losses, and the model's and the optimizer's states afterwards."""
    model = model_of(device)
    optimizer = (make or (lambda p: metalcore.optim.AdamW(p, lr=1e-2, capturable=True)))(model.parameters())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    data = list(batches(device, steps))
    if captured:
        step = metalcore.compile_train_step(model, nll_loss, optimizer, data[0], max_norm=max_norm)
    else:
        step = eager_step(model, optimizer, max_norm)
    losses = []
    for i, batch in enumerate(data):
        if change:
            change(i, model, optimizer)
        losses.append(step(*batch).item())
        scheduler.step()
    assert not captured or step.replay
    return losses, model.state_dict(), optimizer.state_dict(), step


def check_equal(a, b, **tolerance):
    torch.testing.assert_close(a[0], b[0], **tolerance)
    torch.testing.assert_close(a[1], b[1], **tolerance)
    torch.testing.assert_close(a[2]["state"], b[2]["state"], **tolerance)
    assert a[2]["param_groups"] == b[2]["param_groups"]


@pytest.mark.parametrize(
    "make",
    [
        lambda p: metalcore.optim.AdamW(p, lr=1e-2, capturable=True),
        lambda p: metalcore.optim.SGD(p, lr=1e-2, momentum=0.9, dampening=0.1),
        lambda p: metalcore.optim.Lion(p, lr=1e-3, capturable=True),
    ],
    ids=["AdamW", "SGD", "Lion"],
)
def test_twenty_steps_are_those_of_an_ordinary_loop(device, make):
    captured = train(device, True, make)
    check_equal(captured, train(device, False, make), rtol=0, atol=0)
    assert captured[0][-1] < captured[0][0]
    again = train(device, True, make)
    check_equal(captured, again, rtol=0, atol=0)


def test_steps_counted_on_the_host_agree(device):
    def make(p):
        return metalcore.optim.AdamW(p, lr=1e-2)

    captured, eager = train(device, True, make), train(device, False, make)
    torch.testing.assert_close(captured[:2], eager[:2], rtol=1e-6, atol=1e-6)


def test_options_may_change(device):
    def change(i, model, optimizer):
        if i == 8:
            optimizer.param_groups[0]["weight_decay"] = 0.3

    check_equal(train(device, True, change=change), train(device, False, change=change), rtol=0, atol=0)


def freeze(model, optimizer):
    model[0].weight.requires_grad_(False).grad = None


def unfreeze(model, optimizer):
    model[0].weight.requires_grad_(True)


def move(model, optimizer):
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.9


def clear(model, optimizer):
    optimizer.state.clear()


def add(model, optimizer):
    optimizer.add_param_group({"params": [model.late], "lr": 3e-2})


@pytest.mark.parametrize(
    "changes",
    [{5: freeze}, {5: freeze, 9: unfreeze}, {7: move}, {7: clear}, {7: add}],
    ids=["freeze", "freeze and unfreeze", "move", "clear", "add"],
)
def test_parameters_may_change(device, changes):
    """They are frozen, trained again, get other memory or other states, or are added."""

    def make(parameters):
        return metalcore.optim.AdamW(parameters, lr=1e-2, capturable=True)

    def run(captured):
        model = model_of(device)
        model.late = model[-2].bias
        optimizer = make(p for p in model.parameters() if changes.get(7) is not add or p is not model.late)
        data, losses = list(batches(device, 14)), []
        step = metalcore.compile_train_step(model, nll_loss, optimizer, data[0]) if captured else None
        step = step or eager_step(model, optimizer)
        for i, batch in enumerate(data):
            if i in changes:
                changes[i](model, optimizer)
            losses.append(step(*batch).item())
        return losses, model.state_dict()

    torch.testing.assert_close(run(True), run(False), rtol=0, atol=0)


def test_checkpoints_are_loaded(device):
    saved = {}

    def change(i, model, optimizer):
        if i == 6:
            saved.update(copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()}))
        if i == 12:
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])

    check_equal(train(device, True, change=change), train(device, False, change=change), rtol=0, atol=0)


def test_a_model_of_metalcores_ops_is_one_segment(device):
    weight = torch.nn.Parameter(torch.ones(300, device=device))
    model = lambda x: metalcore.silu(metalcore.rms_norm(x, (300,), weight))  # noqa: E731
    optimizer = metalcore.optim.AdamW([weight], lr=1e-2)
    x, y = torch.randn(8, 300, device=device), torch.randint(0, 300, (8,), device=device)
    step = metalcore.compile_train_step(model, metalcore.cross_entropy, optimizer, (x, y), max_norm=1.0, segments=False)
    losses = [step(x, y).item() for _ in range(6)]
    assert losses == sorted(losses, reverse=True) and step.replay.segments == 1 and not step.replay.names
    assert step.grad_norm.item() > 0


def test_what_it_refuses(device):
    model = model_of(device)
    data = next(batches(device, 1))
    with pytest.raises(TypeError, match="one of metalcore.optim's, not AdamW"):
        metalcore.compile_train_step(model, nll_loss, torch.optim.AdamW(model.parameters()), data)
    optimizer = metalcore.optim.AdamW(model.parameters())
    with pytest.raises(ValueError, match="warmup must be at least one step, not 0"):
        metalcore.compile_train_step(model, nll_loss, optimizer, data, warmup=0)
    with pytest.raises(ValueError, match="the batch has no tensors"):
        metalcore.compile_train_step(model, nll_loss, optimizer, ())
    for loss, found in [(lambda y, t: -y[:, 0], r"shape \(12,\)"), (lambda y, t: (y.sum(), y), "tuple")]:
        with pytest.raises(TypeError, match=f"a tensor of one number, not .*{found}"):
            metalcore.compile_train_step(model, loss, optimizer, data)(*data)
    step = metalcore.compile_train_step(model, nll_loss, optimizer, data, warmup=1, segments=False)
    with pytest.raises(ValueError, match=r"input 0 has the shape \(11, 16\); \(12, 16\) was captured"):
        step(data[0][1:], data[1])
    step(*data)
    with pytest.raises(CaptureError, match="PyTorch does a part of the work.*aten::addmm"):
        step(*data)
