"""Calls of every C function, each with its results' references in float64."""

import sys
from pathlib import Path

import torch
from c_program import Offset, Output, name_of
from references import tensor, wide

sys.path.append(str(Path(__file__).resolve().parents[1] / "paged"))
from pages import Requests, attention, offsets

INT32, INT64 = torch.int32, torch.int64


def softmax(dtype, batch=5, vocab=37, temperature=0.7, offset=0, out_offset=0):
    x = tensor(batch, vocab, dtype=dtype, scale=3)
    out = Output(batch, vocab, dtype=dtype, offset=out_offset)
    return ("softmax", [Offset(x, offset), out, batch, vocab, temperature], [(wide(x) / temperature).softmax(-1)])


def silu_and_mul(dtype, rows=3, width=24):
    x = tensor(rows, 2 * width, dtype=dtype)
    gate, up = wide(x).chunk(2, -1)
    return ("silu_and_mul", [x, Output(rows, width, dtype=dtype), rows, width], [torch.nn.functional.silu(gate) * up])


def _norm(x, weight, eps):
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * (1 if weight is None else wide(weight))


def rms_norm(dtype, rows=4, width=48, weighted=True, out_offset=0):
    x, weight = tensor(rows, width, dtype=dtype), tensor(width, dtype=dtype) if weighted else None
    out = Output(rows, width, dtype=dtype, offset=out_offset)
    return ("rms_norm", [x, weight, out, rows, width, 1e-5], [_norm(wide(x), weight, 1e-5)])


def add_rms_norm(dtype, rows=4, width=48):
    x, residual, weight = (tensor(*shape, dtype=dtype) for shape in ((rows, width), (rows, width), (width,)))
    results = [Output(rows, width, dtype=dtype) for _ in range(2)]
    total = wide(x) + wide(residual)
    rounded = wide(total.to(dtype))  # the norm is that of the sum as it is written
    return (
        "add_rms_norm",
        [x, residual, weight, *results, rows, width, 1e-5],
        [_norm(rounded, weight, 1e-5), total],
    )


def _rotated(x, cosine, sine, interleaved):
    pairs = cosine.shape[-1]
    cosine, sine = cosine[:, None], sine[:, None]
    y = x.clone()
    a, b = (
        (x[..., 0 : 2 * pairs : 2], x[..., 1 : 2 * pairs : 2]) if interleaved else x[..., : 2 * pairs].split(pairs, -1)
    )
    first, second = a * cosine - b * sine, b * cosine + a * sine
    if interleaved:
        y[..., 0 : 2 * pairs : 2], y[..., 1 : 2 * pairs : 2] = first, second
    else:
        y[..., : 2 * pairs] = torch.cat([first, second], -1)
    return y


def rope(dtype, tokens=5, heads=(4, 2), size=16, pairs=8, interleaved=0, in_place=False):
    q, k = (tensor(tokens, count, size, dtype=dtype) for count in heads)
    rows = 9
    angles = torch.rand(rows, pairs) * 6
    positions = torch.randint(0, rows, (tokens,))
    tables = [angles.cos(), angles.sin()]
    chosen = [wide(table)[positions] for table in tables]
    expected = [_rotated(wide(x), *chosen, interleaved) for x in (q, k)]
    numbers = [tokens, *heads, size, pairs, rows, interleaved]
    if in_place:
        places = [Output(*x.shape, dtype=dtype, initial=x) for x in (q, k)]
        return ("rope_in_place", [*places, *tables, positions, *numbers], expected)
    results = [Output(*x.shape, dtype=dtype) for x in (q, k)]
    return ("rope", [q, k, *tables, positions, *results, *numbers], expected)


def embedding(dtype, rows=11, width=20, out_offset=0):
    table = tensor(rows, width, dtype=dtype)
    indices = torch.tensor([3, 0, 10, 3, -1, 11], dtype=INT32)
    expected = torch.full((len(indices), width), torch.nan, dtype=torch.float64)
    expected[:4] = wide(table)[indices[:4].long()]
    out = Output(len(indices), width, dtype=dtype, offset=out_offset)
    return ("embedding", [table, indices, out, rows, width, len(indices)], [expected])


def add(dtype, count=37, in_place=False, out_offset=0):
    x, y = tensor(count, dtype=dtype), tensor(count, dtype=dtype)
    if in_place:
        return ("add_in_place", [x, Output(count, dtype=dtype, initial=y), count], [wide(x) + wide(y)])
    return ("add", [x, y, Output(count, dtype=dtype, offset=out_offset), count], [wide(x) + wide(y)])


def cast(dtype, count=64, out_offset=0):
    other = torch.float32 if dtype == torch.bfloat16 else torch.bfloat16
    x = tensor(count, dtype=dtype)
    out = Output(count, dtype=other, offset=out_offset)
    return (f"cast_{name_of(dtype)}_to", [x, out, count], [wide(x.to(other))])


def topk(dtype, batch=3, vocab=50, k=7):
    x = tensor(batch, vocab, dtype=dtype)
    values, indices = wide(x).sort(dim=-1, descending=True, stable=True)
    results = [Output(batch, k, dtype=dtype), Output(batch, k, dtype=INT64)]
    return ("topk", [x, *results, batch, vocab, k], [values[:, :k], indices[:, :k]])


def top_k_mask_logits(dtype, batch=3, vocab=50, k=7):
    x = tensor(batch, vocab, dtype=dtype)
    least = wide(x).topk(min(k, vocab)).values[:, -1:]
    expected = wide(x).masked_fill(wide(x) < least, -torch.inf)
    return ("top_k_mask_logits", [x, Output(batch, vocab, dtype=dtype), batch, vocab, k], [expected])


def gemm(dtype, m=5, n=24, k=40, transpose=(0, 0), bias=True, spare=0):
    shapes = [(k, m) if transpose[0] else (m, k), (n, k) if transpose[1] else (k, n)]
    wider = [tensor(rows, columns + spare, dtype=dtype) for rows, columns in shapes]
    a, b = (wide(x)[:, : shape[1]] for x, shape in zip(wider, shapes))
    added = tensor(n, dtype=dtype) if bias else None
    expected = (a.mT if transpose[0] else a) @ (b.mT if transpose[1] else b) + (wide(added) if bias else 0)
    ends = [x.shape[1] for x in wider]
    return ("gemm", [*wider, added, Output(m, n, dtype=dtype), m, n, k, *transpose, *ends], [expected])


def grouped_gemm(dtype, ends=(3, 3, 8), rows=9, n=12, k=20, transpose=0):
    a, b = tensor(rows, k, dtype=dtype), tensor(len(ends), *((n, k) if transpose else (k, n)), dtype=dtype)
    expected = torch.zeros(rows, n, dtype=torch.float64)
    for group, (begin, end) in enumerate(zip((0, *ends), ends)):
        expected[begin:end] = wide(a)[begin:end] @ (wide(b)[group].mT if transpose else wide(b)[group])
    numbers = [torch.tensor(ends, dtype=INT32), Output(rows, n, dtype=dtype), rows, n, k, len(ends), transpose]
    return ("grouped_gemm", [a, b, *numbers], [expected])


def sample(dtype, batch=6, vocab=50, temperature=0.8, top_k=7, top_p=0.9):
    logits, uniform = tensor(batch, vocab, dtype=dtype, scale=2), torch.rand(batch)
    drawn = []
    for row, number in zip(wide(logits), uniform.double()):
        if temperature == 0:
            drawn.append(int(row.argmax()))
            continue
        probabilities = (row / temperature).softmax(-1)
        order = probabilities.sort(descending=True, stable=True).indices
        kept = torch.zeros(vocab, dtype=torch.bool)
        if top_k:
            order = order[row[order] >= row[order[min(top_k, vocab) - 1]]]
        share = probabilities[order] / probabilities[order].sum()
        count = int((share.cumsum(0) < top_p).sum()) + 1
        kept[order[:count]] = True
        # The largest first where top_k limits them, else lane by lane, for up to 32 lanes' work of 4 logits each.
        walk = order.tolist() if top_k else sorted(range(vocab), key=lambda i: i % 32)
        weights = torch.where(kept, probabilities, 0.0)[walk]
        drawn.append(walk[int((weights.cumsum(0) <= number * weights.sum()).sum())])
    arguments = [logits, uniform, Output(batch, dtype=INT64), batch, vocab, temperature, top_k, top_p]
    return ("sample", arguments, [torch.tensor(drawn, dtype=INT64)])


def _pages(requests, heads, size, layout):
    pool = requests.cache[0]
    indptr, indices, last = requests.pages
    page_size = pool.shape[1 if layout == "NHD" else 2]
    sizes = [pool.shape[0], page_size, heads, size, int(layout == "HND"), len(last), len(indices)]
    return [*sizes, indptr, indices, last]


def batch_prefill(dtype, layout="NHD", causal=1, window=-1, softcap=0.0, lse=True, heads=(4, 2), size=24):
    lengths, counts = [37, 0, 5, 20], [3, 0, 5, 1]
    requests = Requests("cpu", lengths, 8, heads[1], size, dtype=dtype, layout=layout)
    tokens = sum(counts)
    q = tensor(tokens, heads[0], size, dtype=dtype)
    expected = attention(q, requests, counts, causal=bool(causal), window=(window, -1), softcap=softcap, scale=0.2)
    out, sums = Output(tokens, heads[0], size, dtype=dtype), Output(tokens, heads[0], dtype=torch.float32)
    arguments = [*_pages(requests, heads[1], size, layout), q, offsets(counts, "cpu"), *requests.cache, out]
    arguments += [sums if lse else None, tokens, heads[0], causal, window, 0.2, softcap]
    return ("batch_prefill", arguments, list(expected) if lse else [expected[0]])


def batch_decode(dtype, layout="HND", window=-1, heads=(4, 2), size=32):
    lengths = [37, 0, 5, 300]
    requests = Requests("cpu", lengths, 16, heads[1], size, dtype=dtype, layout=layout)
    q = tensor(len(lengths), heads[0], size, dtype=dtype)
    expected = attention(q, requests, [1] * len(lengths), causal=True, window=(window, -1), scale=0.2)
    out, sums = Output(*q.shape, dtype=dtype), Output(*q.shape[:2], dtype=torch.float32)
    arguments = [*_pages(requests, heads[1], size, layout), q, *requests.cache, out, sums, heads[0], window, 0.2, 0.0]
    return ("batch_decode", arguments, list(expected))


def paged_append(dtype, layout="NHD", heads=2, size=24):
    requests = Requests("cpu", [5, 9], 4, heads, size, dtype=dtype, layout=layout)
    pools = [pool.nan_to_num(0.0) for pool in requests.cache]
    key, value = tensor(3, heads, size, dtype=dtype), tensor(3, heads, size, dtype=dtype)
    batch, positions = [0, 1, 1], [4, 0, 900]  # the last one has no place
    expected = [wide(pool) for pool in pools]
    indptr, indices, _ = requests.pages
    for result, new in zip(expected, (key, value)):
        for token in range(2):
            page = indices[indptr[batch[token]] + positions[token] // 4]
            place = result[page] if layout == "NHD" else result[page].transpose(0, 1)
            place[positions[token] % 4] = wide(new[token])
    numbers = [torch.tensor(values, dtype=INT32) for values in (batch, positions)]
    results = [Output(*pool.shape, dtype=dtype, initial=pool) for pool in pools]
    return ("paged_append", [*_pages(requests, heads, size, layout), key, value, *numbers, *results, 3], expected)


def every_case(dtype):
    """[(function, arguments, results)]"""
    item = torch.empty((), dtype=dtype).element_size()
    cases = [
        softmax(dtype),
        softmax(dtype, batch=2, vocab=1000, temperature=2.5),
        softmax(dtype, batch=3, vocab=64, offset=item, out_offset=item),
        softmax(dtype, batch=3, vocab=64, offset=0, out_offset=item),
        softmax(dtype, batch=0),
        silu_and_mul(dtype),
        silu_and_mul(dtype, rows=5, width=7),
        rms_norm(dtype),
        rms_norm(dtype, width=2100, weighted=False),
        rms_norm(dtype, width=64, out_offset=item),
        add_rms_norm(dtype),
        rope(dtype),
        rope(dtype, size=20, pairs=5, interleaved=1),
        rope(dtype, in_place=True, pairs=4),
        embedding(dtype),
        embedding(dtype, width=7),
        embedding(dtype, width=16, out_offset=item),
        sample(dtype),
        sample(dtype, temperature=0.0, top_k=0, top_p=1.0),
        sample(dtype, top_k=0, top_p=1.0),
        add(dtype),
        add(dtype, count=64),
        add(dtype, count=64, out_offset=item),
        add(dtype, in_place=True),
        topk(dtype),
        topk(dtype, vocab=9, k=9),
        topk(dtype, vocab=1500, k=1100),
        top_k_mask_logits(dtype),
        top_k_mask_logits(dtype, k=100),
        gemm(dtype),
        gemm(dtype, m=70, n=33, transpose=(1, 0), bias=False),
        gemm(dtype, m=70, n=40, k=24, transpose=(0, 1), spare=3),
        gemm(dtype, m=1, transpose=(1, 1), spare=8),
        gemm(dtype, k=0),
        grouped_gemm(dtype),
        grouped_gemm(dtype, transpose=1),
        batch_prefill(dtype),
        batch_prefill(dtype, "HND", causal=0, softcap=3.0, lse=False),
        batch_prefill(dtype, window=4),
        batch_decode(dtype),
        batch_decode(dtype, "NHD", window=9),
        paged_append(dtype),
        paged_append(dtype, "HND"),
    ]
    named = [(f"{function}_{name_of(dtype)}", arguments, results) for function, arguments, results in cases]
    casts = [cast(dtype), cast(dtype, count=13), cast(dtype, out_offset=4)]
    other = "float" if dtype == torch.bfloat16 else "bfloat16"
    return named + [(f"{function}_{other}", arguments, results) for function, arguments, results in casts]
