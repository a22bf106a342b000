"""AdamW's state: checkpoints from and to torch.optim.AdamW, copies, steps in device memory, GradScaler."""

import copy
import io
import math
import pickle

import pytest
import torch
from adamw_cases import EPS, Pair, assert_steps_close, random_values

import metalcore

SHAPES = [(33, 7), (5,), ()]
VARIANTS = {"plain": {}, "foreach": {"foreach": True}, "capturable": {"capturable": True}, "fused": {"fused": True}}


def run(optimizer, params, steps, seed):
    for step in range(steps):
        for p, g in zip(params, random_values(*[p.shape for p in params], seed=seed + step)):
            p.grad = g.to(device=p.device, dtype=p.dtype)
        optimizer.step()


def saved_and_loaded(state_dict):
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file)


def params_on(device, dtype=torch.float32):
    return [torch.nn.Parameter(v.to(device=device, dtype=dtype)) for v in random_values(*SHAPES)]


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("theirs", ["plain", "foreach", "fused"])
@pytest.mark.parametrize("ours", VARIANTS)
def test_checkpoint_of_torch_continues_in_metalcore(device, theirs, ours, amsgrad):
    params = params_on("cpu")
    reference = torch.optim.AdamW(params, lr=1e-2, amsgrad=amsgrad, **VARIANTS[theirs])
    run(reference, params, 3, seed=10)
    mine = [torch.nn.Parameter(p.detach().to(device)) for p in params]
    optimizer = metalcore.optim.AdamW(mine, **VARIANTS[ours])
    optimizer.load_state_dict(saved_and_loaded(reference.state_dict()))
    assert optimizer.param_groups[0]["lr"] == 1e-2
    run(reference, params, 3, seed=20)
    run(optimizer, mine, 3, seed=20)
    for p, e in zip(mine, params):
        assert_steps_close(p, e, 6, 1e-2)
        assert float(optimizer.state[p]["step"]) == 6


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("theirs", ["plain", "foreach", "fused"])
@pytest.mark.parametrize("ours", VARIANTS)
def test_checkpoint_of_metalcore_continues_in_torch(device, theirs, ours, amsgrad):
    params = params_on(device)
    optimizer = metalcore.optim.AdamW(params, lr=1e-2, amsgrad=amsgrad, **VARIANTS[ours])
    run(optimizer, params, 3, seed=10)
    twins = [torch.nn.Parameter(p.detach().cpu()) for p in params]
    reference = torch.optim.AdamW(twins, **VARIANTS[theirs])
    checkpoint = saved_and_loaded(optimizer.state_dict())
    # A loaded group brings its options along; CPU parameters cannot be capturable.
    checkpoint["param_groups"][0]["capturable"] = False
    for state in checkpoint["state"].values():
        state["step"] = state["step"].cpu()
    reference.load_state_dict(checkpoint)
    run(optimizer, params, 3, seed=20)
    run(reference, twins, 3, seed=20)
    for p, e in zip(params, twins):
        assert_steps_close(p, e, 6, 1e-2)
        assert float(reference.state[e]["step"]) == 6


def test_state_dict_has_the_entries_of_torch(device):
    for options in ({}, {"amsgrad": True}):
        pair = Pair(random_values(*SHAPES), device, **options)
        pair.steps(1)
        ours, theirs = pair.optimizer.state_dict(), pair.reference.state_dict()
        assert ours["param_groups"] == theirs["param_groups"]
        for key, state in theirs["state"].items():
            assert ours["state"][key].keys() == state.keys()
            for name, value in state.items():
                assert ours["state"][key][name].shape == value.shape
                assert ours["state"][key][name].dtype == value.dtype
            assert ours["state"][key]["step"].device == state["step"].device


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_checkpoints(device, dtype):
    params = params_on(device, dtype)
    optimizer = metalcore.optim.AdamW(params, lr=1e-2)
    run(optimizer, params, 3, seed=10)
    checkpoint = saved_and_loaded(optimizer.state_dict())

    # Back into metalcore: not a bit of the float32 moments is lost, and the step may be continued.
    twins = [torch.nn.Parameter(p.detach().clone()) for p in params]
    twin = metalcore.optim.AdamW(twins)
    twin.load_state_dict(checkpoint)
    for p, t in zip(params, twins):
        for name in ("exp_avg", "exp_avg_sq"):
            assert twin.state[t][name].dtype == torch.float32
            assert torch.equal(twin.state[t][name], optimizer.state[p][name])

    # torch rounds the moments to the parameter's dtype; on the way back they are widened.
    theirs = [torch.nn.Parameter(p.detach().cpu()) for p in params]
    reference = torch.optim.AdamW(theirs)
    reference.load_state_dict(saved_and_loaded(checkpoint))
    assert all(reference.state[p]["exp_avg"].dtype == dtype for p in theirs)
    run(reference, theirs, 1, seed=20)
    twin.load_state_dict(saved_and_loaded(reference.state_dict()))
    for t, p in zip(twins, theirs):
        assert twin.state[t]["exp_avg"].dtype == torch.float32
        assert torch.equal(twin.state[t]["exp_avg"].cpu(), reference.state[p]["exp_avg"].float())
    run(twin, twins, 1, seed=21)
    assert float(twin.state[twins[0]]["step"]) == 5


def test_load_state_dict_hooks_of_the_user_see_and_change_the_state(device):
    params = params_on(device, torch.bfloat16)
    optimizer = metalcore.optim.AdamW(params)
    run(optimizer, params, 2, seed=10)
    seen = []

    def replace(opt, state_dict):
        state = {
            key: {**value, "exp_avg": torch.full_like(value["exp_avg"], 1 / 3)}
            for key, value in state_dict["state"].items()
        }
        return {**state_dict, "state": state}

    optimizer.register_load_state_dict_pre_hook(replace)
    optimizer.register_load_state_dict_post_hook(lambda opt: seen.append(opt.state[params[0]]["exp_avg"].cpu()))
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert seen[0].dtype == torch.float32 and torch.equal(seen[0], torch.full((33, 7), 1 / 3))


def test_load_state_dict_refuses_what_torch_refuses(device):
    params = params_on(device)
    optimizer = metalcore.optim.AdamW(params)
    state = metalcore.optim.AdamW(params[:1]).state_dict()
    with pytest.raises(ValueError, match="doesn't match the size"):
        optimizer.load_state_dict(state)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
@pytest.mark.parametrize("options", [{}, {"capturable": True, "amsgrad": True}])
def test_copies_continue_equally(device, copied, options):
    params = params_on(device)
    optimizer = metalcore.optim.AdamW(params, lr=1e-2, **options)
    run(optimizer, params, 2, seed=10)
    twin = copied(optimizer)
    assert type(twin) is metalcore.optim.AdamW
    twins = twin.param_groups[0]["params"]
    assert not {id(p) for p in twins} & {id(p) for p in params}
    run(optimizer, params, 2, seed=20)
    run(twin, twins, 2, seed=20)
    for p, t in zip(params, twins):
        assert torch.equal(p, t)


def test_step_is_counted_on_the_device(device):
    params = params_on(device)
    optimizer = metalcore.optim.AdamW(params, capturable=True)
    run(optimizer, params, 1, seed=10)
    step = optimizer.state[params[0]]["step"]
    assert step.device == params[0].device and step.dtype == torch.float32 and step.shape == ()
    run(optimizer, params, 2, seed=20)
    assert optimizer.state[params[0]]["step"] is step and step.item() == 3


def test_step_is_counted_on_the_host_by_default(device):
    params = params_on(device)
    optimizer = metalcore.optim.AdamW(params)
    run(optimizer, params, 2, seed=10)
    step = optimizer.state[params[0]]["step"]
    assert step.device.type == "cpu" and step.dtype == torch.float32 and step.shape == () and step.item() == 2


def test_step_is_on_the_host_under_a_default_device(device):
    with torch.device(device):
        p = torch.nn.Parameter(torch.ones(3))
        p.grad = torch.ones(3)
        optimizer = metalcore.optim.AdamW([p])
        optimizer.step()
    assert optimizer.state[p]["step"].device.type == "cpu" and optimizer.state[p]["step"].item() == 1


def test_changing_capturable_moves_the_step(device):
    pair = Pair(random_values(*SHAPES), device, lr=1e-2)
    for capturable in (False, True, False):
        pair.optimizer.param_groups[0]["capturable"] = capturable
        pair.steps(2)
    pair.assert_equal(steps=6)


def test_default_dtype_float64(device):
    torch.set_default_dtype(torch.float64)
    try:
        pair = Pair([v.float() for v in random_values(*SHAPES)], device, lr=1e-2)
        pair.steps(3)
        pair.assert_equal(steps=3)
        assert pair.optimizer.state[pair.params[0]]["step"].dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("ours", [{"capturable": True}, {"fused": True}])
def test_learning_rate_in_device_memory(device, ours):
    lr = torch.tensor(1e-2, device=device)
    pair = Pair(random_values(*SHAPES), device, ours | {"lr": lr}, lr=1e-2, weight_decay=0.1)
    pair.steps(2)
    lr.fill_(3e-2)
    pair.reference.param_groups[0]["lr"] = 3e-2
    pair.steps(2)
    pair.assert_equal(steps=4)


@pytest.mark.parametrize("where", ["cpu", "device"])
def test_learning_rate_tensor_with_steps_on_the_host(device, where):
    lr = torch.tensor(1e-2, device=device if where == "device" else "cpu")
    pair = Pair(random_values(*SHAPES), device, {"lr": lr}, lr=float(lr))
    pair.steps(3)
    pair.assert_equal(steps=3)


# GradScaler.unscale_ itself refuses float16 gradients; the kernel does not.
@pytest.mark.parametrize(
    "fused, unscaled_before, dtype",
    [
        (True, False, torch.float32),
        (True, True, torch.float32),
        (None, False, torch.float32),
        (None, True, torch.float32),
        (True, False, torch.float16),
    ],
)
def test_grad_scaler(device, fused, unscaled_before, dtype):
    """Scaled gradients give the same steps; a step with an overflown gradient changes nothing and is not counted."""
    params = [torch.nn.Parameter(v.to(device=device, dtype=dtype)) for v in random_values(*SHAPES)]
    expected = [torch.nn.Parameter(p.detach().cpu().float()) for p in params]
    optimizer = metalcore.optim.AdamW(params, lr=1e-2, fused=fused)
    reference = torch.optim.AdamW(expected, lr=1e-2)
    scaler = torch.amp.GradScaler(torch.device(device).type, init_scale=128.0, growth_interval=100)
    for step in range(4):
        overflown = step == 2
        grads = [g.to(dtype) for g in random_values(*SHAPES, seed=step)]
        scale = scaler.scale(torch.ones((), device=device)).item()
        for p, e, g in zip(params, expected, grads):
            p.grad, e.grad = (g * scale).to(device), g.float()
        if overflown:
            params[0].grad[3, 3] = float("inf")
        before = [p.detach().cpu().clone() for p in params]
        if unscaled_before:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        if overflown:
            assert all(torch.equal(p.detach().cpu(), b) for p, b in zip(params, before))
        else:
            reference.step()
            if not unscaled_before and fused:
                assert all(torch.equal(p.grad.cpu(), g) for p, g in zip(params, grads))  # unscaled in place, as torch's
        for p in params:
            assert float(optimizer.state[p]["step"]) == (step if step >= 2 else step + 1)
    assert scaler.get_scale() == 64.0
    for p, e in zip(params, expected):
        if dtype == torch.float32:
            assert_steps_close(p, e, 4, 1e-2)
        else:
            # Three roundings of half an ulp, and the moments of float32.
            torch.testing.assert_close(p.detach().cpu().float(), e.detach(), rtol=3 * torch.finfo(dtype).eps, atol=1e-5)


def test_unscaled_gradients_that_float16_cannot_hold(device):
    """The kernel unscales in float32: 2^-14 / 2^16 is zero in float16, but moves the parameter by lr like any other."""
    p = torch.nn.Parameter(torch.ones(5, device=device, dtype=torch.float16))
    p.grad = torch.full_like(p, 2.0**-14)
    optimizer = metalcore.optim.AdamW([p], lr=0.25, eps=0.0, weight_decay=0.0, fused=True)
    optimizer.grad_scale = torch.tensor(2.0**16, device=device)
    optimizer.step()
    assert torch.equal(p.detach().cpu(), torch.full((5,), 0.75, dtype=torch.float16))
    assert torch.equal(p.grad.cpu(), torch.zeros(5, dtype=torch.float16))


def test_first_step_skipped(device):
    p = torch.nn.Parameter(torch.ones(5, device=device))
    optimizer = metalcore.optim.AdamW([p], fused=True)
    scaler = torch.amp.GradScaler(torch.device(device).type, init_scale=2.0)
    scaler.scale(torch.ones((), device=device))
    p.grad = torch.full_like(p, float("nan"))
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(p.detach().cpu(), torch.ones(5)) and optimizer.state[p]["step"].item() == 0
    assert torch.equal(optimizer.state[p]["exp_avg"].cpu(), torch.zeros(5))


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9, 0.999, 0.99999])
@pytest.mark.parametrize("step", [1, 2, 3, 10, 100, 1000, 12345, 10**6])
def test_bias_corrections_of_the_device(device, beta, step):
    """With moments of zero and the other beta zero, the update depends only on 1 - beta^step."""
    correction = -math.expm1(step * math.log(beta)) if beta else 1.0
    for betas, expected in [((beta, 0.0), (1 - beta) / correction), ((0.0, beta), math.sqrt(correction / (1 - beta)))]:
        p = torch.nn.Parameter(torch.zeros(3, device=device))
        p.grad = torch.tensor([1.0, -2.0, 4.0], device=device)
        optimizer = metalcore.optim.AdamW([p], lr=1.0, betas=betas, eps=0.0, weight_decay=0.0, capturable=True)
        optimizer.state[p] = {
            "step": torch.tensor(step - 1.0, device=device),
            "exp_avg": torch.zeros(3, device=device),
            "exp_avg_sq": torch.zeros(3, device=device),
        }
        optimizer.step()
        torch.testing.assert_close(
            p.detach().cpu(), torch.tensor([-expected, expected, -expected]), rtol=6 * EPS, atol=0
        )
