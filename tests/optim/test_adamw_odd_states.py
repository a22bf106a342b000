"""AdamW with states that users have changed, and parameters that share theirs: as torch.optim.AdamW, or an error."""

import warnings

import pytest
import torch
from adamw_cases import random_values

import metalcore

SHAPES = [(7,), (3, 2), (0,)]
MOMENTS = ["exp_avg", "exp_avg_sq"]


def started(optimizer, device, twice=False, **options):
    params = [torch.nn.Parameter(value.to(device)) for value in random_values(*SHAPES)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the parameter that comes twice
        one = optimizer(params + params[:1] * twice, lr=0.1, **options)
    step(one, params, 0)
    return one, params


def step(optimizer, params, seed):
    for p, grad in zip(params, random_values(*SHAPES, seed=seed)):
        p.grad = grad.to(p.device)
    optimizer.step()


DTYPES = [
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
def test_steps_of_other_dtypes_and_shapes(device, dtype, shape):
    one, params = started(metalcore.optim.AdamW, device)
    reference, expected = started(torch.optim.AdamW, "cpu")
    for optimizer in (one, reference):
        for state in optimizer.state.values():
            state["step"] = state["step"].to(dtype).reshape(shape)
    for seed in (1, 2, 3):
        step(one, params, seed)
        step(reference, expected, seed)
    for p, e in zip(params, expected):
        torch.testing.assert_close(p.detach().cpu(), e.detach(), rtol=1e-5, atol=1e-5)
        ours, theirs = one.state[p]["step"], reference.state[e]["step"]
        assert torch.equal(ours, theirs) and ours.dtype == dtype and ours.shape == shape


@pytest.mark.parametrize("dtype", [torch.int64, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("options", [{}, {"capturable": True}, {"fused": True}], ids=str)
def test_steps_on_the_device(device, dtype, options):
    one, params = started(metalcore.optim.AdamW, device, **options)
    reference, expected = started(torch.optim.AdamW, "cpu")
    for p in params:
        one.state[p]["step"] = one.state[p]["step"].to(device, dtype)
    for seed in (1, 2):
        step(one, params, seed)
        step(reference, expected, seed)
    for p, e in zip(params, expected):
        torch.testing.assert_close(p.detach().cpu(), e.detach(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("options", [{}, {"amsgrad": True}, {"maximize": True, "weight_decay": 0.3}], ids=str)
@pytest.mark.parametrize("ours", [{}, {"fused": True}], ids=str)
def test_a_parameter_twice_in_a_group(device, ours, options):
    """The second update takes the step, the moments and the values of the first one, as in torch's loop."""
    one, params = started(metalcore.optim.AdamW, device, twice=True, **ours, **options)
    reference, expected = started(torch.optim.AdamW, "cpu", twice=True, foreach=False, **options)
    for seed in (1, 2, 3):
        step(one, params, seed)
        step(reference, expected, seed)
    for p, e in zip(params, expected):
        torch.testing.assert_close(p.detach().cpu(), e.detach(), rtol=1e-4, atol=1e-4)
    assert float(one.state[params[0]]["step"]) == float(reference.state[expected[0]]["step"]) == 8


@pytest.mark.parametrize("ours", [{}, {"fused": True}], ids=str)
@pytest.mark.parametrize("name", ["step", *MOMENTS])
def test_states_that_two_parameters_share(device, name, ours):
    one, params = started(metalcore.optim.AdamW, device, **ours)
    reference, expected = started(torch.optim.AdamW, "cpu", foreach=False)
    for optimizer, some in ((one, params), (reference, expected)):
        twin = torch.nn.Parameter(torch.ones_like(some[0]))
        optimizer.param_groups[0]["params"].append(twin)
        optimizer.state[twin] = {key: value.clone() for key, value in optimizer.state[some[0]].items()}
        optimizer.state[twin][name] = optimizer.state[some[0]][name]
        for seed in (1, 2):
            twin.grad = random_values(SHAPES[0], seed=10 + seed)[0].to(twin.device)
            step(optimizer, some, seed)
        some.append(twin)
    for p, e in zip(params, expected):
        torch.testing.assert_close(p.detach().cpu(), e.detach(), rtol=1e-4, atol=1e-4)


# The state's entry, its new value, and the error.
REFUSED = {
    "a moment on meta": ("exp_avg", lambda t: t.to("meta"), RuntimeError, "device"),
    "another on meta": ("exp_avg_sq", lambda t: t.to("meta"), RuntimeError, "device"),
    "a step on meta": ("step", lambda t: t.to("meta"), RuntimeError, "device"),
    "a moment on the CPU": ("exp_avg", lambda t: t.cpu(), RuntimeError, "exp_avgs.*device"),
    "a moment of integers": ("exp_avg", lambda t: t.int(), RuntimeError, "exp_avgs.*int32"),
    "a short moment": ("exp_avg", lambda t: t[:3], RuntimeError, "exp_avgs.*shape"),
    "an expanded moment": ("exp_avg", lambda t: t[:1].expand(7), RuntimeError, "expanded"),
    "a missing moment": ("exp_avg", None, KeyError, "exp_avg"),
    "no moment": ("exp_avg", lambda t: None, TypeError, "'exp_avg' must be a tensor, not NoneType"),
    "a number as a step": ("step", lambda t: 3, TypeError, "'step' must be a tensor, not int"),
    "a step of bools": ("step", lambda t: t.bool(), RuntimeError, "step.*bool"),
    "a complex step": ("step", lambda t: t + 0j, RuntimeError, "step.*complex"),
    "two steps": ("step", lambda t: t.expand(2), RuntimeError, "step.*one element"),
}


@pytest.mark.parametrize("options", [{}, {"fused": True}], ids=str)
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_changes_nothing(device, name, options):
    entry, change, error, message = REFUSED[name]
    one, params = started(metalcore.optim.AdamW, device, **options)
    value = one.state[params[0]].pop(entry)
    if change is not None:
        one.state[params[0]][entry] = change(value)
    before = [p.detach().clone() for p in params]
    with pytest.raises(error, match=message):
        step(one, params, 1)
    assert all(torch.equal(p.detach(), value) for p, value in zip(params, before))


def test_amsgrad_switched_on_later(device):
    """Raises torch's KeyError: the moments would begin in the middle."""
    for optimizer, where in ((metalcore.optim.AdamW, device), (torch.optim.AdamW, "cpu")):
        one, params = started(optimizer, where)
        one.param_groups[0]["amsgrad"] = True
        with pytest.raises(KeyError, match="max_exp_avg_sq"):
            step(one, params, 1)
