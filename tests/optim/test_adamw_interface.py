"""AdamW as a torch.optim.Optimizer: arguments, errors, groups, hooks, schedulers, and cases that go to PyTorch."""

import inspect
import warnings

import numpy
import pytest
import torch
from adamw_cases import Pair, assert_steps_close, random_values

import metalcore


def parameter(device, *shape):
    p = torch.nn.Parameter(torch.ones(shape, device=device))
    p.grad = torch.ones_like(p)
    return p


def message(make):
    with pytest.raises((ValueError, RuntimeError, TypeError)) as raised:
        make()
    return type(raised.value), str(raised.value)


def test_signature_is_that_of_torch():
    assert issubclass(metalcore.optim.AdamW, torch.optim.AdamW)
    ours = inspect.signature(metalcore.optim.AdamW)
    own = [ours.parameters[name] for name in ("state_dtype", "stochastic_rounding")]
    assert {each.kind for each in own} == {inspect.Parameter.KEYWORD_ONLY} and [each.default for each in own] == [
        torch.float32,
        None,
    ]
    torchs = ours.replace(parameters=[each for each in ours.parameters.values() if each not in own])
    assert torchs == inspect.signature(torch.optim.AdamW)


@pytest.mark.parametrize(
    "arguments",
    [
        {"lr": -1.0},
        {"eps": -1e-8},
        {"betas": (1.0, 0.9)},
        {"betas": (0.9, -0.1)},
        {"weight_decay": -1.0},
        {"lr": float("nan")},
        {"lr": torch.tensor([1.0, 2.0])},
        {"lr": torch.tensor(1e-3), "foreach": True},
        {"betas": (0.9, torch.tensor(0.99))},
        {"fused": True, "foreach": True},
        {"fused": True, "differentiable": True},
    ],
    ids=str,
)
def test_invalid_arguments_raise_what_torch_raises(device, arguments):
    ours = message(lambda: metalcore.optim.AdamW([parameter(device, 2)], **arguments))
    theirs = message(lambda: torch.optim.AdamW([parameter("cpu", 2)], **arguments))
    assert ours == theirs


def test_invalid_parameters_raise_what_torch_raises(device):
    for params in ([], [1.0], torch.ones(3), [torch.ones(2, requires_grad=True) * 2]):
        assert message(lambda: metalcore.optim.AdamW(params)) == message(lambda: torch.optim.AdamW(params))
    p = parameter(device, 2)
    with pytest.raises(ValueError, match="more than one parameter group"):
        metalcore.optim.AdamW([{"params": [p]}, {"params": [p]}])


def test_sparse_gradient_is_refused_before_anything_changes(device):
    dense, sparse = parameter(device, 3), parameter("cpu", 3)
    sparse.grad = torch.sparse_coo_tensor([[0]], [1.0], (3,), check_invariants=True)
    optimizer = metalcore.optim.AdamW([dense, sparse])
    with pytest.raises(RuntimeError, match="does not support sparse gradients"):
        optimizer.step()
    assert torch.equal(dense.detach().cpu(), torch.ones(3)) and dense not in optimizer.state


def test_groups_have_their_own_options(device):
    values = random_values((40,), (3, 5), (7,), (11,))
    options = [
        {"lr": 1e-2, "weight_decay": 0.0},
        {"betas": (0.8, 0.95), "amsgrad": True},
        {"eps": 1e-3, "maximize": True},
        {"lr": 5e-3, "capturable": True},
    ]
    pair = Pair(values, device)
    pair.optimizer = metalcore.optim.AdamW([{"params": [p], **o} for p, o in zip(pair.params, options)], lr=1e-3)
    pair.reference = torch.optim.AdamW(
        [{"params": [e], **o, "capturable": False} for e, o in zip(pair.expected, options)], lr=1e-3
    )
    pair.steps(5)
    pair.assert_equal(steps=5)


def test_add_param_group(device):
    pair = Pair(random_values((6,), (4, 4)), device, lr=1e-2)
    late, expected = (torch.nn.Parameter(torch.full((5,), 2.0, device=d)) for d in (device, "cpu"))
    pair.steps(2)
    pair.optimizer.add_param_group({"params": late, "lr": 1e-1})
    pair.reference.add_param_group({"params": expected, "lr": 1e-1})
    pair.params.append(late)
    pair.expected.append(expected)
    pair.steps(2)
    pair.assert_equal(steps=4)
    assert float(pair.optimizer.state[late]["step"]) == 2


def test_named_parameters(device):
    model = torch.nn.Linear(3, 2).to(device)
    optimizer = metalcore.optim.AdamW(model.named_parameters())
    assert optimizer.state_dict()["param_groups"][0]["param_names"] == ["weight", "bias"]


def test_parameters_take_part_when_they_have_a_gradient(device):
    first, second = parameter(device, 3), parameter(device, 4)
    second.grad = None
    optimizer = metalcore.optim.AdamW([first, second])
    optimizer.step()
    assert second not in optimizer.state and torch.equal(second.detach().cpu(), torch.ones(4))
    second.grad = torch.ones_like(second)
    optimizer.step()
    assert float(optimizer.state[first]["step"]) == 2 and float(optimizer.state[second]["step"]) == 1


def test_zero_grad(device):
    p = parameter(device, 3)
    optimizer = metalcore.optim.AdamW([p])
    optimizer.zero_grad(set_to_none=False)
    assert torch.equal(p.grad.cpu(), torch.zeros(3))
    optimizer.zero_grad()
    assert p.grad is None
    optimizer.step()
    assert not optimizer.state


def test_closure(device):
    p = parameter(device, 3)
    optimizer = metalcore.optim.AdamW([p], lr=0.1)

    def closure():
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = (p * p).sum()
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(5)]
    assert losses == sorted(losses, reverse=True) and losses[0] == 3.0
    with torch.no_grad():
        optimizer.step(closure)


def test_hooks(device):
    p = parameter(device, 3)
    optimizer = metalcore.optim.AdamW([p])
    calls = []
    optimizer.register_step_pre_hook(lambda opt, args, kwargs: calls.append(("pre", p.detach().cpu().clone())))
    optimizer.register_step_post_hook(lambda opt, args, kwargs: calls.append(("post", p.detach().cpu().clone())))
    optimizer.step()
    assert [name for name, _ in calls] == ["pre", "post"]
    assert torch.equal(calls[0][1], torch.ones(3)) and not torch.equal(calls[1][1], torch.ones(3))


@pytest.mark.parametrize(
    "make",
    [
        lambda opt: torch.optim.lr_scheduler.StepLR(opt, 2, 0.5),
        lambda opt: torch.optim.lr_scheduler.CosineAnnealingLR(opt, 6),
        lambda opt: torch.optim.lr_scheduler.OneCycleLR(opt, 1e-1, total_steps=7),  # changes betas as well
    ],
    ids=["step", "cosine", "one cycle"],
)
@pytest.mark.parametrize("ours", [{}, {"capturable": True}])
def test_schedulers(device, make, ours):
    pair = Pair(random_values((30,)), device, ours, lr=1e-2)
    schedulers = make(pair.optimizer), make(pair.reference)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(6):
            pair.steps(1)
            for scheduler in schedulers:
                scheduler.step()
    for p, e in zip(pair.params, pair.expected):
        assert_steps_close(p, e, 6, 1e-1)


def test_scheduler_with_a_learning_rate_tensor(device):
    pair = Pair(random_values((30,)), device, {"lr": torch.tensor(1e-2, device=device), "capturable": True}, lr=1e-2)
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in (pair.optimizer, pair.reference)]
    for _ in range(4):
        pair.steps(1)
        for scheduler in schedulers:
            scheduler.step()
    pair.assert_equal(steps=4)
    assert pair.optimizer.param_groups[0]["lr"].device.type == torch.device(device).type


def test_betas_as_tensors_and_numpy_scalars(device):
    pair = Pair(
        random_values((9,)),
        device,
        {"betas": (torch.tensor(0.5), torch.tensor(0.75)), "lr": numpy.float64(1e-2)},
        lr=1e-2,
        betas=(0.5, 0.75),
    )
    pair.steps(3)
    pair.assert_equal(steps=3)


@pytest.mark.parametrize("foreach", [True, False, None])
def test_foreach_makes_no_difference_to_the_kernel(device, foreach):
    pair = Pair(random_values((9,), (3, 3)), device, {"foreach": foreach}, lr=1e-2)
    pair.steps(3)
    pair.assert_equal(steps=3)


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}, {"amsgrad": True}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_cpu_parameters_are_torchs_bit_for_bit(options, dtype):
    if dtype.is_complex and options.get("fused"):
        options = {}
    params = [torch.nn.Parameter(v.to(dtype)) for v in random_values((5, 3), (7,))]
    expected = [torch.nn.Parameter(p.detach().clone()) for p in params]
    optimizer, reference = metalcore.optim.AdamW(params, **options), torch.optim.AdamW(expected, **options)
    for step in range(3):
        for p, e, g in zip(params, expected, random_values((5, 3), (7,), seed=step)):
            p.grad, e.grad = g.to(dtype), g.to(dtype)
        optimizer.step()
        reference.step()
    for p, e in zip(params, expected):
        assert torch.equal(p, e)
        assert all(torch.equal(optimizer.state[p][name], value) for name, value in reference.state[e].items())
        assert optimizer.state[p]["exp_avg"].dtype == dtype


def test_differentiable_step_has_gradients(device):
    def updated(module, at):
        p = torch.ones(4, device=at, requires_grad=True)
        lr = torch.tensor(0.5, device=at, requires_grad=True)
        q = p.clone()
        q.grad = torch.full((4,), 2.0, device=at, requires_grad=True)
        module.AdamW([q], lr=lr, differentiable=True).step()
        q.sum().backward()
        return q.detach().cpu(), lr.grad.cpu(), p.grad.cpu()

    for ours, theirs in zip(updated(metalcore.optim, device), updated(torch.optim, "cpu")):
        torch.testing.assert_close(ours, theirs)


def test_autograd_notices_the_change(device):
    p = parameter(device, 3)
    optimizer = metalcore.optim.AdamW([p])
    loss = (p * p).sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_gradient_of_another_dtype_goes_to_torch(device):
    def step(module):
        p = torch.nn.Parameter(torch.ones(3, device=device))
        p.grad_dtype = None
        p.grad = torch.ones(3, device=device, dtype=torch.bfloat16)
        module.AdamW([p], foreach=False).step()

    assert message(lambda: step(metalcore.optim)) == message(lambda: step(torch.optim))


def test_model_converted_after_steps(device):
    """The moments stay float32 when the parameters become bfloat16, and the step goes on."""
    model = torch.nn.Linear(4, 4).to(device)
    optimizer = metalcore.optim.AdamW(model.parameters(), lr=1e-2)
    for dtype in (torch.float32, torch.bfloat16):
        model.to(dtype)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
    for p in model.parameters():
        assert optimizer.state[p]["exp_avg"].dtype == torch.float32 and float(optimizer.state[p]["step"]) == 2


def test_compiled_step(device):
    pair = Pair(random_values((9,), (3, 3)), device, lr=1e-2)
    step = torch.compile(pair.optimizer.step, backend="eager")
    for _ in range(3):
        pair.set_grads()
        step()
        pair.reference.step()
    pair.assert_equal(steps=3)
