"""causal_conv1d and causal_conv1d_update, against loops over positions in float64."""

import pytest
import torch
from references import DTYPES, assert_near, check_operator, layouts, tensor, wide

import metalcore
from metalcore.sequence._taps import gradients

ops = torch.ops.metalcore
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
WIDTH = 4


def loop(x, weight, bias=None, starts=(0,), states=None, silu=False):
    """The definition, of one batch entry (channels, length), whose sequences begin at `starts`; `states` are those of
    the sequences."""
    width, results = weight.shape[1], []
    for number, (begin, end) in enumerate(zip(starts, (*starts[1:], x.shape[1]))):
        before = x.new_zeros(x.shape[0], width - 1) if states is None else states[number]
        every = torch.cat([before, x[:, begin:end]], -1)
        results += [(every[:, at : at + width] * weight).sum(-1) for at in range(end - begin)]
    y = torch.stack(results, -1) if results else x * 1
    y = y if bias is None else y + bias[:, None]
    return torch.nn.functional.silu(y) if silu else y


def inputs(channels, length, width, dtype=torch.float32, device="cpu", batch=2, states=0):
    made = [tensor(*shape, dtype=dtype, device=device) for shape in ((batch, channels, length), (channels, width))]
    made += [tensor(channels, dtype=dtype, device=device)]
    return made + ([tensor(states, channels, width - 1, dtype=dtype, device=device)] if states else [])


def check(function, reference, tensors, positions):
    """Compares results and gradients; `positions` is the number of terms of the parameters' gradients."""
    leaves = [t.detach().requires_grad_() for t in tensors]
    wide_leaves = [wide(t).requires_grad_() for t in tensors]
    y, expected = function(*leaves), reference(*wide_leaves)
    assert y.dtype == tensors[0].dtype and y.shape == tensors[0].shape
    assert_near(y.detach(), expected.detach(), terms=8)
    grad = tensor(*y.shape, dtype=y.dtype, device=y.device)
    found = torch.autograd.grad(y, leaves, grad, allow_unused=True)
    wanted = torch.autograd.grad(expected, wide_leaves, wide(grad), allow_unused=True)
    for actual, value, terms in zip(found, wanted, (16, positions, positions, 16)):
        value = torch.zeros(actual.shape, dtype=torch.float64) if value is None else value
        assert_near(actual, value, terms=terms)
    return y, found


def batched(**options):
    """The loop over each batch entry."""

    def reference(x, weight, bias, *state):
        entries = [
            loop(entry, weight, bias, states=[state[0][i]] if state else None, **options) for i, entry in enumerate(x)
        ]
        return torch.stack(entries)

    return reference


def last(x):
    """The same tensor, whose channels are side by side in memory."""
    return x.mT.contiguous().mT


@each_dtype
@pytest.mark.parametrize("width", range(2, 9))
def test_widths(device, dtype, width):
    for lay, silu, states in ((lambda x: x, True, 2), (last, False, 0)):
        tensors = inputs(5, 9, width, dtype, device, states=states)

        def ours(x, weight, bias, state=None, silu=silu, lay=lay):
            activation = "silu" if silu else None
            return metalcore.causal_conv1d(lay(x), weight, bias, initial_state=state, activation=activation)

        check(ours, batched(silu=silu), tensors, 18)


@each_dtype
@pytest.mark.parametrize("length", [1, 2, 3, 63, 64, 65, 129])
def test_lengths(device, dtype, length):
    for lay in (last, lambda x: x):
        tensors = inputs(33, length, WIDTH, dtype, device)

        def ours(x, weight, bias, lay=lay):
            return metalcore.causal_conv1d(lay(x), weight, bias, activation="swish")

        y, _ = check(ours, batched(silu=True), tensors, 2 * length)
        assert (y.stride(1) == 1) == (lay is last or length == 1)


@each_dtype
def test_vectors(device, dtype):
    """Kernels of vectors: walks along positions that end within a step or go on in the next one, threadgroups whose
    last channels do not exist, and weights of fewer positions than a window has."""
    for channels, length, width, silu, lay in (
        (16, 1, WIDTH, True, last),
        (72, 131, 3, True, last),
        (8, 256, WIDTH, False, last),
        (2, 8, WIDTH, True, lambda x: x),
        (3, 264, 2, False, lambda x: x),
        (8, 520, WIDTH, True, lambda x: x),
        (1, 2056, WIDTH, True, lambda x: x),
    ):

        def ours(x, weight, *bias, silu=silu, lay=lay):
            return metalcore.causal_conv1d(lay(x), weight, *bias, activation="silu" if silu else None)

        tensors = inputs(channels, length, width, dtype, device)
        x, weight, bias = (t.to("meta") for t in tensors)
        with metalcore.recording.on_meta(device) as recorder, torch.no_grad():
            metalcore.causal_conv1d(lay(x), weight, bias)
        assert [plan.variant for plan in recorder.recording.plans] == ["channels" if lay is last else "positions"]
        check(ours, batched(silu=silu), tensors, 2 * length)


def test_weights_between_multiples(device):
    """Kernels of vectors read a channel's weights as one. Others take weights that begin between multiples of 16
    bytes."""
    x, _, bias = inputs(16, 16, WIDTH, device=device)
    weight = tensor(16 * WIDTH + 1, device=device)[1:].view(16, WIDTH)
    check(lambda *t: metalcore.causal_conv1d(last(t[0]), *t[1:]), batched(), (x, weight, bias), 32)


@pytest.mark.parametrize("lay", [last, lambda x: x], ids=["channels", "positions"])
def test_windows_end(device, lay):
    """A position before a window has no part in it, where kernels' windows are longer than the weights."""
    x, weight, bias = inputs(16, 16, 3, device=device)
    x[1, 2, 5] = torch.nan
    leaves = [t.requires_grad_() for t in (lay(x), weight, bias)]
    y = metalcore.causal_conv1d(*leaves, activation="silu")
    found = torch.autograd.grad(y, leaves, torch.ones_like(y))
    for actual, spoiled in zip((y, found[0]), (range(5, 8), range(3, 8))):
        assert actual.isnan().nonzero().tolist() == [[1, 2, position] for position in spoiled]
    for actual in found[1:]:
        assert actual.reshape(16, -1).isnan().any(1).nonzero().tolist() == [[2]]


def test_long(device):
    """Threadgroups of the derivative that walk over several parts, the last of which is not whole."""
    x, weight, bias = inputs(1, 64 * 2060 + 1, WIDTH, device=device, batch=1)
    found = torch.autograd.grad(
        metalcore.causal_conv1d(*(leaf := [t.requires_grad_() for t in (x, weight, bias)]), activation="silu").sum(),
        leaf,
    )
    with torch.no_grad():
        wanted = gradients(torch.ones_like(wide(x)), *map(wide, (x, weight, bias)), None, None, None, True)
    for actual, value, terms in zip(found, wanted, (16, x.shape[2] ** 0.5, x.shape[2] ** 0.5)):
        assert_near(actual, value, terms=terms, magnitude=x.shape[2] ** 0.5)
    small = inputs(2, 4097, WIDTH, device=device, batch=1)
    assert_near(metalcore.causal_conv1d(*small), loop(*(wide(t) for t in (small[0][0], *small[1:])))[None], terms=8)


def test_layouts(device):
    made = layouts(lambda *shape: tensor(*shape, device=device))
    weight, bias = tensor(6, WIDTH, device=device), tensor(6, device=device)
    for x in made.values():
        check(lambda *t: metalcore.causal_conv1d(*t), batched(), (x, weight, bias), 32)
    states = [tensor(4, 3, 6, device=device).mT, tensor(1, 6, 3, device=device).expand(4, 6, 3)]
    for state in states:
        x = made["permuted"]
        check(
            lambda *t: metalcore.causal_conv1d(*t[:3], None, t[3]),
            batched(),
            (x, weight.mT.contiguous().mT, bias, state),
            32,
        )


@pytest.mark.parametrize("width", [1, 9])
def test_other_widths(device, width):
    """PyTorch's ops take these."""
    tensors = inputs(3, 5, width, device=device)
    check(lambda *t: metalcore.causal_conv1d(*t), batched(), tensors, 10)
    x, weight, bias = tensors
    parts, state = metalcore.causal_conv1d(x[..., :3], weight, bias, return_final_state=True)
    step = metalcore.causal_conv1d_update(x[..., 3:], state, weight, bias)
    torch.testing.assert_close(torch.cat([parts, step], -1), metalcore.causal_conv1d(*tensors))


def test_weights_of_float32(device):
    x, weight, bias = inputs(5, 9, WIDTH, torch.bfloat16, device)
    check(lambda *t: metalcore.causal_conv1d(*t), batched(), (x, weight.float() / 3, bias.float() / 3), 18)
    y = metalcore.causal_conv1d(x, weight)
    assert torch.equal(y, metalcore.causal_conv1d(x, weight, torch.zeros_like(bias)))


ENDS = (0, 1, 3, 3, 70, 130)


@each_dtype
@pytest.mark.parametrize("width", [WIDTH, 7])
def test_packed(device, dtype, width):
    """Sequences in one entry, one of them empty: as the loop has them, and with the bits of separate calls."""
    cu_seqlens = torch.tensor(ENDS, dtype=torch.int32, device=device)
    starts = ENDS[:-1]
    tensors = inputs(3, ENDS[-1], width, dtype, device, batch=1, states=len(starts))

    def ours(x, weight, bias, state):
        return metalcore.causal_conv1d(x, weight, bias, None, state, False, "silu", cu_seqlens)

    def reference(x, weight, bias, state):
        return loop(x[0], weight, bias, starts, state, silu=True)[None]

    y, _ = check(ours, reference, tensors, ENDS[-1])
    x, weight, bias, state = tensors
    final = metalcore.causal_conv1d(x, weight, bias, None, state, True, "silu", cu_seqlens.long())[1]
    for number, (begin, end) in enumerate(zip(starts, ENDS[1:])):
        separate = metalcore.causal_conv1d(
            x[..., begin:end], weight, bias, None, state[number : number + 1], True, "silu"
        )
        assert torch.equal(y[..., begin:end], separate[0])
        assert torch.equal(final[number], separate[1][0])


@each_dtype
def test_numbered(device, dtype):
    numbers = torch.tensor([[0] * 3 + [1] + [4] * 60 + [5] * 6, [2] * 70], dtype=torch.int32, device=device)
    tensors = inputs(5, 70, WIDTH, dtype, device)
    starts = ((0, 3, 4, 64), (0,))

    def reference(x, weight, bias):
        return torch.stack([loop(entry, weight, bias, at, silu=True) for entry, at in zip(x, starts)])

    y, _ = check(lambda *t: metalcore.causal_conv1d(*t, numbers, activation="silu"), reference, tensors, 140)
    assert torch.equal(y, metalcore.causal_conv1d(*tensors, numbers.long(), activation="silu"))


def test_padding(device):
    """What padding holds reaches neither a result nor a gradient."""
    x, weight, bias = (t.requires_grad_() for t in inputs(3, 9, WIDTH, device=device, batch=1))
    numbers = torch.tensor([[-1, -1, 0, 0, 0, 1, 1, -1, -1]], device=device)
    spoiled = x.masked_fill((numbers < 0)[:, None], torch.nan)
    y = metalcore.causal_conv1d(spoiled, weight, bias, numbers, activation="silu")
    assert not y[..., numbers[0] < 0].any() and y.isfinite().all()
    found = torch.autograd.grad(y.square().sum(), (x, weight, bias))
    clean = metalcore.causal_conv1d(x, weight, bias, numbers, activation="silu")
    for ours, theirs in zip(found, torch.autograd.grad(clean.square().sum(), (x, weight, bias))):
        assert torch.equal(ours, theirs)


def test_nan_stays_in_its_sequence(device):
    cu_seqlens = torch.tensor([0, 5, 70], dtype=torch.int32, device=device)
    x, weight, _ = inputs(2, 70, WIDTH, device=device, batch=1)
    x[0, 0, 4] = torch.nan
    x.requires_grad_()
    y = metalcore.causal_conv1d(x, weight, activation="silu", cu_seqlens=cu_seqlens)
    assert y.isnan().nonzero().tolist() == [[0, 0, 4]]
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert gradient.isnan().nonzero().tolist() == [[0, 0, i] for i in range(1, 5)]


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 3, 0), (2, 0, 4)])
def test_empty(device, shape):
    x, weight = tensor(*shape, device=device), tensor(shape[1], WIDTH, device=device)
    state = tensor(shape[0], shape[1], WIDTH - 1, device=device)
    leaves = [t.requires_grad_() for t in (x, weight, state)]
    y, final = metalcore.causal_conv1d(x, weight, None, None, state, True, "silu")
    assert y.shape == shape and final.shape == state.shape
    if shape[2] == 0:
        assert torch.equal(final, state)
    gradients = torch.autograd.grad(y.sum(), leaves, allow_unused=True)
    assert not any(g is not None and g.any() for g in gradients)


def test_final_states_continue_a_sequence(device):
    """Pieces with the state of the one before are the whole, with gradients; one piece is shorter than the state."""
    tensors = [t.requires_grad_() for t in inputs(3, 12, WIDTH, device=device)]
    x, weight, bias = tensors
    whole = metalcore.causal_conv1d(x, weight, bias, activation="silu")
    state, parts = torch.zeros(2, 3, WIDTH, device=device), []  # one more than the window needs
    for piece in x.split((5, 1, 6), -1):
        part, state = metalcore.causal_conv1d(piece, weight, bias, None, state, True, "silu")
        parts.append(part)
    assert torch.equal(torch.cat(parts, -1), whole)
    wanted = torch.autograd.grad(whole.square().sum(), tensors)
    for found, value in zip(torch.autograd.grad(torch.cat(parts, -1).square().sum(), tensors), wanted):
        assert_near(found.detach(), wide(value), terms=24)


def test_the_same_bits(device):
    tensors = [t.requires_grad_() for t in inputs(40, 200, WIDTH, device=device)]
    runs = []
    for _ in range(2):
        y = metalcore.causal_conv1d(*tensors, activation="silu")
        runs.append((y, *torch.autograd.grad(y.square().sum(), tensors)))
    assert all(map(torch.equal, *runs))


@pytest.mark.parametrize("packed", [False, True])
def test_double_backward(device, packed):
    cu_seqlens = torch.tensor([0, 2, 7], dtype=torch.int32) if packed else None

    def second(tensors, where):
        x, weight, bias, state, grad = tensors = [t.requires_grad_() for t in tensors]
        ends = None if cu_seqlens is None else cu_seqlens.to(where)
        y = metalcore.causal_conv1d(x, weight, bias, None, state, False, "silu", ends)
        first = torch.autograd.grad(y, tensors[:4], grad, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), tensors)

    made = [*inputs(3, 7, 3, device=device, batch=1, states=2 if packed else 1), tensor(1, 3, 7, device=device)]
    for found, wanted in zip(second(made, device), second([wide(t) for t in made], "cpu")):
        assert_near(found, wanted, terms=64)


def test_gradcheck_of_the_reference():
    tensors = [wide(t).requires_grad_() for t in inputs(2, 5, 3, batch=1, states=2)]
    cu_seqlens = torch.tensor([0, 2, 5], dtype=torch.int32)

    def function(x, weight, bias, state):
        return metalcore.causal_conv1d(x, weight, bias, None, state, True, "silu", cu_seqlens)

    assert torch.autograd.gradcheck(function, tensors)


def test_operators(device):
    x, weight, bias = (t.requires_grad_() for t in inputs(3, 6, WIDTH, device=device))
    state = tensor(2, 3, WIDTH - 1, device=device).requires_grad_()
    check_operator(ops.causal_conv1d, x, weight, bias, None, None, state, True)
    check_operator(ops.causal_conv1d, last(x.detach()), weight, None, None, None, None, False)
    check_operator(ops.causal_conv1d_backward, x.detach(), x, weight, bias, None, None, state, True, True)
    check_operator(ops.causal_conv1d_backward, x.detach(), x, weight, None, None, None, None, True, False)


# The step


def step_loop(x, state, weight, bias, silu):
    """The state as a list of positions, the oldest first: the results, and what it is then."""
    kept = state.shape[2]
    every = torch.cat([state, x], -1)
    width = weight.shape[1]
    y = torch.stack([(every[..., kept + t - width + 1 : kept + t + 1] * weight).sum(-1) for t in range(x.shape[2])], -1)
    y = y if bias is None else y + bias[:, None]
    return (torch.nn.functional.silu(y) if silu else y), every[..., every.shape[2] - kept :]


@each_dtype
@pytest.mark.parametrize("width", [2, 4, 8])
@pytest.mark.parametrize("new", [1, 3, 11])
def test_steps(device, dtype, width, new):
    for kept in (width - 1, width, 10):
        x, weight, bias = inputs(5, new, width, dtype, device, batch=3)
        state = tensor(3, 5, kept, dtype=dtype, device=device)
        expected, after = step_loop(*map(wide, (x, state, weight, bias)), True)
        shifted = last(state.clone())
        y = metalcore.causal_conv1d_update(x, shifted, weight, bias, "silu")
        assert_near(y, expected, terms=8)
        assert torch.equal(wide(shifted), after)
        counts = torch.tensor([0, 5, 2 * kept + 1], dtype=torch.int32)
        place = torch.arange(kept)
        ring = torch.stack([entry[:, (place - c) % kept] for entry, c in zip(state.cpu(), counts)]).to(device)
        y = metalcore.causal_conv1d_update(x, ring, weight, bias, "silu", counts.to(device))
        assert_near(y, expected, terms=8)
        wanted = torch.stack([entry[:, (place - c - new) % kept] for entry, c in zip(after, counts)])
        assert torch.equal(wide(ring), wanted)


@each_dtype
@pytest.mark.parametrize("kept", [3, 4])
@pytest.mark.parametrize("width", [2, 4])
def test_steps_by_words(device, dtype, kept, width):
    """The kernel for one position, whose threads have the channels of a word, takes rows of the state that do not
    exist."""
    x, weight, bias = inputs(34, 1, width, dtype, device, batch=4)
    state = tensor(6, 34, kept, dtype=dtype, device=device)
    before, rows = state.clone(), torch.tensor([4, -1, 0, 6], dtype=torch.int32, device=device)
    with metalcore.recording.on_meta(device) as recorder:
        for given in (state, last(state)):
            tensors = [t.to("meta") for t in (x, given, weight, bias)]
            metalcore.causal_conv1d_update(*tensors, None, None, rows.to("meta"))
    assert [plan.variant for plan in recorder.recording.plans] == ["step", "narrow"]
    y = metalcore.causal_conv1d_update(x, state, weight, bias, "silu", None, rows)
    assert not y[1].any() and y[3].isnan().all()
    expected, after = step_loop(*(wide(t) for t in (x[[0, 2]], before[[4, 0]], weight, bias)), True)
    assert_near(y[[0, 2]], expected, terms=8)
    assert torch.equal(wide(state[[4, 0]]), after)
    assert torch.equal(state[[1, 2, 3, 5]], before[[1, 2, 3, 5]])


def test_steps_are_the_sequence(device):
    x, weight, bias = inputs(5, 9, WIDTH, device=device)
    whole = metalcore.causal_conv1d(x, weight, bias, activation="silu")
    y, state = metalcore.causal_conv1d(x[..., :4], weight, bias, None, None, True, "silu")
    parts = [
        y,
        *(metalcore.causal_conv1d_update(x[..., t], state, weight, bias, "silu")[..., None] for t in range(4, 9)),
    ]
    assert torch.equal(torch.cat(parts, -1), whole)


def test_rows_of_the_state(device):
    x, weight, _ = inputs(5, 1, WIDTH, device=device, batch=4)
    for where in (device, "cpu"):
        state = tensor(6, 5, 3).to(where)
        before, rows = state.clone(), torch.tensor([4, -1, 0, 6], device=where)
        y = metalcore.causal_conv1d_update(x[..., 0].to(where), state, weight.to(where), None, None, None, rows)
        assert not y[1].any() and y[3].isnan().all()
        expected, after = step_loop(*(wide(t) for t in (x[[0, 2]], before[[4, 0]], weight)), None, False)
        assert_near(y[[0, 2]][..., None], expected, terms=8)
        assert torch.equal(wide(state[[4, 0]]), after)
        assert torch.equal(state[[1, 2, 3, 5]], before[[1, 2, 3, 5]])


def test_a_step_that_needs_gradients(device):
    x, weight, bias = (t.requires_grad_() for t in inputs(3, 2, WIDTH, device=device))
    state = tensor(2, 3, 3, device=device)
    leaves = [wide(t).requires_grad_() for t in (x, weight, bias)]
    expected, after = step_loop(leaves[0], wide(state), *leaves[1:], True)
    y = metalcore.causal_conv1d_update(x, state, weight, bias, "silu")
    assert_near(y.detach(), expected.detach(), terms=8)
    assert torch.equal(wide(state), after.detach())
    wanted = torch.autograd.grad(expected.sum(), leaves)
    for actual, value in zip(torch.autograd.grad(y.sum(), (x, weight, bias)), wanted):
        assert_near(actual, value, terms=8)


def test_a_state_that_a_graph_saved(device):
    state, weight = tensor(2, 3, 3, device=device), tensor(3, WIDTH, device=device)
    product = state * torch.ones(3, device=device, requires_grad=True)
    metalcore.causal_conv1d_update(tensor(2, 3, device=device), state, weight)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


@pytest.mark.parametrize("width", [4, 9])
def test_update_without_positions(device, width):
    x, state = torch.zeros(2, 3, 0, device=device, requires_grad=True), torch.ones(2, 3, width - 1, device=device)
    y = metalcore.causal_conv1d_update(x, state, torch.ones(3, width, device=device))
    assert y.shape == x.shape and y.requires_grad and bool((state == 1).all())


def test_errors(device):
    for where in (device, "cpu"):
        x, weight, bias, state = (t.to(where) for t in inputs(3, 6, WIDTH, states=2))
        numbers, ends = torch.zeros(2, 6, dtype=torch.int32, device=where), torch.tensor([0, 6], device=where)
        for message, call in {
            "activation must be 'silu', 'swish' or None, not 'relu'": lambda: metalcore.causal_conv1d(
                x, weight, activation="relu"
            ),
            "seq_idx goes with neither": lambda: metalcore.causal_conv1d(x, weight, None, numbers, state),
            "weight must be .3, .*., not .2, 4.": lambda: metalcore.causal_conv1d(x, weight[:2]),
            "bias must be .3., not .2.": lambda: metalcore.causal_conv1d(x, weight, bias[:2]),
            "x must have 3 dimensions": lambda: metalcore.causal_conv1d(x[0], weight),
            "seq_idx must be int32 of the shape .2, 6.": lambda: metalcore.causal_conv1d(x, weight, None, numbers[:1]),
            "x have one batch entry": lambda: metalcore.causal_conv1d(x, weight, cu_seqlens=ends),
            "initial_state must be .2, 3, 3., not .1, 3, 3.": lambda: metalcore.causal_conv1d(
                x, weight, None, None, state[:1]
            ),
            "conv_state must be .2, 3, 3 or more., not .2, 3, 2.": lambda: metalcore.causal_conv1d_update(
                x, state[..., 1:], weight
            ),
            "cache_seqlens must be int32 of the shape .2.": lambda: metalcore.causal_conv1d_update(
                x, state, weight, cache_seqlens=ends[:1]
            ),
        }.items():
            with pytest.raises((RuntimeError, ValueError), match=message):
                call()
    with pytest.raises(TypeError, match="weight must be a tensor, not NoneType"):
        metalcore.causal_conv1d(x, None)
    with pytest.raises(TypeError, match="causal_conv1d: x must have floating-point numbers, not int32"):
        metalcore.causal_conv1d(x.int(), weight)
    with pytest.raises(TypeError, match="causal_conv1d: seq_idx must have integers, not bool"):
        metalcore.causal_conv1d(x, weight, seq_idx=x[:, 0] > 0)
    with pytest.raises(TypeError, match="causal_conv1d_update: cache_seqlens must have integers, not float32"):
        metalcore.causal_conv1d_update(x[..., 0], x.clone(), weight, cache_seqlens=x[:, 0, 0])


def test_ends_behind_the_last_position(device):
    """Numbers outside of x count as the nearest place that is possible."""
    x, weight = tensor(1, 3, 6, device=device), tensor(3, WIDTH, device=device)
    found, wanted = (
        metalcore.causal_conv1d(x, weight, return_final_state=True, cu_seqlens=torch.tensor(ends, device=device))
        for ends in ((-2, 4, 9), (0, 4, 6))
    )
    assert all(map(torch.equal, found, wanted))


def test_vmap(device):
    x, weight = tensor(3, 2, 4, 6, device=device), tensor(4, WIDTH, device=device)
    found = torch.vmap(lambda entry: metalcore.causal_conv1d(entry, weight, activation="silu"))(x)
    assert_near(
        found, torch.stack([wide(metalcore.causal_conv1d(entry, weight, activation="silu")) for entry in x]), terms=8
    )
