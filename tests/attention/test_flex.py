"""flex_attention: functions of scores and places in the kernels, against the formula in float64."""

import functools
import types

import pytest
import torch
from flex_cases import (
    HEADS,
    KEYS,
    QUERIES,
    alibi,
    causal,
    distances,
    documents,
    formula,
    latent,
    learned_cap,
    learned_tables,
    learned_vectors,
    natten,
    no_keys,
    other_reads,
    prefix_lm,
    relative_positions,
    sliding_window,
    softcap,
)
from rows import tuned
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask

import metalcore
from metalcore._core import generated_kernels
from metalcore.programs.flex import captured, kernels, launches, running
from metalcore.recording import on_meta, record

FORWARD = (sliding_window, prefix_lm, documents, natten, softcap, distances, latent)
BACKWARD = (no_keys, alibi, relative_positions, learned_cap, other_reads)


@functools.cache
def inputs(dtype, size=64, value_size=64, kv_heads=2):
    generator = torch.Generator().manual_seed(0)
    shapes = (2, HEADS, QUERIES, size), (2, kv_heads, KEYS, size), (2, kv_heads, KEYS, value_size)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def computed(function, case, tensors, device, dtype, backward):
    """The results of a case, and with `backward` all gradients, in float64 on the CPU."""
    score_mod, mask_mod, learned = case(device, dtype)
    leaves = [x.detach().to(device, dtype).requires_grad_(backward) for x in tensors]
    with torch.set_grad_enabled(backward):
        results = function(*leaves, score_mod, mask_mod)
    if backward:
        generator = torch.Generator().manual_seed(7)
        directions = [torch.randn(x.shape, generator=generator).to(x) for x in results]
        directions[1][results[1] == -torch.inf] = 0  # no number has a slope there
        gradients = torch.autograd.grad(results, [*leaves, *learned], directions)
        results = *results, *gradients
    return [x.detach().cpu().double() for x in results]


def ours(query, key, value, score_mod, mask_mod, block=64):
    mask = None
    if mask_mod is not None:
        shape = query.shape[0], None, query.shape[2], key.shape[2]
        mask = create_block_mask(mask_mod, *shape, device=query.device, BLOCK_SIZE=block)
    return metalcore.flex_attention(query, key, value, score_mod, mask, enable_gqa=True, return_lse=True)


def check(device, case, tensors, backward=False, function=ours):
    """An error is at most twice that of the formula in the tensors' dtype, and a rounding of the largest value. Sums of
    gradients over all scores cancel: their roundings are those of the sums' terms, which grow with the square root of
    their number."""
    dtype = tensors[0].dtype
    results = computed(function, case, tensors, device, dtype, backward)
    exact = computed(formula, case, tensors, "cpu", torch.float64, backward)
    usual = computed(formula, case, tensors, "cpu", dtype, backward)
    eps = torch.finfo(dtype).eps
    for index, (a, b, c) in enumerate(zip(results, exact, usual, strict=True)):
        assert a.shape == b.shape
        assert torch.equal(a == -torch.inf, b == -torch.inf), f"tensor {index}: other queries see no key"
        a, b, c = (x[b.isfinite()] for x in (a, b, c))
        bound = 2 * (c - b).abs().max() + eps * b.abs().max()
        if index > 4:
            bound = bound + eps * (2 * HEADS * QUERIES * KEYS) ** 0.5
        assert (a - b).abs().max() <= bound, f"tensor {index}: {(a - b).abs().max()} of {bound}"


@pytest.mark.parametrize("case", FORWARD, ids=lambda case: case.__name__)
def test_masks_and_scores(device, case):
    with tuned("apple7"):
        check(device, case, inputs(torch.float32))


@pytest.mark.parametrize("case", BACKWARD, ids=lambda case: case.__name__)
def test_gradients(device, case):
    with tuned("apple7"):
        check(device, case, inputs(torch.float32), backward=True)


@pytest.mark.parametrize(
    ("case", "most"),
    [(learned_tables, 1 << 28), (learned_tables, 1 << 12), (learned_vectors, 1 << 16)],
    ids=["side by side", "one after another", "vectors"],
)
def test_gradients_of_captured_tensors(device, case, most, monkeypatch):
    """By sums of rows and of tables, also where there is memory for few tables at once; no operation of PyTorch's over
    all scores takes part. The same bits come again."""
    monkeypatch.setattr(captured, "_BYTES", most)
    monkeypatch.setattr(running, "sdpa_dense_backward", None)
    with tuned("apple7"):
        check(device, case, inputs(torch.float32), backward=True)
        first, second = (computed(ours, case, inputs(torch.float32), device, torch.float32, True) for _ in range(2))
    assert all(map(torch.equal, first, second))


def test_threadgroups_of_a_dispatch_have_their_own_tables(device, monkeypatch):
    """Also where there is memory for tables of a few heads. The kernels' flex_place is written down here once more."""
    monkeypatch.setattr(captured, "_BYTES", 1 << 14)
    shared = []

    def noted(name, outs, ins, numbers, *more):
        if name.startswith("flex_dq"):
            first, now, items, sequences, in_turn = (numbers[i] for i in (38, 43, 46, 47, 48))
            slots = set()
            for index in range(first, first + more[1][0] // more[2][0]):
                turn = index // (in_turn * now) * in_turn
                part, head = divmod(index - turn * now, min(in_turn, sequences - turn))
                slots.add(((turn + head) % items, part))
            shared.append(len(slots) < index + 1 - first)
        return run(name, outs, ins, numbers, *more)

    run = kernels.ops._run_generated
    monkeypatch.setattr(kernels, "ops", types.SimpleNamespace(_run_generated=noted))
    query, key, value = (x.to(device) for x in inputs(torch.float32, kv_heads=HEADS))
    table = torch.rand(QUERIES + KEYS, device=device, requires_grad=True)
    with tuned("apple7"):
        metalcore.flex_attention(query, key, value, lambda s, b, h, q, k: s * table[q - k + KEYS - 1]).sum().backward()
    assert len(shared) > 1 and not any(shared)


@pytest.mark.parametrize(
    ("dtype", "size", "block", "length"),
    [(torch.float16, 64, 64, KEYS), (torch.bfloat16, 128, 128, KEYS), (torch.bfloat16, 64, 64, 128)],
    ids=str,
)
def test_wide_kernels(device, dtype, size, block, length):
    """Heads of 128 elements of 16 bits have larger tiles, where blocks fill them. Sequences that fill them have kernels
    without conditions."""
    tensors = [x[:, :, :length] for x in inputs(dtype, size, size)]
    with tuned("baseline"):
        check(device, softcap, tensors, True, functools.partial(ours, block=block))


def test_what_a_mask_finds_for_keys(device):
    """Threadgroups hold it for a tile. All of it is alike in a tile, or it is not, and the mask may read more."""

    def case(device, dtype):
        ids = torch.arange(384, device=device) // 200
        return None, lambda b, h, q, k: (ids[q] == ids[k]) & (q >= k) & (q >= 128) & (ids[k] + q + k != 300), ()

    def without_places(device, dtype):
        ids = torch.arange(384, device=device) // 200
        return None, lambda b, h, q, k: (ids[q] == ids[k]) & (q >= k) & (q >= 128), ()

    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(1, heads, 384, 128, generator=generator).to(torch.bfloat16) for heads in (3, 1, 1)]
    with tuned("baseline"):
        for mask in (case, without_places):
            check(device, mask, tensors, True, functools.partial(ours, block=128))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_scores_far_from_zero(device, dtype):
    """What is subtracted from scores changes with each block of keys, up and down, and is far below zero for some
    queries and far above it for others."""

    def case(device, dtype):
        return (lambda score, b, h, q, k: score + (q % 5 - 2) * 300 + (k // 16 % 3) * 7), causal(device, dtype)[1], ()

    with tuned("baseline"):
        check(device, case, inputs(dtype))


def test_long_heads(device):
    """Gradients of keys and those of values have a kernel each. Values have another size than keys."""
    with tuned("apple7"):
        check(device, causal, inputs(torch.float16, 128, 40, HEADS), backward=True)


def test_blocks_of_other_sizes(device):
    """A block may be less than a tile, no multiple of it, and of other sizes for queries and for keys."""
    with tuned("apple7"):
        for block in ((24, 40), (128, 16)):
            check(device, causal, inputs(torch.float32), True, functools.partial(ours, block=block))


def test_layouts_offsets_and_a_shared_batch(device):
    """Heads inside of rows, tensors that begin at an odd element, and keys of one batch item for all."""

    def function(query, key, value, score_mod, mask_mod):
        query = query.transpose(1, 2).contiguous().transpose(1, 2)
        key = torch.cat([key.new_zeros(1), key[:1].flatten()])[1:].view(key[:1].shape)
        mask = create_block_mask(mask_mod, 2, None, QUERIES, KEYS, device=query.device)
        return metalcore.flex_attention(query, key, value[:1], score_mod, mask, enable_gqa=True, return_lse=True)

    def expected(query, key, value, score_mod, mask_mod):
        return formula(query, key[:1].expand_as(key), value[:1].expand_as(value), score_mod, mask_mod)

    tensors = inputs(torch.float32)
    with tuned("apple7"):
        a = computed(function, causal, tensors, device, torch.float32, True)
        b = computed(expected, causal, tensors, "cpu", torch.float64, True)
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)


def test_numbers_make_no_new_kernel(device):
    """A function with another number, or with captured tensors of another size, is the same kernel."""
    query, key, value = (x.to(device) for x in inputs(torch.float32, kv_heads=HEADS))
    with tuned("apple7"):
        before = None
        for cap, window, length in ((3.0, 40, KEYS), (5.0, 20, 2 * KEYS)):
            bias = torch.rand(length, device=device)

            def score(s, b, h, q, k, bias=bias, cap=cap):
                return cap * torch.tanh(s / cap) + bias[k]

            _, mask, _ = sliding_window(device, torch.float32, window)
            out, _ = ours(query, key, value, score, mask)
            host = bias.cpu()
            expected, _ = formula(
                *(x.cpu().double() for x in (query, key, value)),
                lambda s, b, h, q, k, cap=cap, host=host: cap * torch.tanh(s / cap) + host[k],
                mask,
            )
            torch.testing.assert_close(out.cpu().double(), expected, rtol=1e-5, atol=1e-5)
            if before is None:
                before = len(generated_kernels._sources)
        assert len(generated_kernels._sources) == before


def test_hidden_blocks_are_not_visited(device):
    """What hidden blocks hold does not count, not even NaN, forward or backward."""
    query, key, value = (x.to(device) for x in inputs(torch.float32, kv_heads=HEADS))
    key[:, :, 128:], value[:, :, 128:] = torch.nan, torch.nan
    mask = create_block_mask(lambda b, h, q, k: k < 128, None, None, QUERIES, KEYS, device=device, BLOCK_SIZE=64)
    leaves = [x.requires_grad_() for x in (query, key, value)]
    with tuned("apple7"):
        out = metalcore.flex_attention(*leaves, block_mask=mask)
        out.sum().backward()
    assert out.isfinite().all()
    assert all(x.grad.isfinite().all() for x in leaves)
    assert not key.grad[:, :, 128:].any() and not value.grad[:, :, 128:].any()


def test_a_table_of_blocks_alone(device):
    """Blocks that are listed count, whatever their order; others do not, and numbers that name none are harmless."""
    query, key, value = (x.to(device) for x in inputs(torch.float32, kv_heads=HEADS))
    counts = torch.tensor([[[1, 2, 0]]], dtype=torch.int32, device=device)
    indices = torch.tensor([[[[2, 0, 9], [1, 0, 9], [0, 9, 9]]]], dtype=torch.int32, device=device)
    mask = BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=64, seq_lengths=(QUERIES, KEYS))
    with tuned("apple7"):
        out, aux = metalcore.flex_attention(
            query, key, value, block_mask=mask, return_aux=AuxRequest(lse=True, max_scores=True)
        )
    blocks = torch.tensor([[0, 0, 1], [1, 1, 0], [0, 0, 0]], dtype=torch.bool)
    seen = blocks.repeat_interleave(64, 0).repeat_interleave(64, 1)[:QUERIES, :KEYS]
    host = [x.cpu().double() for x in (query, key, value)]
    expected, lse = formula(*host, None, lambda b, h, q, k: seen)
    largest = (host[0] @ host[1].mT / 8).masked_fill(~seen, -torch.inf).amax(-1)
    torch.testing.assert_close(out.cpu().double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(aux.lse.cpu().double(), lse, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(aux.max_scores.cpu().double(), largest, rtol=1e-5, atol=1e-5)


def test_rows_of_many_blocks_come_first(device, monkeypatch):
    """The order of threadgroups does not change a result. Each head has a table, and two share a head of keys. A table
    has an order from its second use on."""
    monkeypatch.setattr(launches, "_FEWEST_IN_ORDER", 4)
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(1, heads, 256, 16, generator=generator).to(device) for heads in (4, 2, 2)]
    leaves = [x.requires_grad_() for x in tensors]

    def stripes(b, h, q, k):
        return (q // 32 * 5 + h) % 7 * 32 > (q - k).abs()

    mask, results = create_block_mask(stripes, None, 4, 256, 256, device=device, BLOCK_SIZE=64), []
    for _ in range(2):
        out = metalcore.flex_attention(*leaves, block_mask=mask, enable_gqa=True)
        results.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    assert all(map(torch.equal, *results))
    for of_keys in (False, True):
        tables = launches.tables_of(mask.as_tuple(), of_keys)
        blocks = (tables.partial[0] + tables.full[0]).gather(2, tables.order.long())
        assert (blocks.diff() <= 0).all() and (blocks.diff() < 0).any()


def test_what_would_run_is_known_without_memory(device):
    score_mod, _, _ = softcap(device, torch.float32)
    query = torch.ones(1, 2, 40, 64, device=device)
    with tuned("apple7"):
        _, ran = record(metalcore.flex_attention, query, query, query, score_mod)
        with on_meta(device) as explained:
            metalcore.flex_attention(*(query.to("meta") for _ in range(3)), score_mod)
    assert [step[:4] for step in ran.dispatches] == [step[:4] for step in explained.recording.dispatches]


def test_queries_that_do_not_exist_have_no_factor(device):
    """A tile has rows behind the last query, for which the captured tensor has no elements."""
    query, key, value = leaves = [x.requires_grad_() for x in torch.randn(3, 1, 2, 35, 64, device=device)]
    factors = torch.linspace(-1, 1, 35, device=device, requires_grad=True)
    out = metalcore.flex_attention(query, key, value, lambda score, b, h, q, k: score * factors[q])
    exact = ((query @ key.mT / 8 * factors[:, None]).softmax(3)) @ value
    found, expected = (torch.autograd.grad(x.sum(), (*leaves, factors)) for x in (out.square(), exact.square()))
    for one, other in zip(found, expected):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_nothing(device):
    query, key = torch.ones(2, 1, 3, 8, device=device), torch.ones(2, 1, 0, 8, device=device)
    out, lse = metalcore.flex_attention(query, key, key, return_lse=True)
    assert not out.any() and (lse == -torch.inf).all()
    assert metalcore.flex_attention(query[:0], key[:0], key[:0]).shape == (0, 1, 3, 8)


def test_errors_name_the_line(device):
    query = torch.ones(1, 2, 8, 16, device=device)
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 8, 8, device=device)

    def branches(score, b, h, q, k):
        return score if q > k else -score

    def sorts(score, b, h, q, k):
        return score + torch.rand_like(score)

    for function, message in ((branches, "a branch"), (sorts, "rand_like")):
        line = function.__code__.co_firstlineno + 1
        with pytest.raises((RuntimeError, NotImplementedError), match=rf"score_mod.*{message}|{message}") as caught:
            metalcore.flex_attention(query, query, query, function)
        assert "metalcore.flex_attention: score_mod" in str(caught.value)
        assert f"test_flex.py, line {line}, in {function.__name__}" in str(caught.value)
    with pytest.raises(
        RuntimeError, match=r"score_mod .*test_flex.py, line \d+, in .* must return a tensor with one number"
    ):
        metalcore.flex_attention(query, query, query, lambda score, b, h, q, k: score.expand(2))
    with pytest.raises(ValueError, match="block_mask is for 8 queries and 8 keys, not 4 and 8"):
        metalcore.flex_attention(query[:, :, :4], query, query, None, mask)
    with pytest.raises(ValueError, match="query has 2 heads and key has 1"):
        metalcore.flex_attention(query, query[:, :1], query[:, :1])
    with pytest.raises(ValueError, match="do not go together"):
        metalcore.flex_attention(query, query[..., :8], query)


factor = 1.0


def test_a_function_is_traced_again_where_it_would_be_another(device):
    """Numbers in closures and globals, numbers in tensors on the CPU, and captured tensors that change in place."""
    global factor
    query, key, value = (x.to(device) for x in inputs(torch.float32, kv_heads=HEADS))
    bias, on_cpu = torch.zeros(KEYS, device=device), torch.tensor(1.0)

    def call(power):
        return metalcore.flex_attention(query, key, value, lambda s, b, h, q, k: s * factor * power * on_cpu + bias[k])

    with tuned("apple7"):
        plain = call(1.0)
        assert torch.equal(call(1.0), plain)
        changed = [call(0.5)]
        factor = 0.5
        changed.append(call(1.0))
        factor = 1.0
        on_cpu.fill_(0.5)
        changed.append(call(1.0))
        on_cpu.fill_(1.0)
        assert all(torch.equal(x, changed[0]) and not torch.equal(x, plain) for x in changed)
        bias[0] = 100.0
        torch.testing.assert_close(call(1.0), value[:, :, :1].expand_as(query))
