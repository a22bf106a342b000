"""AdamW in bfloat16: states, and stochastic rounding, which is right in the mean and depends on its seed alone."""

import copy

import pytest
import torch
from adamw_cases import random_values

import metalcore

BFLOAT = torch.bfloat16
ONE = 2**-8  # half of the distance between bfloat16 numbers just above 1; just below 1 it is the distance


def optimizer(params, seed=1, **options):
    return metalcore.optim.AdamW(params, stochastic_rounding=seed, **{"weight_decay": 0.0, "eps": 0.0, **options})


def stepped(device, start, lr, seed=1, steps=1, size=40000, **options):
    """A parameter full of one number, after steps that subtract lr."""
    p = torch.nn.Parameter(torch.full((size,), start, dtype=BFLOAT, device=device))
    p.grad = torch.ones_like(p)
    made = optimizer([p], seed, lr=lr, **options)
    for _ in range(steps):
        made.step()
    return p.detach().cpu().double(), made.state[p]


@pytest.mark.parametrize("start", (1.0, -1.0))
@pytest.mark.parametrize("state_dtype", (torch.float32, None), ids=str)
@pytest.mark.parametrize("share", (0.1, 0.5, 0.9))
def test_the_mean_is_exact(device, start, state_dtype, share):
    """An update of a share of the distance moves that share of the elements, by one distance."""
    distance = ONE if start > 0 else 2 * ONE
    values, _ = stepped(device, start, share * distance, state_dtype=state_dtype)
    assert set(values.unique().tolist()) == {start, start - distance}
    moved = float((values != start).double().mean())
    # Five standard deviations of a share of 40,000.
    assert abs(moved - share) < 5 * (share * (1 - share) / values.numel()) ** 0.5 + 1e-4


def test_small_updates_add_up(device):
    """50 updates of a tenth of a digit: rounding to nearest would lose each of them."""
    values, _ = stepped(device, 2.0, 0.1 * 2 * ONE, steps=50, size=4000)
    assert abs(float(values.mean()) - (2 - 5 * 2 * ONE)) < 0.002
    plain = torch.nn.Parameter(torch.full((4,), 2.0, dtype=BFLOAT, device=device))
    plain.grad = torch.ones_like(plain)
    made = metalcore.optim.AdamW([plain], lr=0.05 * ONE, weight_decay=0.0)
    for _ in range(50):
        made.step()
    assert torch.equal(plain.detach().cpu(), torch.full((4,), 2.0, dtype=BFLOAT))


def test_states_in_bfloat16_are_unbiased(device):
    """exp_avg_sq * 0.999 + 0.001 moves by less than half a digit from 0.5 on; its mean is right nevertheless."""
    _, state = stepped(device, 1.0, 0.0, steps=3, state_dtype=BFLOAT, betas=(0.5, 0.75))
    assert state["exp_avg"].dtype is BFLOAT
    for name, expected in (("exp_avg", 1 - 0.5**3), ("exp_avg_sq", 1 - 0.75**3)):
        assert abs(float(state[name].cpu().double().mean()) - expected) < 2e-4


def test_neighbours_are_independent(device):
    values, _ = stepped(device, 1.0, 0.5 * ONE)
    moved = (values != 1.0).double() * 2 - 1
    for lag in (1, 2, 7, 8, 9, 64, 2048):
        assert abs(float((moved[lag:] * moved[:-lag]).mean())) < 5 / moved.numel() ** 0.5


def test_the_seed_decides(device):
    """The seed and the step, and neither addresses nor what else is in the call."""
    first, _ = stepped(device, 1.0, 0.5 * ONE)
    again, _ = stepped(device, 1.0, 0.5 * ONE)
    other, _ = stepped(device, 1.0, 0.5 * ONE, seed=2)
    negative, _ = stepped(device, 1.0, 0.5 * ONE, seed=-1)
    on_device, _ = stepped(device, 1.0, 0.5 * ONE, capturable=True)
    assert torch.equal(first, again) and torch.equal(first, on_device)
    assert not torch.equal(first, other) and not torch.equal(first, negative)
    room = torch.zeros(40003, dtype=BFLOAT, device=device)
    p = torch.nn.Parameter(room[3:].fill_(1.0))  # not aligned to vectors
    p.grad = torch.ones_like(p)
    optimizer([p], lr=0.5 * ONE).step()
    assert torch.equal(p.detach().cpu().double(), first)


def test_steps_and_parameters_differ(device):
    params = [torch.nn.Parameter(torch.ones(4000, dtype=BFLOAT, device=device)) for _ in range(3)]
    for p in params:
        p.grad = torch.ones_like(p)
    made = optimizer([{"params": params[:2]}, {"params": params[2:]}], lr=0.5 * ONE)
    patterns = []
    for _ in range(2):
        for p in params:
            p.data.fill_(1.0)
        made.step()
        patterns += [tuple((p.detach() != 1).cpu().tolist()) for p in params]
    assert len(set(patterns)) == 6


def test_checkpoints_go_on(device):
    def three_steps(at):
        values = [v.to(BFLOAT) for v in random_values((300,), (5, 7))]
        params = [torch.nn.Parameter(v.to(device)) for v in values]
        made = optimizer(params, lr=0.1, state_dtype=BFLOAT)
        for step in range(3):
            if step == at:
                saved = copy.deepcopy(made.state_dict())
                made = optimizer(params, lr=0.5, state_dtype=BFLOAT)
                made.load_state_dict(saved)
            for p, grad in zip(params, random_values((300,), (5, 7), seed=step)):
                p.grad = grad.to(p)
            made.step()
        assert copy.deepcopy(made).stochastic_rounding == 1
        assert {entry.dtype for state in made.state.values() for name, entry in state.items() if name != "step"} == {
            BFLOAT
        }
        return params

    for one, other in zip(three_steps(None), three_steps(1)):
        assert torch.equal(one, other)


def test_other_dtypes_are_rounded_to_nearest(device):
    for dtype in (torch.float32, torch.float16):
        params = [torch.nn.Parameter(v.to(device, dtype)) for v in random_values((300,)) * 2]
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer(params[:1], lr=0.1).step()
        metalcore.optim.AdamW(params[1:], lr=0.1, weight_decay=0.0, eps=0.0).step()
        assert torch.equal(*params)
    inf = torch.nn.Parameter(torch.tensor([float("inf"), float("nan"), 1.0], device=device, dtype=BFLOAT))
    inf.grad = torch.zeros_like(inf)
    optimizer([inf], lr=0.1, eps=1e-8).step()
    assert inf[0].isinf() and inf[1].isnan() and inf[2] == 1


def test_on_the_cpu_too():
    """torch.ops.metalcore.adamw_ on CPU tensors: other random numbers, the same distribution."""
    p = torch.ones(40000, dtype=BFLOAT)
    lists = [[p], [torch.ones_like(p)], [torch.zeros_like(p)], [torch.zeros_like(p)], [], [torch.zeros(())]]
    hyper = dict(lr=0.25 * ONE, beta1=0.9, beta2=0.999, weight_decay=0.0, eps=0.0, maximize=False)
    torch.ops.metalcore.adamw_(*lists, **hyper, seed=5)
    assert set(p.double().unique().tolist()) == {1.0, 1.0 - ONE}
    assert abs(float((p != 1).double().mean()) - 0.25) < 0.011


def test_errors(device):
    p = torch.nn.Parameter(torch.zeros(3))
    for options, error, text in (
        ({"stochastic_rounding": True}, TypeError, "must be a seed, an integer, or None, not True"),
        ({"stochastic_rounding": 1, "differentiable": True}, ValueError, "no derivative"),
        ({"state_dtype": torch.float64}, ValueError, "state_dtype must be float32, bfloat16 or None"),
    ):
        with pytest.raises(error, match=text):
            metalcore.optim.AdamW([p], **options)
    lists = [[torch.zeros(3, device=device)] for _ in range(4)]
    hyper = dict(lr=0.1, beta1=0.9, beta2=0.999, weight_decay=0.0, eps=0.0, maximize=False)
    with pytest.raises(RuntimeError, match="a seed, for stochastic rounding, needs bfloat16 params, not float32"):
        torch.ops.metalcore.adamw_(*lists, [], [torch.zeros(())], **hyper, seed=5)
