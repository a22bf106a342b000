"""selective_scan and selective_state_update, against loops over positions in float64."""

import pytest
import torch
import torch.nn.functional as F
from compared import check
from references import DTYPES, assert_near, check_operator, tensor, wide

import metalcore
from metalcore.sequence._scan_formulas import scan

ops = torch.ops.metalcore
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
NAMES = "u", "delta", "A", "B", "C", "D", "z", "delta_bias"


def loop(u, delta, A, B, C, D=None, z=None, delta_bias=None, softplus=True):
    """The definition: results, and the states behind the last position."""
    delta = delta if delta_bias is None else delta + delta_bias[:, None]
    delta = F.softplus(delta) if softplus else delta

    def row(x, t):
        if x.dim() == 2:
            return x
        x = x[:, None, :, t] if x.dim() == 3 else x[..., t]
        return x.repeat_interleave(u.shape[1] // x.shape[1], 1)

    h, results = u.new_zeros(u.shape[0], *A.shape), []
    for t in range(u.shape[2]):
        step = delta[:, :, t, None]
        h = (step * A).exp() * h + step * row(B, t) * u[:, :, t, None]
        results.append((row(C, t) * h).sum(-1))
    y = torch.stack(results, -1) if results else u * 1
    y = y if D is None else y + D[:, None] * u
    return (y if z is None else y * F.silu(z)), h


def inputs(length, channels=5, states=4, *, batch=1, groups=None, dtype=torch.float32, device="cpu"):
    """Steps from near 0 to 20 and more, and rates from near 0 to some that empty a state at once."""
    of_u, of_rows = (batch, channels, length), (batch, *([groups] if groups else []), states, length)
    made = {
        "u": tensor(*of_u),
        "delta": tensor(*of_u) * 3,
        "A": -torch.exp(tensor(channels, states)),
        "B": tensor(*of_rows),
        "C": tensor(*of_rows),
        "D": tensor(channels),
        "z": tensor(*of_u),
        "delta_bias": tensor(channels) - 2,
    }
    kept = {"A", "D", "delta_bias"}
    return [t.to(torch.float32 if name in kept else dtype).to(device) for name, t in made.items()]


def ours(*tensors, softplus=True):
    return metalcore.selective_scan(*tensors, softplus, True)


# On both sides of the numbers of states that kernels are made for, and of the channels of a threadgroup.
SHAPES = {
    "1": {"states": 1, "channels": 33},
    "16": {"states": 16, "channels": 31, "batch": 2},
    "17": {"states": 17, "channels": 9},
    "64": {"states": 64, "channels": 4, "groups": 2},
    "65": {"states": 65, "channels": 6, "groups": 2},
    "128": {"states": 128, "channels": 3},
    "129": {"states": 129, "channels": 2},
}


@each_dtype
@pytest.mark.parametrize("size", SHAPES)
def test_sizes(device, dtype, size):
    check(ours, loop, inputs(19, **SHAPES[size], dtype=dtype, device=device), 128)


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 257])
def test_lengths(device, length):
    check(ours, loop, inputs(length, batch=2, device=device), 64)


def test_long(device):
    check(ours, loop, inputs(4097, 2, 3, device=device), 256)


@pytest.mark.parametrize("left_out", ["D", "z", "delta_bias"])
def test_arguments_left_out(device, left_out):
    tensors = inputs(9, device=device)
    tensors[NAMES.index(left_out)] = None
    check(ours, loop, tensors, 64)


def test_constant_rows(device):
    """B and C of all positions, and steps in float32 without softplus."""
    tensors = inputs(9, 6, 4, groups=3, dtype=torch.float16, device=device)
    tensors[1] = tensors[1].float().abs() / 4
    tensors[7] = None
    for which in ((3,), (4,), (3, 4)):
        given = list(tensors)
        for i in which:
            given[i] = tensor(6, 4, dtype=torch.float16, device=device)
        if len(which) == 1:
            given[7 - which[0]] = tensor(1, 4, 9, dtype=torch.float16, device=device)
        check(lambda *t: ours(*t, softplus=False), lambda *t: loop(*t, softplus=False), given, 64)


def test_groups_of_one_argument(device):
    """B or C without groups has the same numbers for all of the other's."""
    u, delta, A, B, C, *_ = inputs(9, 6, 4, groups=3, device=device)
    shared = B[:, 0]
    everywhere = shared[:, None].expand_as(C)
    for given, same in (((shared, C), (everywhere, C)), ((C, shared), (C, everywhere))):
        assert torch.equal(*(metalcore.selective_scan(u, delta, A, *rows) for rows in (given, same)))


def test_the_formula_is_the_loop():
    """PyTorch's ops, which are the reference of the registry."""
    tensors = [wide(t) for t in inputs(20, 6, 4, batch=2, groups=3)]
    u, delta, A, B, C, D, z, bias = tensors
    heads = [t.transpose(1, 2).unflatten(2, (3, 2)) for t in (u, delta, z)]
    rows = [t.permute(0, 3, 1, 2) for t in (B, C)]
    A, D, bias = (t.unflatten(0, (3, 2)) for t in (A, D, bias))
    limits = True, -torch.inf, torch.inf
    y, states = scan(heads[0], heads[1], A, *rows, D, heads[2], bias, None, None, *limits)
    expected = loop(*tensors)
    torch.testing.assert_close(y.flatten(2).transpose(1, 2), expected[0])
    torch.testing.assert_close(states.flatten(1, 2), expected[1])


def test_layouts(device):
    """Channels that are neighbours in memory, an offset, and expanded tensors."""
    one = tensor(2, 70, 3 * 6 + 1, device=device)
    views = [t.mT for t in one[..., 1:].split(6, -1)]
    _, _, A, B, C, D, _, bias = inputs(70, 6, 4, batch=2, device=device)
    for u, delta, z in (views, (views[0], views[1][:, :1].expand(-1, 6, -1), views[2].flip(2))):
        tensors = u, delta, A.mT.contiguous().mT, B.mT.contiguous().mT, C[:1].expand(2, -1, -1), D, z, bias
        leaves = [t.detach().requires_grad_() for t in tensors]
        same = [t.detach().contiguous().requires_grad_() for t in tensors]
        found, wanted = ours(*leaves), ours(*same)
        assert found[0].stride() == (420, 1, 6) if u.stride(1) == 1 else True
        grads = [tensor(*t.shape, device=device).mT.contiguous().mT for t in found]
        pairs = zip(torch.autograd.grad(found, leaves, grads), torch.autograd.grad(wanted, same, grads))
        assert all(map(torch.equal, found, wanted)) and all(torch.equal(*pair) for pair in pairs)


def by_heads(length, heads=2, dim=3, states=4, *, batch=1, device="cpu"):
    """Arguments of the operator."""
    of_x, of_rows = (batch, length, heads, dim), (batch, length, 1, states)
    made = tensor(*of_x), tensor(*of_x), -torch.exp(tensor(heads, dim, states)), tensor(*of_rows), tensor(*of_rows)
    made += tensor(heads, dim), tensor(*of_x), tensor(heads, dim), tensor(batch, heads, dim, states)
    return [t.to(device) for t in made]


@pytest.mark.parametrize("length", [9, 300])
def test_sequences_and_limits_of_the_operator(device, length):
    """Initial states, sequences by number, and steps on both sides of limits and at them."""
    tensors = by_heads(length, batch=2, device=device)
    numbers = torch.tensor([[0] * 4 + [2] + [3] * (length - 5), [1] * length]).int()
    numbers[0, length // 2 + 1 :] = 7
    options = False, 0.5, 1.0
    tensors[7] = torch.zeros_like(tensors[7])
    tensors[1][:, 3:5] = 0.5

    def reference(*t):
        return scan(*t, numbers, *options)

    check(lambda *t: ops.selective_scan(*t, numbers.to(device), *options), reference, tensors, 128)


@pytest.mark.parametrize("length", [6, 200])
def test_nan_stays_in_its_sequence(device, length):
    tensors = by_heads(length, device=device)
    tensors[0][0, 1, 1, 1] = torch.nan
    numbers = torch.arange(length, device=device)[None].ge(3).int()
    leaves = [t.requires_grad_() for t in tensors]
    y, states = ops.selective_scan(*leaves, numbers, True, 0.0, torch.inf)
    assert y.isnan().nonzero().tolist() == [[0, 1, 1, 1], [0, 2, 1, 1]] and not states.isnan().any()
    gradients = torch.autograd.grad((y.sum(), states.sum()), leaves)
    for i in (0, 1, 3, 4, 6):
        assert not gradients[i][:, 3:].isnan().any()


def test_the_same_bits(device):
    tensors = [t.requires_grad_() for t in inputs(150, 40, 16, device=device)]
    runs = []
    for _ in range(2):
        results = ours(*tensors)
        runs.append((*results, *torch.autograd.grad([t.square().sum() for t in results], tensors)))
    assert all(map(torch.equal, *runs))


@pytest.mark.parametrize("shape", [(0, 6, 5), (2, 6, 0), (2, 0, 5)])
def test_empty(device, shape):
    batch, channels, length = shape
    tensors = [t.requires_grad_() for t in inputs(length, channels, 4, batch=batch, device=device)]
    y, states = ours(*tensors)
    assert y.shape == shape and states.shape == (batch, channels, 4) and not states.any()
    assert not any(g.any() for g in torch.autograd.grad((y.sum(), states.sum()), tensors))


def test_without_states(device):
    u, delta, A, B, C, D, *_ = inputs(5, 3, 0, device=device)
    assert torch.equal(metalcore.selective_scan(u, delta, A, B, C, D), D[:, None] * u)


def test_double_backward(device):
    def second(tensors):
        *tensors, grad = (t.requires_grad_() for t in tensors)
        y, states = ours(*tensors)
        first = torch.autograd.grad((y, states.sum()), tensors, (grad, None), create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), [*tensors, grad])

    made = [*inputs(5, 3, 2, device=device), tensor(1, 3, 5, device=device)]
    for found, wanted in zip(second(made), second([wide(t) for t in made])):
        assert_near(found, wanted, terms=128)


def test_gradcheck_of_the_formula():
    tensors = [wide(t).requires_grad_() for t in inputs(4, 2, 2)]
    assert torch.autograd.gradcheck(ours, tensors)


def test_operators(device):
    tensors = by_heads(6, device=device)
    numbers = torch.zeros(1, 6, dtype=torch.int32, device=device)
    limits = True, 0.0, 1.0
    leaves = [t.clone().requires_grad_() for t in tensors]
    check_operator(ops.selective_scan, *leaves, numbers, *limits)
    bare = [*tensors[:5], None, None, None, None, None]
    check_operator(ops.selective_scan, *bare, *limits)
    grads = torch.ones_like(tensors[0]), torch.ones_like(tensors[8])
    check_operator(ops.selective_scan_backward, *grads, *tensors, numbers, *limits)
    check_operator(ops.selective_scan_backward, grads[0], None, *bare, *limits)
    state, x, dt, A, B, C, D, z, bias = step_inputs(2, 3, 4, heads=2, device=device)
    check_operator(ops.selective_state_update, state, x, dt, A, B, C, D, z, bias, True, None)


def test_errors(device):
    function = metalcore.selective_scan
    for where in (device, "cpu"):
        u, delta, A, B, C, D, z, bias = (t.to(where) for t in inputs(6, 4, 3, groups=2))
        for message, attempt in {
            "u must be .batch, channels, length. and A": lambda: function(u, delta, A[:3], B, C),
            "delta must have u's shape .1, 4, 6.": lambda: function(u, delta[..., :2], A, B, C),
            "B and C have 2 groups, which do not divide 3": lambda: function(u[:, :3], delta[:, :3], A[:3], B, C),
            "C must be .channels, states., .batch, states, length. or .batch, 2": lambda: function(
                u, delta, A, B, C.expand(1, 2, 3, 6).repeat(1, 2, 1, 1)
            ),
            "B must be float32 of the shape .1, 6, 2, 3.": lambda: function(u, delta, A, B[:, :, :2], C),
            "D must be .4.": lambda: function(u, delta, A, B, C, D[:3]),
            "z must have u's shape": lambda: function(u, delta, A, B, C, D, z[..., :1]),
            "delta_bias must be .4.": lambda: function(u, delta, A, B, C, D, z, bias[:3]),
            "x must be .batch, length, heads, channels.": lambda: ops.selective_scan(
                u, delta, A, B, C, *[None] * 5, False, 0.0, 1.0
            ),
        }.items():
            with pytest.raises(RuntimeError, match=message):
                attempt()
    with pytest.raises(TypeError, match="selective_scan: A must have floating-point numbers, not complex64"):
        function(u, delta, A + 0j, B, C)
    with pytest.raises(TypeError, match="selective_scan: delta must be a tensor, not NoneType"):
        function(u, None, A, B, C)


def test_vmap(device):
    u, delta, A, B, C, *_ = inputs(6, batch=3, device=device)
    found = torch.vmap(lambda u, d, B, C: metalcore.selective_scan(u[None], d[None], A, B[None], C[None])[0])(
        u, delta, B, C
    )
    assert_near(found, wide(metalcore.selective_scan(u, delta, A, B, C)), terms=64)


# The step


def step_inputs(batch, channels, states, *, heads=1, groups=1, rows=None, dtype=torch.float32, device="cpu"):
    """state, x, dt, A, B, C, D, z and dt_bias."""
    of_x, of_rows, of_D = (batch, heads, channels), (batch, groups, states), (heads, channels)
    wide_ones = [tensor(rows or batch, *of_D, states), -torch.exp(tensor(*of_D, states))]
    state, A = (t.to(device) for t in wide_ones)
    x, dt, B, C, D, z, bias = (
        tensor(*shape, dtype=dtype, device=device) for shape in (of_x, of_x, of_rows, of_rows, of_D, of_x, of_D)
    )
    return state, x, dt, A, B, C, D, z, bias


def step_loop(state, x, dt, A, B, C, D, z, bias):
    step = F.softplus(dt + bias)[..., None]
    rows = [t.repeat_interleave(x.shape[1] // t.shape[1], 1)[:, :, None] for t in (B, C)]
    state = (step * A).exp() * state + step * rows[0] * x[..., None]
    return ((state * rows[1]).sum(-1) + D * x) * F.silu(z), state


@each_dtype
# The sizes lie below and above the channels of a threadgroup and the states of a kernel. Some states fill vectors of 16
# bytes, and others do not.
@pytest.mark.parametrize(
    "states, channels", [(1, 5), (8, 33), (16, 130), (17, 5), (24, 5), (64, 65), (65, 5), (128, 66), (256, 3)]
)
def test_step(device, dtype, states, channels):
    state, x, dt, A, *rest = step_inputs(3, channels, states, heads=4, groups=2, dtype=dtype, device=device)
    shared = A[..., :1].expand_as(A)
    for kept, rates in (
        (state, A),
        (state.clone(), shared),
        (state.to(dtype), A),
        (state.to(dtype), shared),
        (state.mT.contiguous().mT, shared),
    ):
        inputs = (x, dt, rates, *rest)
        expected = step_loop(*(wide(t) for t in (kept, *inputs)))
        found = metalcore.selective_state_update(kept, *inputs, dt_softplus=True)
        assert found.dtype == dtype
        assert_near(found, expected[0], terms=states)
        assert_near(kept, expected[1], terms=4)


@pytest.mark.parametrize("batch", [4, 5, 10])
def test_batch_entries_of_a_threadgroup(device, batch):
    """Threadgroups of the simulator's plan walk over one, two and three entries, and the last one may have fewer."""
    state, *rest = step_inputs(batch, 5, 16, dtype=torch.bfloat16, device=device)
    kept = state.to(torch.bfloat16)
    expected = step_loop(*(wide(t) for t in (kept, *rest)))
    found = metalcore.selective_state_update(kept, *rest, dt_softplus=True)
    assert_near(found, expected[0], terms=16)
    assert_near(kept, expected[1], terms=4)


def test_steps_are_the_scan(device):
    """Without heads, with expanded tensors as of Mamba 2, and with the state of the scan."""
    u, delta, A, B, C, D, z, bias = inputs(6, 8, 16, batch=2, device=device)
    delta, A, bias = delta[:, :1].expand_as(delta), A[:1, :1].expand_as(A), bias[:1].expand_as(bias)
    y, states = metalcore.selective_scan(u, delta, A, B, C, D, z, bias, True, True)
    state = torch.zeros_like(states)
    parts = [
        metalcore.selective_state_update(
            state, *(t[..., i] for t in (u, delta)), A, *(t[..., i] for t in (B, C)), D, z[..., i], bias, True
        )
        for i in range(6)
    ]
    assert_near(torch.stack(parts, -1), wide(y), terms=16)
    assert_near(state, wide(states), terms=16)


@pytest.mark.parametrize("dtype, states", [(torch.float32, 4), (torch.bfloat16, 16)])
def test_rows_of_the_state(device, dtype, states):
    state, *rest = step_inputs(4, 3, states, heads=2, rows=5, dtype=dtype, device=device)
    state = state.to(dtype)
    rows = torch.tensor([4, -1, 0, 2**32], device=device)  # no row; and one past all, as int32 it would be 0
    before, kept = state.clone(), state.clone()
    y = metalcore.selective_state_update(state, *rest, True, rows)
    own = [before[[4, 0]], *(t[[0, 2]] if t.shape[0] == 4 else t for t in rest)]
    expected = step_loop(*(wide(t) for t in own))
    assert_near(y[[0, 2]], expected[0], terms=16)
    assert not y[1].any() and y[3].isnan().all()
    assert_near(state[[4, 0]], expected[1], terms=4)
    assert torch.equal(state[1:4], kept[1:4])


def test_gradients_of_the_step(device):
    state, *rest = step_inputs(2, 3, 4, heads=2, device=device)
    leaves = [t.requires_grad_() for t in rest]
    wide_leaves = [wide(t).requires_grad_() for t in rest]
    expected = step_loop(wide(state), *wide_leaves)[0]
    found = metalcore.selective_state_update(state, *leaves, True)
    for actual, value in zip(
        torch.autograd.grad(found.sum(), leaves), torch.autograd.grad(expected.sum(), wide_leaves)
    ):
        assert_near(actual, value, terms=64)


def test_errors_of_the_step(device):
    function = metalcore.selective_state_update
    for where in (device, "cpu"):
        state, x, dt, A, B, C, *_ = (t.to(where) for t in step_inputs(2, 3, 4, heads=2))
        for message, attempt in {
            "x must be .batch, heads, channels.": lambda: function(state, x[None], dt, A, B, C),
            "state is to be written, but is an expanded": lambda: function(state[:1].expand_as(state), x, dt, A, B, C),
            "state must be .2, 2, 3, states.": lambda: function(state[:1], x, dt, A, B, C),
            "B must be .2, a number that divides 2, 4.": lambda: function(state, x, dt, A, B.repeat(1, 3, 1), C),
            "A must be float32 of the shape .2, 3, 4.": lambda: function(state, x, dt, A[..., :3], B, C),
            "C must be float32 of the shape .2, 1, 4.": lambda: function(state, x, dt, A, B, C[..., :3]),
            "state_batch_indices must be int32 of the shape .2.": lambda: function(
                state, x, dt, A, B, C, state_batch_indices=torch.zeros(3, device=where).int()
            ),
        }.items():
            with pytest.raises(RuntimeError, match=message):
                attempt()
        with pytest.raises(TypeError, match="state_batch_indices must have integers, not bool"):
            function(state, x, dt, A, B, C, state_batch_indices=torch.ones(2, device=where).bool())
