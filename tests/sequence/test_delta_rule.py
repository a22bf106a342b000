"""chunk_gated_delta_rule and fused_recurrent_gated_delta_rule, against loops over positions in float64."""

from itertools import pairwise

import pytest
import torch
from compared import HEADS, check
from references import DTYPES, assert_near, check_operator, tensor, wide

import metalcore
from metalcore.sequence._delta_formulas import rule

ops = torch.ops.metalcore
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
each_function = pytest.mark.parametrize(
    "function", [metalcore.chunk_gated_delta_rule, metalcore.fused_recurrent_gated_delta_rule]
)


def loop(q, k, v, g, beta, state, *, normalized=True):
    """The definition: results, and the state behind the last position."""
    if normalized:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q, k = (x.repeat_interleave(v.shape[2] // q.shape[2], 2) for x in (q * q.shape[3] ** -0.5, k))
    results = []
    for t in range(q.shape[1]):
        decay = 1.0 if g is None else g[:, t, :, None, None].exp()
        state = state * decay
        error = v[:, t] - (state * k[:, t, ..., None]).sum(2)
        state = state + k[:, t, ..., None] * (beta[:, t, :, None] * error)[:, :, None]
        results.append((state * q[:, t, ..., None]).sum(2))
    return torch.stack(results, 1) if results else v * 1, state * 1


def inputs(length, heads=1, keys=8, values=6, *, batch=1, repeats=1, dtype=torch.float32, device="cpu", states=None):
    """q, k, v, g, beta and states. Gates lie near 1 and near 0, betas near 0 and 2."""
    of_keys, by_head = (batch, length, heads, keys), (batch, length, heads * repeats)
    q, k, v = (tensor(*shape, dtype=dtype, device=device) for shape in (of_keys, of_keys, (*by_head, values)))
    g = -(torch.rand(by_head) * 4).pow(3).to(device) / 6
    beta = (2 * torch.sigmoid(4 * torch.randn(by_head))).to(dtype).to(device)
    state = tensor(batch if states is None else states, heads * repeats, keys, values, device=device)
    return [q, k, v, g, beta, state]


def call(function, q, k, v, g, beta, state, ends=None, normalized=True):
    return function(q, k, v, g, beta, None, state, True, normalized, ends)


@each_dtype
@pytest.mark.parametrize("size", HEADS)
def test_sizes(device, dtype, size):
    tensors = inputs(5, **HEADS[size], dtype=dtype, device=device)
    normalized = size != "one"  # the normalization of one number has no gradient
    check(
        lambda *t: call(metalcore.chunk_gated_delta_rule, *t, None, normalized),
        lambda *t: loop(*t, normalized=normalized),
        tensors,
        32,
    )


@each_function
@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 200])
def test_lengths(device, function, length):
    tensors = inputs(length, 2, repeats=2, batch=2, device=device)
    check(lambda *t: call(function, *t), loop, tensors, 4 * min(length, 64))


@each_dtype
@pytest.mark.parametrize("keys, values", [(2, 4), (64, 36), (65, 64), (128, 68), (129, 16), (256, 20)])
def test_one_position(device, dtype, keys, values):
    """The kernel for one position takes heads whose values are whole vectors, with a state and without one."""
    q, k, v, g, beta, state = inputs(1, 2, keys, values, batch=2, repeats=2, dtype=dtype, device=device)
    function = metalcore.fused_recurrent_gated_delta_rule
    check(lambda *t: call(function, *t), loop, (q, k, v, g, beta, state), 32)
    none = torch.zeros_like(state)
    check(
        lambda q, k, v, beta: function(q, k, v, None, beta, None, None, True, True),
        lambda q, k, v, beta: loop(q, k, v, None, beta, wide(none)),
        (q, k, v, beta),
        32,
    )


def test_without_gate_and_state(device):
    q, k, v, _, beta, state = inputs(70, 2, device=device)
    k = k / 4

    def ours(q, k, v, beta):
        return metalcore.chunk_gated_delta_rule(q, k, v, None, beta, output_final_state=True)

    def reference(q, k, v, beta):
        return loop(q, k, v, None, beta, torch.zeros_like(wide(state)), normalized=False)

    check(ours, reference, (q, k, v, beta / 2), 256)
    o, final = metalcore.chunk_gated_delta_rule(q, k, v)
    assert final is None
    assert torch.equal(o, metalcore.chunk_gated_delta_rule(q, k, v, beta=torch.ones_like(beta), scale=8**-0.5)[0])


def test_the_formula_is_the_loop():
    """Chunks of PyTorch's ops, which are the reference of longer tests."""
    tensors = [wide(t) for t in inputs(130, 2, repeats=2, batch=2)]
    for actual, value in zip(rule(*tensors, None, 8**-0.5, True), loop(*tensors)):
        torch.testing.assert_close(actual, value, rtol=1e-10, atol=1e-12)


ENDS = (0, 1, 3, 3, 70, 135)


@each_function
@each_dtype
def test_packed(device, dtype, function):
    """Sequences in one entry, one of them empty: as the loop has them, and with the bits of separate calls of the same
    kernels. Positions behind them have zeros."""
    ends = torch.tensor(ENDS, device=device)
    tensors = inputs(ENDS[-1] + 2, 2, repeats=2, dtype=dtype, device=device, states=5)

    def reference(*tensors):
        *rows, states = tensors
        pairs = zip(ENDS, ENDS[1:], states)
        parts = [loop(*(t[:, begin:end] for t in rows), state[None]) for begin, end, state in pairs]
        rest = torch.zeros_like(rows[2][:, ENDS[-1] :])
        return torch.cat([*(o for o, _ in parts), rest], 1), torch.cat([s for _, s in parts])

    (o, final), gradients = check(lambda *t: call(function, *t, ends), reference, tensors, 256)
    assert not any(g[:, ENDS[-1] :].any() for g in gradients[:5])
    for n, (begin, end) in enumerate(pairwise(ENDS)):
        if function is metalcore.chunk_gated_delta_rule and end - begin < 64:
            continue
        *rows, states = tensors
        separate = call(function, *(t[:, begin:end] for t in rows), states[n : n + 1])
        assert torch.equal(o[:, begin:end], separate[0])
        assert torch.equal(final[n], separate[1][0])


def test_long(device):
    """Gates near 1, and gates that underflow, over many chunks."""
    for low in (1e-4, 300.0):
        q, k, v, g, beta, state = inputs(4097, keys=4, values=3, device=device)
        tensors = q, k, v, g * low, beta / 2, state
        check(lambda *t: call(metalcore.chunk_gated_delta_rule, *t), lambda *t: rule(*t, None, 0.5, True), tensors, 512)


def test_closed_gates(device):
    """A gate of minus infinity empties the state."""
    q, k, v, g, beta, state = inputs(6, device=device)
    g[:, 3] = -torch.inf
    o, final = call(metalcore.chunk_gated_delta_rule, q, k, v, g, beta, state)
    parts = (t[:, 3:] for t in (q, k, v, torch.zeros_like(g).where(g == -torch.inf, g), beta))
    later = call(metalcore.chunk_gated_delta_rule, *parts, torch.zeros_like(state))
    assert torch.equal(o[:, 3:], later[0]) and torch.equal(final, later[1])


def test_layouts(device):
    """Views of one projection, an offset, and elements that are not side by side."""
    one = tensor(2, 9, 3 * 12 + 1, device=device)
    q, k, v = one[..., 1:].unflatten(-1, (3, 2, 6)).unbind(2)
    _, _, _, g, beta, state = inputs(9, 2, 6, 6, batch=2, device=device)
    for views in (
        (q, k, v),
        (q.transpose(0, 1).contiguous().transpose(0, 1), k.mT.contiguous().mT, v[:, :1].expand_as(v)),
    ):
        tensors = *views, g.mT.contiguous().mT, beta[:, :1].expand_as(beta), state.mT.contiguous().mT
        found = call(metalcore.chunk_gated_delta_rule, *(t.requires_grad_() for t in tensors))
        same = call(metalcore.chunk_gated_delta_rule, *(t.contiguous() for t in tensors))
        grads = [tensor(*t.shape, device=device).mT.contiguous().mT for t in found]
        pairs = zip(torch.autograd.grad(found, tensors, grads), torch.autograd.grad(same, tensors, grads))
        assert all(map(torch.equal, found, same)) and all(torch.equal(*pair) for pair in pairs)


@each_function
@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (2, 0, 3, 4), (2, 3, 0, 4), (2, 3, 4, 0)])
def test_empty(device, function, shape):
    q, v = tensor(*shape, device=device), tensor(*shape[:3], 5, device=device)
    g, beta = (tensor(*shape[:3], device=device) for _ in range(2))
    state = tensor(shape[0], shape[2], shape[3], 5, device=device)
    leaves = [t.requires_grad_() for t in (q, q.clone(), v, g, beta, state)]
    o, final = call(function, *leaves)
    assert o.shape == v.shape and not o.any() and torch.equal(final, state)
    gradients = torch.autograd.grad((o.sum(), final.sum()), leaves)
    assert not any(each.any() for each in gradients[:5])
    assert torch.equal(gradients[5], torch.ones_like(state))


def test_no_sequences(device):
    q, k, v, g, beta, _ = inputs(4, device=device)
    o, final = call(metalcore.chunk_gated_delta_rule, q, k, v, g, beta, None, torch.zeros(1, device=device).int())
    assert not o.any() and final.shape == (0, 1, 8, 6)


def test_states_continue_a_sequence(device):
    tensors = [t.requires_grad_() for t in inputs(70, 2, device=device)]
    *rows, state = tensors
    whole = call(metalcore.chunk_gated_delta_rule, *tensors)
    parts = []
    for piece in zip(*(t.split((64, 1, 5), 1) for t in rows)):
        part, state = call(metalcore.fused_recurrent_gated_delta_rule, *piece, state)
        parts.append(part)
    assert_near(torch.cat(parts, 1).detach(), wide(whole[0]), terms=32)
    assert_near(state.detach(), wide(whole[1]), terms=32)
    wanted = torch.autograd.grad((whole[0].square().sum(), whole[1].square().sum()), tensors)
    found = torch.autograd.grad((torch.cat(parts, 1).square().sum(), state.square().sum()), tensors)
    for actual, value in zip(found, wanted):
        assert_near(actual, wide(value), terms=64)


@each_function
def test_nan_stays_in_its_sequence(device, function):
    q, k, v, g, beta, state = inputs(70, device=device, states=2)
    v[0, 4, 0, 0] = torch.nan
    leaves = [t.requires_grad_() for t in (q, k, v, g, beta, state)]
    o, final = call(function, *leaves, torch.tensor([0, 5, 70], device=device))
    if function is metalcore.fused_recurrent_gated_delta_rule:
        assert o.isnan().nonzero().tolist() == [[0, 4, 0, 0]]
    assert o[:, 4, 0, 0].isnan() and not o[:, 5:].isnan().any()
    assert not final[1].isnan().any()
    for gradient in torch.autograd.grad((o.sum(), final.sum()), leaves)[:5]:
        assert not gradient[:, 5:].isnan().any()


def test_the_same_bits(device):
    tensors = [t.requires_grad_() for t in inputs(100, 2, 40, 70, repeats=2, device=device)]
    runs = []
    for _ in range(2):
        results = call(metalcore.chunk_gated_delta_rule, *tensors)
        runs.append((*results, *torch.autograd.grad([t.square().sum() for t in results], tensors)))
    assert all(map(torch.equal, *runs))


@each_dtype
@pytest.mark.parametrize("size", ["64", "129"])
def test_sizes_of_chunks(device, dtype, size):
    tensors = inputs(66, **HEADS[size], dtype=dtype, device=device)
    check(lambda *t: call(metalcore.chunk_gated_delta_rule, *t), loop, tensors, 256)


@each_dtype
def test_error_beside_transformers(device, dtype):
    """The error is at most twice that of transformers' ops, in results and gradients, or the last bit of the dtype."""
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    tensors = inputs(150, 2, 32, 32, repeats=2, dtype=dtype, device=device)[:5]
    grad = tensor(1, 150, 4, 32, dtype=dtype, device=device)

    def errors(function, leaves):
        o = function(*leaves)
        return (o, *torch.autograd.grad(o, leaves, grad.to(o)))

    exact = errors(lambda *t: rule(*t, None, None, 32**-0.5, True)[0], [wide(t).requires_grad_() for t in tensors])

    def transformers_rule(q, k, *rest, **options):
        q, k = (x.repeat_interleave(2, 2) for x in (q, k))  # some versions take as many heads of q and k as of v
        return modeling.torch_chunk_gated_delta_rule.__wrapped__(q, k, *rest, **options)

    ours, theirs = (
        errors(lambda *t: function(*t, use_qk_l2norm_in_kernel=True)[0], [t.detach().requires_grad_() for t in tensors])
        for function in (metalcore.chunk_gated_delta_rule, transformers_rule)
    )
    for mine, other, value in zip(ours, theirs, exact):
        bound = 2 * (wide(other) - value).norm() + torch.finfo(mine.dtype).eps / 4 * value.norm()
        assert (wide(mine) - value).norm() <= bound


@pytest.mark.parametrize("packed", [False, True])
def test_double_backward(device, packed):
    def second(tensors, where):
        *tensors, grad = (t.requires_grad_() for t in tensors)
        ends = torch.tensor([0, 2, 7], device=where) if packed else None
        results = call(metalcore.chunk_gated_delta_rule, *tensors, ends)
        first = torch.autograd.grad(results[0], tensors, grad, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), [*tensors, grad])

    made = [*inputs(7, 2, 4, 3, device=device, states=2 if packed else 1), tensor(1, 7, 2, 3, device=device)]
    for found, wanted in zip(second(made, device), second([wide(t) for t in made], "cpu")):
        assert_near(found, wanted, terms=128)


def test_gradcheck_of_the_formula():
    tensors = [wide(t).requires_grad_() for t in inputs(5, 1, 3, 2, repeats=2, states=2)]
    ends = torch.tensor([0, 2, 5])
    assert torch.autograd.gradcheck(lambda *t: call(metalcore.chunk_gated_delta_rule, *t, ends), tensors)


def test_large_heads(device):
    """PyTorch's ops take heads of more than 256."""
    check(lambda *t: call(metalcore.chunk_gated_delta_rule, *t), loop, inputs(3, 1, 260, 3, device=device), 32)


def test_operators(device):
    q, k, v, g, beta, state = inputs(6, 2, repeats=2, device=device)
    leaves = [t.clone().requires_grad_() for t in (q, k, v, g, beta, state)]
    skip = torch.rand(v.shape[2:], device=device).requires_grad_()
    ends = torch.tensor([0, 6]).int().to(device)
    check_operator(ops.gated_delta_rule, *leaves, None, None, 0.5, True, True, True)
    check_operator(ops.gated_delta_rule, *leaves, None, skip, 0.5, False, False, False)
    check_operator(ops.gated_delta_rule, q, k, v, None, beta, None, ends, None, 0.5, False, False, True)
    grads = torch.ones_like(v.detach()), torch.ones_like(state.detach())
    check_operator(ops.gated_delta_rule_backward, *grads, q, k, v, g, beta, state, None, None, 0.5, True, True, True)
    rest = None, beta, None, None, skip.detach(), 0.5, False, False, False
    check_operator(ops.gated_delta_rule_backward, *grads, q, k, v, *rest)


def test_errors(device):
    function = metalcore.chunk_gated_delta_rule
    for where in (device, "cpu"):
        q, k, v, g, beta, state = (t.to(where) for t in inputs(6, 2, batch=2))
        for message, attempt in {
            "q must be .batch, length, heads, up to 256., not .6, 2, 8.": lambda: function(q[0], k, v),
            "k must have": lambda: function(q, k[:, :3], v),
            "v must be .2, 6, a multiple of 2, up to 256.": lambda: function(q, k, v[:, :, :1]),
            "g must be float32 of the shape .2, 6, 2.": lambda: function(q, k, v, g[:1]),
            "beta must be float32 of the shape .2, 6, 2.": lambda: function(q, k, v, g, beta[..., :1]),
            "initial_state must be float32 of the shape .2, 2, 8, 6.": lambda: function(
                q, k, v, g, beta, None, state[:1]
            ),
            "q have one batch entry": lambda: function(q, k, v, cu_seqlens=torch.tensor([0, 6], device=where)),
        }.items():
            with pytest.raises(RuntimeError, match=message):
                attempt()
    with pytest.raises(TypeError, match="chunk_gated_delta_rule: k must be a tensor, not NoneType"):
        function(q, None, v)
    with pytest.raises(TypeError, match="chunk_gated_delta_rule: beta must have floating-point numbers, not int32"):
        function(q, k, v, g, beta.int())
    with pytest.raises(TypeError, match="chunk_gated_delta_rule: cu_seqlens must have integers, not float32"):
        function(q[:1], k[:1], v[:1], cu_seqlens=torch.tensor([0.0, 5.5]))
    with pytest.raises(RuntimeError, match="chunk_gated_delta_rule: v must be on cpu as q, not on meta"):
        function(q, k, v.to("meta"))


def test_vmap(device):
    q, k, v, g, beta, _ = inputs(6, 2, batch=3, device=device)
    found = torch.vmap(lambda *t: metalcore.chunk_gated_delta_rule(*(x[None] for x in t))[0][0])(q, k, v, g, beta)
    assert_near(found, wide(metalcore.chunk_gated_delta_rule(q, k, v, g, beta)[0]), terms=64)
