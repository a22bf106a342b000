"""mamba_chunk_scan_combined, against loops over positions in float64."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from compared import TERMS_OF_CHUNKS, check
from references import DTYPES, assert_near, tensor, wide

import metalcore

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
NAMES = "x", "dt", "A", "B", "C", "D", "z", "dt_bias", "initial_states"
function = metalcore.mamba_chunk_scan_combined


def loop(x, dt, A, B, C, D=None, z=None, dt_bias=None, state=None, *, softplus=True, limits=(0.0, 2.0)):
    """The definition: results, and the states behind the last position."""
    step = dt if dt_bias is None else dt + dt_bias
    step = (F.softplus(step) if softplus else step).clamp(*limits)
    B, C = (t.repeat_interleave(x.shape[2] // t.shape[2], 2) for t in (B, C))
    state = x.new_zeros(x.shape[0], *x.shape[2:], B.shape[3]) if state is None else state * 1
    results = []
    for t in range(x.shape[1]):
        decay = (step[:, t] * A).exp()[..., None, None]
        state = decay * state + (step[:, t, :, None] * x[:, t])[..., None] * B[:, t, :, None]
        results.append((state * C[:, t, :, None]).sum(-1))
    y = torch.stack(results, 1) if results else x * 1
    y = y if D is None else y + x * (D if D.dim() == 2 else D[:, None])
    return (y if z is None else y * F.silu(z)), state


def inputs(length, heads=2, dim=3, states=5, *, batch=1, groups=1, dtype=torch.float32, device="cpu", sequences=None):
    """Steps below and above the limits, and rates from near 0 to some that empty a state at once."""
    of_x, of_rows = (batch, length, heads, dim), (batch, length, groups, states)
    x, z = tensor(*of_x), tensor(*of_x)
    made = [x, tensor(*of_x[:3]) * 3, -torch.exp(2 * tensor(heads)), tensor(*of_rows), tensor(*of_rows)]
    made += [tensor(heads, dim), z, tensor(heads), tensor(sequences or batch, heads, dim, states)]
    kept = {"A", "D", "dt_bias", "initial_states"}
    return [t.to(torch.float32 if name in kept else dtype).to(device) for name, t in zip(NAMES, made)]


def ours(x, dt, A, B, C, D=None, z=None, dt_bias=None, state=None, numbers=None, *, softplus=True, limits=(0.0, 2.0)):
    return function(x, dt, A, B, C, 64, D, z, dt_bias, state, numbers, None, softplus, limits, True)


SHAPES = {
    "16": {"states": 16, "dim": 17},
    "17": {"states": 17, "dim": 33, "heads": 3},
    "64": {"states": 64, "heads": 4, "groups": 2, "batch": 2},
    "128": {"states": 128, "dim": 5},
    "256": {"states": 256},
}


@each_dtype
@pytest.mark.parametrize("size", SHAPES)
def test_sizes(device, dtype, size):
    check(ours, loop, inputs(18, **SHAPES[size], dtype=dtype, device=device), 256)


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 257])
def test_lengths(device, length):
    check(ours, loop, inputs(length, 4, groups=2, device=device), 64)


def test_long(device):
    check(ours, loop, inputs(4097, 1, 2, 3, device=device), 256)


@each_dtype
@pytest.mark.parametrize("length", [63, 64, 130])
@pytest.mark.parametrize("gated", [True, False])
def test_chunks(device, dtype, length, gated):
    """From 64 positions and 32 states on it is linear attention by chunks."""
    tensors = inputs(length, 4, 9, 33, batch=2, groups=2, dtype=dtype, device=device)
    given = tensors if gated else [None if name == "z" else t for name, t in zip(NAMES, tensors)]
    # Results before the gate, and their gradients, are rounded to the dtype, each by half of eps.
    roundings = int(torch.finfo(dtype).eps / torch.finfo(torch.float32).eps / 8) if gated else 0
    check(ours, loop, given, max(TERMS_OF_CHUNKS[dtype], roundings))


@pytest.mark.parametrize("states", [128, 129])
def test_states_of_chunks(device, states):
    """Walks along segments have up to 128 states."""
    check(ours, loop, inputs(66, 2, 70, states, device=device), 256)


def test_growing_states(device):
    """Rates above 0 are not clamped: decays are above 1, also by chunks."""
    tensors = inputs(130, 2, 5, 33, device=device)
    tensors[2] = tensors[2].abs() / 100
    check(ours, loop, tensors, 256)


@pytest.mark.parametrize("left_out", ["D", "z", "dt_bias", "initial_states"])
def test_arguments_left_out(device, left_out):
    tensors = inputs(9, device=device)
    tensors[NAMES.index(left_out)] = None
    check(ours, loop, tensors, 64)


def test_one_number_of_a_head(device):
    """D without channels, and steps without softplus and limits."""
    tensors = inputs(9, device=device)
    tensors[5] = tensors[5][:, 0]
    tensors[1] = tensors[1].abs() / 4
    options = {"softplus": False, "limits": (0.0, torch.inf)}
    check(lambda *t: ours(*t, **options), lambda *t: loop(*t, **options), tensors, 64)


ENDS = (0, 1, 4, 70, 135)


@each_dtype
def test_packed(device, dtype):
    """Sequences by number in one entry: as the loop has them, and as separate calls. The first has the states."""
    numbers = torch.tensor([[i for i, (a, b) in enumerate(pairwise(ENDS)) for _ in range(a, b)]], device=device)
    tensors = inputs(ENDS[-1], dtype=dtype, device=device)

    def reference(x, dt, A, B, C, D, z, bias, state):
        parts = []
        for begin, end in pairwise(ENDS):
            rows = (t[:, begin:end] for t in (x, dt, B, C, z))
            x_, dt_, B_, C_, z_ = rows
            parts.append(loop(x_, dt_, A, B_, C_, D, z_, bias, state if begin == 0 else None))
        return torch.cat([y for y, _ in parts], 1), parts[-1][1]

    (y, _), _ = check(lambda *t: ours(*t, numbers), reference, tensors, 256)
    states = function(
        *tensors[:5], 64, *tensors[5:8], tensors[8], numbers, torch.tensor(ENDS), True, (0.0, 2.0), False, True
    )[1]
    x, dt, A, B, C, D, z, bias, state = tensors
    for n, (begin, end) in enumerate(pairwise(ENDS)):
        x_, dt_, B_, C_, z_ = (t[:, begin:end] for t in (x, dt, B, C, z))
        separate = ours(x_, dt_, A, B_, C_, D, z_, bias, state if begin == 0 else None)
        assert_near(y[:, begin:end].detach(), wide(separate[0]), terms=16)
        assert torch.equal(states[n], separate[1][0])


@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (2, 0, 3, 4), (2, 3, 0, 4), (2, 3, 4, 0)])
def test_empty(device, shape):
    batch, length, heads, dim = shape
    leaves = [t.requires_grad_() for t in inputs(length, heads, dim, batch=batch, device=device)]
    y, states = ours(*leaves)
    assert y.shape == shape and torch.equal(states, leaves[8])
    gradients = torch.autograd.grad((y.sum(), states.sum()), leaves)
    assert not any(each.any() for each in gradients[:8]) and torch.equal(gradients[8], torch.ones_like(states))


def test_steps_continue_a_sequence(device):
    """The step of Mamba 2, with heads' numbers as expanded tensors."""
    x, dt, A, B, C, D, z, bias, state = inputs(5, 4, groups=2, batch=2, device=device)
    y, states = ours(x, dt, A, B, C, D, z, bias, state, limits=(0.0, torch.inf))
    rate, offset = A[:, None, None].expand(4, 3, 5), bias[:, None].expand(4, 3)
    for t in range(5):
        step = dt[:, t, :, None].expand(-1, -1, 3)
        found = metalcore.selective_state_update(state, x[:, t], step, rate, B[:, t], C[:, t], D, z[:, t], offset, True)
        assert_near(found, wide(y[:, t]), terms=16)
    assert_near(state, wide(states), terms=16)


@each_dtype
def test_error_beside_transformers(device, dtype):
    """The error is at most twice that of transformers' ops, in results and gradients, besides the last bit of the dtype
    and what float32 rounds off in a random way at each position, by which a state is multiplied that hardly decays."""
    modeling = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
    x, dt, A, B, C, D, _, bias, _ = inputs(150, 4, 16, 40, groups=2, dtype=dtype, device=device)
    tensors = x, dt, A, B, C, D[:, 0], bias
    grad = tensor(*x.shape, dtype=dtype, device=device)

    def errors(function, leaves):
        y = function(*leaves)
        return y, *torch.autograd.grad(y, leaves, grad.to(y))

    def called(function, x, dt, A, B, C, D, bias):
        return function(x, dt, A, B, C, 64, D=D, dt_bias=bias, dt_softplus=True, dt_limit=(0.0, 2.0))

    exact = errors(lambda *t: loop(*t[:6], None, t[6])[0], [wide(t).requires_grad_() for t in tensors])
    ours, theirs = (
        errors(lambda *t: called(function, *t), [t.detach().requires_grad_() for t in tensors])
        for function in (metalcore.mamba_chunk_scan_combined, modeling.mamba2_chunk_scan.__wrapped__)
    )
    for mine, other, value in zip(ours, theirs, exact):
        rounded = (torch.finfo(mine.dtype).eps + 150**0.5 * torch.finfo(torch.float32).eps) / 4
        bound = 2 * (wide(other) - value).norm() + rounded * value.norm()
        assert (wide(mine) - value).norm() <= bound


def test_double_backward(device):
    def second(tensors):
        *tensors, grad = (t.requires_grad_() for t in tensors)
        first = torch.autograd.grad(ours(*tensors)[0], tensors, grad, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), [*tensors, grad])

    made = [*inputs(4, 2, 2, 3, device=device), tensor(1, 4, 2, 2, device=device)]
    for found, wanted in zip(second(made), second([wide(t) for t in made])):
        assert_near(found, wanted, terms=256)


def test_errors(device):
    x, dt, A, B, C, D, z, bias, state = inputs(6, groups=1, device=device)
    for message, attempt in {
        "x must be .batch, length, heads, channels. and B": lambda: function(x[0], dt, A, B, C, 64),
        "dt must be .1, 6, 2.": lambda: function(x, dt[:, :5], A, B, C, 64),
        "A must be .2.": lambda: function(x, dt, A[:1], B, C, 64),
        "B must be .1, 6, a number that divides 2, 5.": lambda: function(x, dt, A, B.repeat(1, 1, 3, 1), C, 64),
        "C must be float32 of the shape .1, 6, 1, 5.": lambda: function(x, dt, A, B, C[:, :3], 64),
        "D must be .2. or .2, 3.": lambda: function(x, dt, A, B, C, 64, D[:, :2]),
        "z must be float32 of the shape": lambda: function(x, dt, A, B, C, 64, D, z[:, :2]),
        "dt_bias must be .2.": lambda: function(x, dt, A, B, C, 64, D, z, bias[:1]),
        "initial_states must be float32 of the shape .1, 2, 3, 5.": lambda: function(
            x, dt, A, B, C, 64, initial_states=state[:, :1]
        ),
        "seq_idx must be int32 of the shape .1, 6.": lambda: function(
            x, dt, A, B, C, 64, seq_idx=torch.zeros(1, 5, device=device).int()
        ),
        "return_varlen_states needs a vector cu_seqlens": lambda: function(
            x, dt, A, B, C, 64, return_varlen_states=True
        ),
    }.items():
        with pytest.raises(RuntimeError, match=message):
            attempt()
    for options, message in (((0,), "chunk_size must be at least 1, not 0"), ((None,), "chunk_size must be .*None")):
        with pytest.raises(ValueError, match=message):
            function(x, dt, A, B, C, *options)
    with pytest.raises(ValueError, match="mamba_chunk_scan_combined: dt_limit must be two numbers, not 1.0"):
        function(x, dt, A, B, C, 64, dt_limit=1.0)
    with pytest.raises(TypeError, match="mamba_chunk_scan_combined: A must have floating-point numbers, not complex64"):
        function(x, dt, A + 0j, B, C, 64)
    with pytest.raises(TypeError, match="mamba_chunk_scan_combined: cu_seqlens must have integers, not float32"):
        function(x, dt, A, B, C, 64, cu_seqlens=dt[0, :2, 0], return_varlen_states=True)
    with pytest.raises(TypeError, match="mamba_chunk_scan_combined: dt must be a tensor, not NoneType"):
        function(x, None, A, B, C, 64)
