"""Gated delta rules by units that multiply tensors, against float64 and the kernels of other GPUs."""

import pytest
import torch
from references import tensor, wide
from rows import tuned

import metalcore
from metalcore.recording import record
from metalcore.sequence._delta_formulas import rule

pytestmark = pytest.mark.only_on("simulator", "cuda")
SIZE, WALKS = 128, {"gated_delta_rule_inverse_parts_bfloat", "gated_delta_rule_walk_unit_bfloat"}


def inputs(device, length, *, batch=1, repeats=1, size=SIZE, dtype=torch.bfloat16, states=None):
    """q, k, v, g, beta and states, with gates near 1 and near 0 and betas near 0 and 2."""
    heads = batch, length, repeats
    q, k = (tensor(batch, length, 1, size, dtype=dtype, device=device) for _ in range(2))
    v = tensor(*heads, size, dtype=dtype, device=device)
    g = -(torch.rand(heads) * 4).pow(3).to(device) / 6
    beta = (2 * torch.sigmoid(4 * torch.randn(heads))).to(dtype).to(device)
    return [q, k, v, g, beta, tensor(states or batch, repeats, size, size, device=device)]


def call(q, k, v, g, beta, state, ends=None, normalized=True):
    return metalcore.chunk_gated_delta_rule(q, k, v, g, beta, None, state, True, normalized, ends)


def errors(found, wanted):
    return [(wide(a) - b).norm() / b.norm() for a, b in zip(found, wanted, strict=True)]


@pytest.mark.parametrize(
    ("length", "repeats", "normalized", "closed"),
    [(64, 3, True, False), (65, 1, False, False), (130, 2, True, False), (130, 2, True, True)],
)
def test_lengths(device, length, repeats, normalized, closed):
    """Chunks that are whole and that are not, heads of values that share keys or do not, and gates that let almost
    nothing through. The error is that of the kernels of other GPUs."""
    tensors = inputs(device, length, batch=2, repeats=repeats)
    if closed:
        tensors[3] -= 30
    if not normalized:
        tensors[:2] = (t / SIZE**0.5 for t in tensors[:2])

    def reference(*tensors):
        return rule(*tensors, None, SIZE**-0.5, normalized)

    leaves = [wide(t).requires_grad_() for t in tensors]
    exact = reference(*leaves)
    grads = [tensor(*t.shape, dtype=d) for t, d in zip(exact, (torch.bfloat16, torch.float32))]
    wanted = [*exact, *torch.autograd.grad(exact, leaves, [wide(g) for g in grads])]
    found = {}
    for family in ("hopper", "baseline"):
        with tuned(family):
            leaves = [t.detach().requires_grad_() for t in tensors]
            results = call(*leaves, normalized=normalized)
            gradients = torch.autograd.grad(results, leaves, [g.to(device) for g in grads])
            found[family] = errors([t.detach() for t in (*results, *gradients)], [t.detach() for t in wanted])
    for ours, theirs in zip(found["hopper"], found["baseline"]):
        assert ours <= 1.25 * theirs + 2e-7


def test_packed(device):
    """Sequences of one entry, of which one is empty, are as they are by themselves."""
    ends = (0, 1, 66, 66, 130)
    with tuned("hopper"):
        *rows, states = inputs(device, ends[-1] + 1, repeats=2, states=4)
        leaves = [t.requires_grad_() for t in (*rows, states)]
        o, final = call(*leaves, torch.tensor(ends, device=device))
        gradients = torch.autograd.grad((o.float().square().sum(), final.square().sum()), leaves)
        assert not o[:, ends[-1] :].any() and not gradients[2][:, ends[-1] :].any()
        part = slice(66, 130)
        separate = [t[:, part].detach().requires_grad_() for t in rows] + [states[3:].detach().requires_grad_()]
        o_of_part, final_of_part = call(*separate)
        assert torch.equal(o[:, part], o_of_part) and torch.equal(final[3:], final_of_part)
        of_part = torch.autograd.grad((o_of_part.float().square().sum(), final_of_part.square().sum()), separate)
        assert all(torch.equal(a[:, part], b) for a, b in zip(gradients[:5], of_part))
        assert torch.equal(gradients[5][3:], of_part[5])


def test_plans(device):
    """Other sizes, dtypes, layouts and families have other kernels."""

    def kernels(q, k, v, g, beta, state):
        return set(record(call, q, k, v, g, beta, state)[1].kernels)

    tensors = inputs(device, 64)
    with tuned("hopper"):
        assert kernels(*tensors) == WALKS
        assert not kernels(*inputs(device, 64, size=120)) & WALKS
        assert not kernels(*inputs(device, 64, dtype=torch.float16)) & WALKS
        shifted = torch.empty(tensors[0].numel() + 1, dtype=torch.bfloat16, device=device)[1:].view_as(tensors[0])
        assert not kernels(*tensors[:2], shifted, *tensors[3:]) & WALKS
    for family in ("baseline", "apple10"):
        with tuned(family):
            assert not kernels(*tensors) & WALKS
