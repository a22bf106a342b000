"""Kimi's delta attention and gated linear attention, against loops over positions in float64."""

from itertools import pairwise

import pytest
import torch
from compared import HEADS, TERMS_OF_CHUNKS, check
from references import DTYPES, assert_near, check_operator, tensor, wide

import metalcore
from metalcore.sequence._delta_formulas import rule

ops = torch.ops.metalcore
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
# Functions for many positions and for few, and whether they take a gate for each key, and betas.
FUNCTIONS = {
    "kda": (metalcore.chunk_kda, metalcore.fused_recurrent_kda, True, True),
    "gla": (metalcore.chunk_gla, metalcore.fused_recurrent_gla, True, False),
    "simple": (metalcore.chunk_simple_gla, metalcore.fused_recurrent_simple_gla, False, False),
    "delta": (metalcore.chunk_gated_delta_rule, metalcore.fused_recurrent_gated_delta_rule, False, True),
}
each_kind = pytest.mark.parametrize("kind", ["kda", "gla", "simple"])


def loop(q, k, v, g, beta, state, *, normalized=False):
    """The definition: results, and the state behind the last position."""
    if normalized:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q, k = (x.repeat_interleave(v.shape[2] // q.shape[2], 2) for x in (q * q.shape[3] ** -0.5, k))
    results = []
    for t in range(q.shape[1]):
        state = state * g[:, t].exp().view(*g[:, t].shape, *[1] * (6 - g.dim() - 1))
        update = v[:, t]
        if beta is not None:
            update = beta[:, t, :, None] * (update - (state * k[:, t, ..., None]).sum(2))
        state = state + k[:, t, ..., None] * update[:, :, None]
        results.append((state * q[:, t, ..., None]).sum(2))
    return torch.stack(results, 1), state * 1


def inputs(kind, length, heads=1, keys=8, values=6, *, batch=1, repeats=1, dtype=torch.float32, device, states=None):
    """q, k, v, g, states, and beta where there is one. Gates lie near 1 and near 0, betas near 0 and 2."""
    *_, by_key, has_beta = FUNCTIONS[kind]
    of_keys, by_head = (batch, length, heads, keys), (batch, length, heads * repeats)
    q, k, v = (tensor(*shape, dtype=dtype, device=device) for shape in (of_keys, of_keys, (*by_head, values)))
    g = -(torch.rand((*by_head, keys) if by_key else by_head) * 4).pow(3).to(device) / 6
    beta = (2 * torch.sigmoid(4 * torch.randn(by_head))).to(dtype).to(device)
    state = tensor(batch if states is None else states, heads * repeats, keys, values, device=device)
    return [q, k, v, g, state, *[beta] * has_beta]


def call(kind, q, k, v, g, state, beta=None, *, ends=None, chunked=True):
    options = {"initial_state": state, "output_final_state": True, "cu_seqlens": ends}
    if beta is None:
        return FUNCTIONS[kind][not chunked](q, k, v, g, **options)
    return FUNCTIONS[kind][not chunked](q, k, v, g, beta, **options, use_qk_l2norm_in_kernel=True)


def defined(q, k, v, g, state, beta=None, *, function=loop):
    if function is rule:
        return rule(q, k, v, g, beta, state, None, q.shape[3] ** -0.5, beta is not None)
    return loop(q, k, v, g, beta, state, normalized=beta is not None)


@pytest.mark.parametrize("kind", ["kda", "gla"])
@each_dtype
@pytest.mark.parametrize("size", HEADS)
def test_sizes(device, dtype, size, kind):
    # The normalization of one number has no gradient.
    shape = HEADS[size] | {"keys": max(HEADS[size]["keys"], 1 + (kind == "kda"))}
    tensors = inputs(kind, 5, **shape, dtype=dtype, device=device)
    check(lambda *t: call(kind, *t), defined, tensors, 32)


@pytest.mark.parametrize("chunked", [True, False])
@each_kind
@pytest.mark.parametrize("length", [1, 63, 64, 65, 200])
def test_lengths(device, kind, chunked, length):
    tensors = inputs(kind, length, 2, repeats=2, batch=2, device=device)
    check(lambda *t: call(kind, *t, chunked=chunked), defined, tensors, 4 * min(length, 64))


@each_kind
@pytest.mark.parametrize("keys", [64, 65, 129])
def test_one_position(device, kind, keys):
    """The kernel for one position takes heads whose values are whole vectors."""
    tensors = inputs(kind, 1, 2, keys, 36, repeats=2, batch=2, device=device)
    check(lambda *t: call(kind, *t, chunked=False), defined, tensors, 32)


@each_dtype
@pytest.mark.parametrize("size", ["64", "128", "129"])
def test_sizes_of_chunks(device, dtype, size):
    tensors = inputs("simple", 66, **HEADS[size], dtype=dtype, device=device)
    check(lambda *t: call("simple", *t), defined, tensors, TERMS_OF_CHUNKS[dtype])


@each_kind
def test_the_formula_is_the_loop(kind):
    """Chunks of PyTorch's ops, which are the reference of longer tests."""
    tensors = [wide(t) for t in inputs(kind, 130, 2, repeats=2, batch=2, device="cpu")]
    for actual, value in zip(defined(*tensors, function=rule), defined(*tensors)):
        torch.testing.assert_close(actual, value, rtol=1e-10, atol=1e-12)


ENDS = (0, 1, 3, 3, 70, 135)


@each_kind
def test_packed(device, kind):
    """Sequences in one entry, one of them empty: as the loop has them, and with the bits of separate calls."""
    ends = torch.tensor(ENDS, device=device)
    tensors = inputs(kind, ENDS[-1] + 2, 2, repeats=2, device=device, states=5)

    def reference(q, k, v, g, states, *beta):
        rows = q, k, v, g, *beta
        outs, finals = [], []
        for n, (begin, end) in enumerate(pairwise(ENDS)):
            of_q, of_k, of_v, of_g, *of_beta = (t[:, begin:end] for t in rows)
            if begin == end:
                finals.append(states[n : n + 1] * 1)
                continue
            o, final = defined(of_q, of_k, of_v, of_g, states[n : n + 1], *of_beta)
            outs.append(o)
            finals.append(final)
        return torch.cat([*outs, torch.zeros_like(v[:, ENDS[-1] :])], 1), torch.cat(finals)

    (o, final), gradients = check(lambda *t: call(kind, *t, ends=ends), reference, tensors, 256)
    assert not any(g[:, ENDS[-1] :].any() for g in (*gradients[:4], *gradients[5:]))
    for n in (3, 4):
        begin, end = ENDS[n : n + 2]
        q, k, v, g, states, *beta = tensors
        rows = [t[:, begin:end] for t in (q, k, v, g)]
        separate = call(kind, *rows, states[n : n + 1], *(t[:, begin:end] for t in beta))
        assert torch.equal(o[:, begin:end], separate[0]) and torch.equal(final[n], separate[1][0])


@pytest.mark.parametrize("ends", [(0, 700), (0, 30, 700)])
def test_segments(device, ends):
    """Few walks along long sequences are divided into segments. Some have no positions."""
    tensors = inputs("simple", ends[-1], keys=9, values=5, device=device, states=len(ends) - 1)

    def reference(q, k, v, g, states):
        given = torch.tensor(ends, dtype=torch.int32)
        return rule(q, k, v, g, None, states, given, q.shape[3] ** -0.5, False)

    given = torch.tensor(ends, device=device)
    check(lambda *t: call("simple", *t, ends=given), reference, tensors, 512)


@each_kind
def test_long(device, kind):
    """Gates near 1, and gates that underflow, over many chunks."""
    for low in (1e-4, 300.0):
        q, k, v, g, *rest = inputs(kind, 1025, keys=4, values=3, device=device)
        reference = lambda *t: defined(*t, function=rule)  # noqa: E731
        check(lambda *t: call(kind, *t), reference, [q, k, v, g * low, *rest], 512)


GATES = {
    "near 1": lambda x: -1e-3 * x,
    "near 0": lambda x: -8 - 8 * x,
    "both": lambda x: -(4 * x).pow(3) / 6,
    "closed": lambda x: -30 - 50 * x,
}


@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("length", [1, 63, 64, 65, 300])
@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("kind", FUNCTIONS)
def test_gradients_of_gates(device, kind, chunked, length, gates):
    """Their error is at most twice that of the definition in float32 ops, also where all that passes the gates is far
    smaller than what does not. Few gates have most of the norm then, of which one is a sum of keys times values
    products, each rounded by itself, and may by chance be no larger than one of them."""
    keys, values = 16, 12
    q, k, v, g, *rest = inputs(kind, length, 4, keys, values, repeats=2, device=device)
    tensors = [q, k, v, GATES[gates](torch.rand(g.shape)).to(device), *rest]
    grads = [tensor(*t.shape, device=device) for t in (v, rest[0])]

    def gradient(function, tensors):
        leaves = [t.detach().requires_grad_() for t in tensors]
        results = function(*leaves)
        return torch.autograd.grad(results, leaves[3], [t.to(results[0]) for t in grads])[0]

    exact = gradient(defined, [wide(t) for t in tensors])
    ours = gradient(lambda *t: call(kind, *t, chunked=chunked), tensors)
    theirs = gradient(defined, tensors)
    rounded = (keys * values) ** 0.5 * torch.finfo(torch.float32).eps
    assert (wide(ours) - exact).norm() <= 2 * (wide(theirs) - exact).norm() + rounded * exact.norm()


@each_kind
def test_closed_gates(device, kind):
    """A gate of minus infinity empties what it is for."""
    q, k, v, g, state, *beta = inputs(kind, 70, device=device)
    g[:, 66] = -torch.inf
    o, final = call(kind, q, k, v, g, state, *beta, chunked=False)
    parts = [t[:, 66:] for t in (q, k, v, g)]
    later = call(kind, *parts, torch.zeros_like(state), *(t[:, 66:] for t in beta), chunked=False)
    assert torch.equal(o[:, 66:], later[0]) and torch.equal(final, later[1])
    assert_near(call(kind, q, k, v, g, state, *beta)[0], wide(o), terms=256)
    on_cpu = [t.cpu() for t in (q, k, v, g, state, *beta)]
    assert_near(call(kind, *on_cpu)[0].to(device), wide(o), terms=256)


def test_fixed_decays(device):
    """g_gamma is a gate that all positions have, and has a gradient."""
    q, k, v, g, state = inputs("simple", 70, 2, device=device)
    gamma = torch.log1p(-(2.0 ** (-5 - torch.arange(2, device=device)))).requires_grad_()
    for gate in (None, g):
        found = metalcore.chunk_simple_gla(q, k, v, gate, gamma, None, state)[0]
        both = gamma.expand(1, 70, 2) + (0 if gate is None else gate)
        same = metalcore.chunk_simple_gla(q, k, v, both, None, None, state)[0]
        assert torch.equal(found, same)
        pair = (torch.autograd.grad(o.sum(), gamma)[0] for o in (found, same))
        assert torch.equal(*pair)
    for function in (metalcore.chunk_simple_gla, metalcore.fused_recurrent_simple_gla):
        with pytest.raises(RuntimeError, match="g_gamma must have a number for each of v's heads"):
            function(q, k, v, None, gamma[:1])


def test_without_gates(device):
    """Plain linear attention."""
    q, k, v, g, _ = inputs("gla", 70, device=device)
    wanted = metalcore.fused_recurrent_gla(q, k, v, torch.zeros_like(g))[0]
    assert torch.equal(metalcore.fused_recurrent_gla(q, k, v)[0], wanted)
    assert torch.equal(metalcore.fused_recurrent_simple_gla(q, k, v)[0], wanted)
    assert_near(metalcore.chunk_simple_gla(q, k, v)[0], wide(wanted), terms=128)


@each_kind
def test_nan_stays_in_its_sequence(device, kind):
    tensors = inputs(kind, 135, device=device, states=2)
    tensors[2][0, 4, 0, 0] = torch.nan
    leaves = [t.requires_grad_() for t in tensors]
    o, final = call(kind, *leaves, ends=torch.tensor([0, 5, 135], device=device))
    assert o[:, 4, 0, 0].isnan() and not o[:, 5:].isnan().any() and not final[1].isnan().any()
    q, k, v, g, _, *beta = torch.autograd.grad((o.sum(), final.sum()), leaves)
    assert not any(gradient[:, 5:].isnan().any() for gradient in (q, k, v, g, *beta))


@pytest.mark.parametrize("function", [metalcore.chunk_simple_gla, metalcore.chunk_gated_delta_rule])
def test_nan_gate(device, function):
    """A gate that is NaN spoils what comes after it, also by chunks."""
    q, k, v, g, _ = inputs("simple", 70, device=device)
    g[:, 66] = torch.nan
    o, _ = function(q, k / 4, v, g)
    assert o[:, 66:].isnan().all() and not o[:, :64].isnan().any()


@each_kind
def test_the_same_bits(device, kind):
    tensors = [t.requires_grad_() for t in inputs(kind, 100, 2, 40, 70, repeats=2, device=device)]
    runs = []
    for _ in range(2):
        results = call(kind, *tensors)
        runs.append((*results, *torch.autograd.grad([t.square().sum() for t in results], tensors)))
    assert all(map(torch.equal, *runs))


@each_kind
def test_layouts(device, kind):
    """Views with an offset, elements that are not side by side, and gates that are broadcast."""
    tensors = inputs(kind, 9, 2, batch=2, device=device)
    views = [t.mT.contiguous().mT.requires_grad_() for t in tensors]
    views[3] = tensors[3][:, :1].expand_as(tensors[3]).requires_grad_()
    found, same = call(kind, *views), call(kind, *(t.contiguous() for t in views))
    grads = [tensor(*t.shape, device=device).mT.contiguous().mT for t in found]
    pairs = zip(torch.autograd.grad(found, views, grads), torch.autograd.grad(same, views, grads))
    assert all(map(torch.equal, found, same)) and all(torch.equal(*pair) for pair in pairs)


@each_kind
def test_double_backward(device, kind):
    def second(tensors):
        *tensors, grad = (t.requires_grad_() for t in tensors)
        first = torch.autograd.grad(call(kind, *tensors)[0], tensors, grad, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), [*tensors, grad])

    made = [*inputs(kind, 7, 2, 4, 3, device=device), tensor(1, 7, 2, 3, device=device)]
    for found, wanted in zip(second(made), second([wide(t) for t in made])):
        assert_near(found, wanted, terms=128)


def test_operators(device):
    q, k, v, g, state, beta = inputs("kda", 6, 2, repeats=2, device=device)
    leaves = [t.clone().requires_grad_() for t in (q, k, v, g, beta, state)]
    check_operator(ops.gated_delta_rule, *leaves, None, None, 0.5, True, True, True)
    check_operator(ops.gated_delta_rule, *leaves[:4], None, leaves[5], None, None, 0.5, False, True, False)
    grads = torch.ones_like(v), torch.ones_like(state)
    check_operator(ops.gated_delta_rule_backward, *grads, q, k, v, g, None, state, None, None, 0.5, True, True, False)
    check_operator(
        ops.gated_delta_rule_backward, *grads, q, k, v, None, None, None, None, None, 0.5, False, False, False
    )


def test_errors(device):
    for where in (device, "cpu"):
        q, k, v, g, _, beta = (t.to(where) for t in inputs("kda", 6, 2, batch=2, device=device))
        for message, attempt in {
            r"chunk_kda: g must be \[batch, length, value heads, keys\], not \[2, 6, 2\]": lambda: metalcore.chunk_kda(
                q, k, v, g[..., 0], beta
            ),
            r"chunk_simple_gla: g must be \[batch, length, value heads\], not": lambda: metalcore.chunk_simple_gla(
                q, k, v, g
            ),
            "g must be float32 of the shape .2, 6, 2, 8.": lambda: metalcore.chunk_gla(q, k, v, g[..., 1:]),
        }.items():
            with pytest.raises(RuntimeError, match=message):
                attempt()
    with pytest.raises(TypeError, match="chunk_kda: beta must be a tensor, not NoneType"):
        metalcore.chunk_kda(q, k, v, g, None)
    with pytest.raises(RuntimeError, match="chunk_simple_gla: g_gamma must be on cpu as v, not on meta"):
        metalcore.chunk_simple_gla(q, k, v, g_gamma=torch.ones(v.shape[2], device="meta"))
    with pytest.raises(TypeError, match="chunk_gla: g must be a tensor, not NoneType"):
        metalcore.chunk_gla(q, k, v, None)
