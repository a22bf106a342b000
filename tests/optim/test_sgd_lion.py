"""SGD and Lion: against torch.optim.SGD and a plain Lion in float64, and what optimizers have to put up with."""

import copy

import pytest
import torch
from adamw_cases import random_values

import metalcore
from metalcore._core.registry import OPS

# Chunks of 2,048 elements, vectors of 16 bytes, an empty parameter, a scalar.
SHAPES = ((300, 7), (), (0, 3), (2048,), (2049,), (5, 1, 3))
SGD_OPTIONS = [
    {},
    {"weight_decay": 0.1, "maximize": True},
    {"momentum": 0.9, "dampening": 0.3},
    {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
]
LION_OPTIONS = [{}, {"weight_decay": 0.1, "betas": (0.8, 0.95)}]
CASES = [*((metalcore.optim.SGD, torch.optim.SGD, options) for options in SGD_OPTIONS)]
CASES += [(metalcore.optim.Lion, OPS["lion"].reference, options) for options in LION_OPTIONS]
each_case = pytest.mark.parametrize("ours, theirs, options", CASES, ids=lambda value: getattr(value, "__name__", None))


def parameters(values, device, dtype):
    return [torch.nn.Parameter(value.to(device, dtype)) for value in values]


def set_grads(params, others, seed):
    for param, other, value in zip(params, others, random_values(*(p.shape for p in params), seed=seed)):
        param.grad = torch.empty_like(param).copy_(value)
        other.grad = param.grad.cpu().to(other.dtype)


def assert_close(params, others, dtype, steps, lr):
    eps = torch.finfo(dtype).eps
    for param, other in zip(params, others):
        # Each step rounds once, to the dtype of the parameter.
        torch.testing.assert_close(
            param.detach().cpu().double(), other.detach(), rtol=steps * eps, atol=steps * eps * lr
        )


@each_case
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16), ids=str)
def test_steps(device, ours, theirs, options, dtype):
    values = [value.to(dtype) for value in random_values(*SHAPES)]
    params, expected = parameters(values, device, dtype), parameters(values, "cpu", torch.float64)
    made, reference = ours(params, lr=0.1, **options), theirs(expected, lr=0.1, **options)
    for step in range(5):
        set_grads(params, expected, seed=step + 1)
        made.step()
        reference.step()
    assert_close(params, expected, dtype, 8 if dtype is torch.float32 else 12, 10.0)


@each_case
def test_strides_and_shared_memory(device, ours, theirs, options):
    """Parameters and gradients of other layouts, without gradient, of a dtype that goes to PyTorch, and overlapping."""
    base = random_values((6, 8), (40,), (7,), (9,))
    whole = base[1].to(device)
    params = [
        torch.nn.Parameter(base[0].to(device).T[::2]),
        torch.nn.Parameter(whole[:30]),
        torch.nn.Parameter(whole[20:]),
        torch.nn.Parameter(base[2].to(device)),
        torch.nn.Parameter(base[3].to(device)),
    ]
    one = base[1].double()
    expected = [base[0].double().T[::2], one[:30], one[20:], base[2].double(), base[3].double()]
    expected = [torch.nn.Parameter(value) for value in expected]
    made, reference = ours(params, lr=0.1, **options), theirs(expected, lr=0.1, **options)
    for step in range(3):
        set_grads(params, expected, seed=step + 1)
        params[0].grad = params[0].grad.T.contiguous().T
        params[3].grad = expected[3].grad = None
        made.step()
        if theirs is torch.optim.SGD:
            reference.param_groups[0]["foreach"] = False  # one after the other, where they overlap
        reference.step()
    assert torch.equal(params[3].detach().cpu(), base[2])
    assert_close(params, expected, torch.float32, 8, 10.0)


@each_case
def test_groups_and_tensor_learning_rates(device, ours, theirs, options):
    values = random_values((5,), (6,))
    params, expected = parameters(values, device, torch.float32), parameters(values, "cpu", torch.float64)

    def groups(of):
        return [{"params": [of[0]]}, {"params": [of[1]], "lr": 0.5, "weight_decay": 0.3}]

    lr = torch.tensor(0.1, device=device)
    made, reference = ours(groups(params), lr=lr, **options), theirs(groups(expected), lr=0.1, **options)
    set_grads(params, expected, seed=1)
    made.step()
    reference.step()
    lr.fill_(0.25)
    reference.param_groups[0]["lr"] = 0.25
    made.step()
    reference.step()
    assert_close(params, expected, torch.float32, 8, 10.0)


@pytest.mark.parametrize("ours, options", [(metalcore.optim.SGD, {"momentum": 0.9}), (metalcore.optim.Lion, {})])
def test_a_scaler_leaves_its_work_to_the_kernel(device, ours, options):
    """As GradScaler does: gradients times 4, then an overflow, which changes nothing."""
    values = random_values((33,), (2050,))
    params, plain = parameters(values, device, torch.float16), parameters(values, device, torch.float16)
    made, reference = ours(params, lr=0.1, fused=True, **options), ours(plain, lr=0.1, **options)
    assert made._step_supports_amp_scaling
    for step, found_inf in enumerate((0.0, 1.0, 0.0)):
        set_grads(params, parameters(values, "cpu", torch.float32), seed=step + 1)
        for param, other in zip(params, plain):
            other.grad = param.grad.clone()
            param.grad *= 4
        made.grad_scale, made.found_inf = (torch.tensor(v, device=device) for v in (4.0, found_inf))
        made.step()
        del made.grad_scale, made.found_inf
        if not found_inf:
            reference.step()
            assert all(torch.equal(param.grad, other.grad) for param, other in zip(params, plain))
    assert all(torch.equal(param, other) for param, other in zip(params, plain))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_sgd_and_torchs_load_each_others_states(device, dtype):
    values = random_values((33,), (2050,))
    options = {"lr": 0.1, "momentum": 0.9, "nesterov": True}
    ours, theirs = parameters(values, device, dtype), parameters(values, "cpu", dtype)
    mine, torchs = metalcore.optim.SGD(ours, **options), torch.optim.SGD(theirs, **options)
    set_grads(ours, theirs, seed=1)
    mine.step()
    torchs.step()
    assert mine.state_dict().keys() == torchs.state_dict().keys()
    assert mine.state_dict()["param_groups"] == torchs.state_dict()["param_groups"]
    saved = copy.deepcopy(mine.state_dict())
    mine.load_state_dict(torchs.state_dict())
    torchs.load_state_dict(saved)
    mine.step()
    torchs.step()
    tolerance = 4 * torch.finfo(dtype).eps
    for param, other in zip(ours, theirs):
        torch.testing.assert_close(param.detach().cpu(), other.detach(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("state_dtype", (None, torch.float32, torch.bfloat16), ids=str)
def test_the_dtype_of_lions_state(device, state_dtype):
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        (param,) = parameters(random_values((2050,)), device, dtype)
        made = metalcore.optim.Lion([param], state_dtype=state_dtype)
        param.grad = torch.ones_like(param)
        made.step()
        again = metalcore.optim.Lion([param], state_dtype=state_dtype)
        again.load_state_dict(copy.deepcopy(made.state_dict()))
        for optimizer in (made, again, copy.deepcopy(made)):
            (state,) = optimizer.state.values()
            assert state["exp_avg"].dtype is (state_dtype or dtype)
            assert torch.equal(state["exp_avg"], torch.full_like(state["exp_avg"], 0.01))


@pytest.mark.parametrize("ours", (metalcore.optim.SGD, metalcore.optim.Lion))
def test_differentiable(ours):
    """The step is PyTorch's own then."""
    weight = torch.ones(3, dtype=torch.float64, requires_grad=True)
    made = ours([weight.clone()], lr=0.1, differentiable=True)
    (param,) = made.param_groups[0]["params"]
    param.grad = (2 * weight).detach().requires_grad_()
    grad = param.grad
    made.step()
    assert torch.autograd.grad(param.sum(), grad, allow_unused=True)[0] is not None


OPERATORS = {
    "sgd_": dict(lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.1, nesterov=False, maximize=False, first=False),
    "lion_": dict(lr=0.1, beta1=0.9, beta2=0.99, weight_decay=0.1, maximize=False),
}


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("at", ("device", "cpu"))
def test_opcheck(device, name, at):
    lists = [[value.to(device if at == "device" else "cpu") for value in random_values((4, 3), (7,))] for _ in range(3)]
    torch.library.opcheck(getattr(torch.ops.metalcore, name).default, tuple(lists), OPERATORS[name])


@pytest.mark.parametrize("name", OPERATORS)
def test_bad_tensors(device, name):
    for change, text in (
        (lambda t: t.half(), f"metalcore::{name}: grads must be float32, not float16"),
        (lambda t: t[:1], f"metalcore::{name}: grads must have shape"),
        (lambda t: t.cpu(), f"metalcore::{name}: grads must be on the device"),
    ):
        lists = [[value.to(device) for value in random_values((4, 3))] for _ in range(3)]
        lists[1] = [change(t) for t in lists[1]]
        with pytest.raises(RuntimeError, match=text):
            getattr(torch.ops.metalcore, name)(*lists, **OPERATORS[name])


def test_bad_options():
    p = torch.nn.Parameter(torch.zeros(3))
    for options, error, text in (
        ({"lr": -1.0}, ValueError, "Invalid learning rate: -1.0"),
        ({"lr": float("nan")}, ValueError, "Invalid learning rate: nan"),
        ({"betas": (0.9, 1.0)}, ValueError, "Invalid beta parameter at index 1: 1.0"),
        ({"betas": (0.9,)}, ValueError, "Invalid betas: Lion has two, and not 1"),
        ({"weight_decay": -0.1}, ValueError, "Invalid weight_decay value: -0.1"),
        ({"lr": torch.zeros(2)}, ValueError, "Tensor lr must be 1-element"),
        ({"state_dtype": torch.float64}, ValueError, "state_dtype must be float32, bfloat16 or None"),
        ({"fused": True, "differentiable": True}, RuntimeError, "`fused` does not support `differentiable`"),
    ):
        with pytest.raises(error, match=text):
            metalcore.optim.Lion([p], **options)
