"""The overrides of steps of torch.optim's optimizers: which steps the kernels take, and what the optimizers stay."""

import copy
import io

import pytest
import torch
from cases import operators

import metalcore


def made(device):
    return [torch.nn.Parameter(torch.randn(4, 3, device=device)), torch.nn.Parameter(torch.randn(5, device=device))]


def train(device):
    torch.manual_seed(0)
    parameters = made(device)
    optimizer = torch.optim.AdamW(parameters, lr=0.1)
    for _ in range(3):
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    return optimizer, [parameter.detach() for parameter in parameters]


def steps():
    """How often the kernels have stepped a group."""
    return sum(row.ran for row in metalcore.report().rows if row.what.startswith("torch.optim."))


def test_a_step(device):
    _, expected = train(device)
    with metalcore.enable_pytorch_overrides("adamw"):
        optimizer, found = train(device)
    assert type(optimizer) is torch.optim.AdamW and steps() == 3
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
    assert "adamw_" not in operators(lambda: train(device))


KINDS = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    "AdamW, fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "Muon": lambda parameters: torch.optim.Muon(parameters, lr=0.1),
}


def of_a_linear_layer(make, device):
    layer = torch.nn.Linear(3, 4, bias=False, device=device)
    optimizer = make(layer.parameters())
    return layer, optimizer


def step(layer, optimizer):
    device = layer.weight.device
    optimizer.zero_grad()
    layer(torch.ones(2, 3, device=device)).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_may_move_after_its_optimizer_was_made(device, kind):
    """accelerate's usual order: the optimizer is made of parameters on the CPU, and prepare() moves the model."""
    with metalcore.enable_pytorch_overrides():
        layer, optimizer = of_a_linear_layer(KINDS[kind], "cpu")
        layer.to(device)
        step(layer, optimizer)
        assert steps() == 1
        layer.cpu()
        optimizer.state.clear()
        step(layer, optimizer)
        assert steps() == 1


@pytest.mark.parametrize("kind", KINDS)
def test_an_optimizer_stays_pytorchs(device, kind):
    """Its copies and pickles have PyTorch's attributes, and load where there is no metalcore."""

    def public(optimizer):
        return {name for name in vars(optimizer) if not name.startswith("_")}

    plain = public(of_a_linear_layer(KINDS[kind], device)[1])
    with metalcore.enable_pytorch_overrides():
        layer, optimizer = of_a_linear_layer(KINDS[kind], device)
        step(layer, optimizer)
        again = copy.deepcopy(optimizer)
        again.load_state_dict(optimizer.state_dict())
        assert public(optimizer) == public(again) == plain and type(again) is type(optimizer)
        pickled = io.BytesIO()
        torch.save(optimizer, pickled)
    assert b"metalcore" not in pickled.getvalue()


def test_public_attributes_survive_copies(device):
    for make in (metalcore.optim.AdamW, metalcore.optim.SGD, metalcore.optim.Muon, metalcore.optim.Lion):
        _, optimizer = of_a_linear_layer(lambda parameters, make=make: make(parameters, lr=0.1), device)
        again = copy.deepcopy(optimizer)
        assert {name for name in vars(again) if name[0] != "_"} == {name for name in vars(optimizer) if name[0] != "_"}
        assert again.state_dict().keys() == optimizer.state_dict().keys()


def test_hooks_schedulers_and_switching(device):
    """Hooks run once for each step, whoever steps. A scheduler that found our step gets PyTorch's after the switch."""
    called = []

    def both():
        step(layer, optimizer)
        scheduler.step()

    request = metalcore.enable_pytorch_overrides("sgd")
    layer, optimizer = of_a_linear_layer(KINDS["SGD"], device)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    optimizer.register_step_pre_hook(lambda *_: called.append("pre"))
    optimizer.register_step_post_hook(lambda *_: called.append("post"))
    assert "sgd_" in operators(both)
    with request:
        pass
    assert "sgd_" not in operators(both)
    assert called == ["pre", "post"] * 2 and scheduler.get_last_lr() == [0.025]
    assert not hasattr(torch.optim.SGD.step, "metalcore_switch")


# Only the fused step is tested in float16: there PyTorch's other steps divide by an eps of zero.
@pytest.mark.parametrize(
    "dtype, options",
    ((torch.bfloat16, {}), (torch.bfloat16, {"amsgrad": True}), (torch.float16, {"fused": True})),
    ids=str,
)
def test_the_state_has_pytorchs_dtypes(device, dtype, options):
    def train():
        torch.manual_seed(0)
        parameter = torch.nn.Parameter(torch.randn(300, device=device).to(dtype))
        optimizer = torch.optim.AdamW([parameter], lr=0.1, **options)
        for _ in range(3):
            parameter.grad = torch.randn(300, device=device).to(dtype)
            optimizer.step()
        return optimizer, parameter

    theirs, expected = train()
    with metalcore.enable_pytorch_overrides("adamw"):
        ours, found = train()
        again = copy.deepcopy(ours)
        again.load_state_dict(theirs.state_dict())
        again.step()
    state, expected_state = ours.state[found], theirs.state[expected]
    assert steps() == 3
    assert {name: x.dtype for name, x in state.items()} == {name: x.dtype for name, x in expected_state.items()}
    assert all(
        x.dtype in (dtype, torch.float32) and (x.dtype is dtype or x.numel() == 1)
        for state in again.state.values()
        for x in state.values()
    )
    # PyTorch's fused step rounds once, and its other steps round after each of some ten operations.
    bound = 10 * 3 * torch.finfo(dtype).eps * expected.abs().max().item()
    torch.testing.assert_close(found.detach(), expected.detach(), rtol=0, atol=bound)


def test_left_alone(device):
    class Mine(torch.optim.AdamW):
        pass

    with metalcore.enable_pytorch_overrides("adamw"):
        for make, where in ((torch.optim.AdamW, "cpu"), (Mine, device), (torch.optim.Adam, device)):
            layer, optimizer = of_a_linear_layer(make, where)
            step(layer, optimizer)
        (row,) = (row for row in metalcore.report().rows if row.what == "torch.optim.AdamW")
        assert row.ran == 0 and sorted(row.left.values()) == [1, 1]
        for wrong in ([], [3], [{}], 5):
            with pytest.raises((ValueError, TypeError, KeyError)):
                torch.optim.AdamW(wrong)
        with pytest.raises(ValueError, match="learning rate"):
            torch.optim.AdamW(made(device), lr=-1.0)
