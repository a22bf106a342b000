"""flash_attn's functions: pages, used and padded keys, caches that grow, against sequences by themselves in float64."""

import pytest
import torch
from references import DTYPES

from metalcore.integrations.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from metalcore.nn.attention import varlen_attn

HEADS, SHARED, SIZE = 4, 2, 16
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def alone(q, k, v, causal=False, slopes=None, window=(-1, -1)):
    """One sequence (tokens, heads, size) in float64, with gradients."""
    q, k, v = (t.transpose(0, 1) for t in (q, k, v))
    k, v = (t.repeat_interleave(len(q) // len(t), 0) for t in (k, v))
    distance = torch.arange(k.shape[1]) - torch.arange(q.shape[1])[:, None] - (k.shape[1] - q.shape[1])
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if slopes is not None:
        scores = scores - slopes[:, None, None] * distance.abs()
    hidden = (distance > (0 if causal else distance.numel())) | (distance < -window[0] if window[0] >= 0 else False)
    scores = scores.masked_fill(hidden, -torch.inf)
    return (scores.softmax(-1).nan_to_num(0.0) @ v).transpose(0, 1)


def check(found, expected, dtype, roundings=2):
    """Sums of up to 80 terms in float32, and roundings of weights and results to the dtype."""
    largest = expected.abs().max().item()
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(
        found.detach().cpu().double(), expected.detach(), rtol=roundings * eps, atol=(roundings * eps + 1e-5) * largest
    )


def starts(*lengths, device):
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)


def randn(*shape, dtype, device):
    return torch.randn(shape).to(device, dtype)


@each_dtype
@pytest.mark.parametrize("causal", [False, True])
def test_slopes(device, dtype, causal):
    """flash_attn_func, and the same sequences one after the other."""
    q = randn(2, 9, HEADS, SIZE, dtype=dtype, device=device)
    k, v = (randn(2, 13, SHARED, SIZE, dtype=dtype, device=device) for _ in "kv")
    slopes = torch.rand(2, HEADS, device=device)
    found, lse, _ = flash_attn_func(q, k, v, causal=causal, alibi_slopes=slopes, return_attn_probs=True)
    expected = torch.stack(
        [alone(*(t[n].cpu().double() for t in (q, k, v)), causal, slopes[n].cpu().double()) for n in range(2)]
    )
    check(found, expected, dtype)
    bounds = starts(9, 9, device=device), starts(13, 13, device=device)
    flat = (t.flatten(0, 1) for t in (q, k, v))
    packed, sums, _ = flash_attn_varlen_func(
        *flat, *bounds, 9, 13, causal=causal, alibi_slopes=slopes, return_attn_probs=True
    )
    check(packed.unflatten(0, (2, 9)), expected, dtype)
    torch.testing.assert_close(sums.unflatten(1, (2, 9)).transpose(0, 1), lse, rtol=1e-5, atol=1e-5)


def pages_of(k, lengths, page, most):
    """The keys of sequences in pages of a pool, in any order, and the table: -1 behind the last page."""
    count = sum(-(-n // page) for n in lengths)
    pool = torch.full((count + 1, page, *k.shape[1:]), torch.nan, dtype=k.dtype)
    table = torch.full((len(lengths), most), -1, dtype=torch.int32)
    order = iter(torch.randperm(count + 1).tolist())
    begin = 0
    for request, length in enumerate(lengths):
        for number in range(-(-length // page)):
            table[request, number] = next(order)
            part = k[begin + number * page : begin + min(length, (number + 1) * page)]
            pool[table[request, number], : len(part)] = part
        begin += length
    return pool, table


QUERIES, KEYS = (3, 0, 5, 1), (20, 4, 5, 0)


@each_dtype
@pytest.mark.parametrize("page", [4, 300])
@pytest.mark.parametrize("slopes", [False, True])
def test_block_table(device, dtype, page, slopes):
    """No page is copied without slopes. Memory behind the last token may hold anything."""
    q = torch.randn(sum(QUERIES), HEADS, SIZE).to(dtype)
    k, v = (torch.randn(sum(KEYS), SHARED, SIZE).to(dtype) for _ in "kv")
    state = torch.get_rng_state()
    k_pool, table = pages_of(k, KEYS, page, 6)
    torch.set_rng_state(state)
    v_pool, same = pages_of(v, KEYS, page, 6)
    assert torch.equal(table, same)
    if slopes:
        k_pool, v_pool = k_pool.nan_to_num(7.0), v_pool.nan_to_num(7.0)
    alibi = torch.rand(4, HEADS) if slopes else None
    bounds = starts(*QUERIES, device=device), starts(*KEYS, device=device)
    found = flash_attn_varlen_func(
        q.to(device),
        k_pool.to(device),
        v_pool.to(device),
        *bounds,
        max(QUERIES),
        max(KEYS),
        causal=True,
        alibi_slopes=None if alibi is None else alibi.to(device),
        block_table=table.to(device),
    )
    parts = zip(q.double().split(QUERIES), k.double().split(KEYS), v.double().split(KEYS))
    expected = [alone(*t, True, None if alibi is None else alibi[n].double()) for n, t in enumerate(parts)]
    check(found, torch.cat(expected), dtype)
    if not slopes:
        used = torch.tensor(KEYS, device=device)
        arguments = q.to(device), k_pool.to(device), v_pool.to(device), bounds[0], None, max(QUERIES), max(KEYS)
        again = varlen_attn(
            *arguments, window_size=(-1, 0), enable_gqa=True, seqused_k=used, block_table=table.to(device)
        )
        torch.testing.assert_close(again, found, rtol=0, atol=0)


@each_dtype
@pytest.mark.parametrize("padded", [False, True])
def test_used_and_padded_keys(device, dtype, padded):
    """Keys that are not seen have no gradients, whatever numbers they have."""
    used, left = (13, 4, 0, 7), (2, 4, 0, 0)
    slots = 15
    q = torch.randn(sum(QUERIES), HEADS, SIZE).to(device, dtype).requires_grad_()
    k, v = (torch.randn(4 * slots, SHARED, SIZE).to(device, dtype).requires_grad_() for _ in "kv")
    slopes = torch.rand(4, HEADS, device=device)
    bounds = starts(*QUERIES, device=device), starts(*[slots] * 4, device=device)
    counts = {"seqused_k": torch.tensor(used, device=device)}
    if padded:
        counts["leftpad_k"] = torch.tensor(left, device=device)
    found = flash_attn_varlen_func(
        q, k, v, *bounds, max(QUERIES), max(used), causal=True, alibi_slopes=slopes, **counts
    )
    wide = [t.detach().cpu().double().requires_grad_() for t in (q, k, v)]
    parts = []
    for n, queries in enumerate(wide[0].split(QUERIES)):
        seen = slice(slots * n + (left[n] if padded else 0), slots * n + used[n])
        parts.append(alone(queries, wide[1][seen], wide[2][seen], True, slopes[n].cpu().double()))
    expected = torch.cat(parts)
    check(found, expected, dtype)
    gradients = torch.autograd.grad(found.float().sin().sum(), (q, k, v))
    for ours, theirs in zip(gradients, torch.autograd.grad(expected.sin().sum(), wide)):
        check(ours, theirs, dtype, roundings=4)
        assert not ours.cpu()[theirs == 0].any()


@each_dtype
def test_gradients_through_pages(device, dtype):
    k_pool = torch.randn(5, 4, SHARED, SIZE).to(device, dtype).requires_grad_()
    q = torch.randn(5, HEADS, SIZE).to(device, dtype)
    table = torch.tensor([[3, 1, 0], [2, 4, 0]], dtype=torch.int32, device=device)
    bounds = starts(3, 2, device=device), starts(9, 6, device=device)
    found = flash_attn_varlen_func(q, k_pool, k_pool, *bounds, 3, 9, block_table=table)
    (gradient,) = torch.autograd.grad(found.float().sin().sum(), k_pool)
    wide = k_pool.detach().cpu().double().requires_grad_()
    keys = [wide[table[n].long().cpu()].flatten(0, 1)[:length] for n, length in enumerate((9, 6))]
    parts = [alone(part, key, key) for part, key in zip(q.cpu().double().split((3, 2)), keys)]
    check(gradient, torch.autograd.grad(torch.cat(parts).sin().sum(), wide)[0], dtype, roundings=4)


@each_dtype
@pytest.mark.parametrize("kind", ["plain", "items", "pages", "padded", "slopes"])
@pytest.mark.parametrize("new", [0, 1, 3])
def test_caches_that_grow(device, dtype, kind, new):
    """New keys go to their places, and nothing else in the cache changes."""
    batch, room, lengths = 2, 24, torch.tensor([7, 19])
    pools = [torch.randn(3, room, SHARED, SIZE).to(device, dtype) for _ in "kv"]
    before = [pool.clone() for pool in pools]
    options = {}
    items = torch.arange(batch)
    if kind == "items":
        items = torch.tensor([2, 0])
        options["cache_batch_idx"] = items.to(device, torch.int32)
    view, left = pools, torch.zeros(batch, dtype=torch.long)
    if kind == "pages":  # of 8 tokens, in their order
        view = [pool.view(9, 8, SHARED, SIZE) for pool in pools]
        options["block_table"] = torch.arange(6, dtype=torch.int32, device=device).view(2, 3)
    if kind == "padded":
        left = torch.tensor([2, 5])
        options["cache_leftpad"] = left.to(device, torch.int32)
    slopes = torch.rand(batch, HEADS) if kind == "slopes" else None
    q = torch.randn(batch, max(new, 1), HEADS, SIZE).to(device, dtype)
    if new:
        options.update({name: torch.randn(batch, new, SHARED, SIZE).to(device, dtype) for name in "kv"})
    found, lse = flash_attn_with_kvcache(
        q,
        *view,
        cache_seqlens=lengths.to(device, torch.int32),
        causal=True,
        alibi_slopes=None if slopes is None else slopes.to(device),
        return_softmax_lse=True,
        **options,
    )
    for pool, old, name in zip(pools, before, "kv"):
        if new:
            for n, item in enumerate(items):
                old[item, lengths[n] : lengths[n] + new] = options[name][n]
        assert torch.equal(pool, old)
    expected = [
        alone(
            q[n].cpu().double(),
            *(pool[item, left[n] : lengths[n] + new].cpu().double() for pool in pools),
            True,
            None if slopes is None else slopes[n].double(),
        )
        for n, item in enumerate(items)
    ]
    check(found, torch.stack(expected), dtype)
    assert lse.shape == (batch, HEADS, max(new, 1)) and lse.isfinite().all()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_rotation(device, interleaved, causal):
    """As complex numbers: neighbours or halves are real and imaginary parts."""
    lengths, half = torch.tensor([3, 10]), 4
    angles = torch.rand(32, half) * 6
    q, k = torch.randn(2, 3, HEADS, SIZE), torch.randn(2, 3, SHARED, SIZE)
    pool = torch.randn(2, 16, SHARED, SIZE)

    def rotated(x, moves):
        places = lengths[:, None] + (torch.arange(3) if moves else torch.zeros(3, dtype=torch.long))
        turn = torch.polar(torch.ones(()).double(), angles[places].double()).unsqueeze(2)
        x = x.double()
        part = x[..., : 2 * half]
        a, b = (part[..., ::2], part[..., 1::2]) if interleaved else part.chunk(2, -1)
        found = torch.complex(a, b) * turn
        pair = found.real, found.imag
        part = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
        return torch.cat([part, x[..., 2 * half :]], -1)

    keys = pool.double()
    for n in range(2):
        keys[n, lengths[n] : lengths[n] + 3] = rotated(k, True)[n]
    expected = [
        alone(rotated(q, causal)[n], keys[n, : lengths[n] + 3], keys[n, : lengths[n] + 3], causal) for n in range(2)
    ]
    tables = angles.cos().to(device), angles.sin().to(device)
    cache, values = pool.to(device), keys.float().to(device)
    found = flash_attn_with_kvcache(
        q.to(device),
        cache,
        values,
        k.to(device),
        torch.stack([values[n, lengths[n] : lengths[n] + 3] for n in range(2)]),
        *tables,
        lengths.to(device),
        causal=causal,
        rotary_interleaved=interleaved,
    )
    check(cache, keys, torch.float32)
    check(found, torch.stack(expected), torch.float32)


def test_compiled(device):
    q = torch.randn(4, HEADS, SIZE, device=device)
    pool = torch.randn(6, 8, SHARED, SIZE, device=device)
    table = torch.tensor([[3, 1], [2, 4]], dtype=torch.int32, device=device)
    bounds, used = starts(3, 1, device=device), torch.tensor([9, 14], device=device)

    def attend(q, slopes):
        return flash_attn_varlen_func(
            q, pool, pool, bounds, bounds, 3, 16, alibi_slopes=slopes, block_table=table, seqused_k=used
        )

    for slopes in (None, torch.rand(HEADS, device=device)):
        compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(q, slopes), attend(q, slopes))


def test_errors(device):
    q = torch.randn(2, 3, HEADS, SIZE, device=device)
    cache = torch.randn(2, 8, SHARED, SIZE, device=device)
    flat, bounds = q.flatten(0, 1), starts(3, 3, device=device)
    with pytest.raises(ValueError, match=r"alibi_slopes must have the shape \(4,\) or \(2, 4\), not \(2,\)"):
        flash_attn_func(q, cache, cache, alibi_slopes=torch.ones(2, device=device))
    with pytest.raises(RuntimeError, match=r"seqused_k must have the shape \(2,\) and be on"):
        flash_attn_varlen_func(flat, flat, flat, bounds, bounds, 3, 3, seqused_k=bounds)
    with pytest.raises(RuntimeError, match="leftpad_k must be integers, not torch.float32"):
        flash_attn_varlen_func(flat, flat, flat, bounds, bounds, 3, 3, leftpad_k=torch.ones(2, device=device))
    with pytest.raises(RuntimeError, match="key and value .pages, page_size, heads, size."):
        flash_attn_varlen_func(flat, flat, flat, bounds, bounds, 3, 3, block_table=bounds[None])
    used, table = torch.tensor([4, 17]), torch.zeros(2, 2, dtype=torch.int32)
    on_host = [t.cpu() for t in (flat, cache, cache, bounds, bounds)]
    with pytest.raises(ValueError, match="request 1 has 17 tokens, and 2 pages of 8 in block_table"):
        flash_attn_varlen_func(*on_host, 3, 17, seqused_k=used, block_table=table)
    with pytest.raises(ValueError, match="block_table needs seqused_k"):
        varlen_attn(flat, cache, cache, bounds, None, 3, 8, enable_gqa=True, block_table=bounds[None])
    with pytest.raises(ValueError, match="k and v, and rotary_cos and rotary_sin, go together"):
        flash_attn_with_kvcache(q, cache, cache, k=cache)
    with pytest.raises(ValueError, match="k needs cache_seqlens"):
        flash_attn_with_kvcache(q, cache, cache, k=cache, v=cache)
    with pytest.raises(ValueError, match="block_table goes with neither"):
        flash_attn_with_kvcache(q, cache, cache, cache_batch_idx=bounds, block_table=bounds[None])
