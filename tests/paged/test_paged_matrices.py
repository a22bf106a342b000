"""Pages of 16-bit numbers, and requests of different lengths, with more than 4 rows: products of matrices."""

import pytest
import torch
from pages import Requests, attention
from references import assert_attention_near, assert_near, rounds_weights, tensor, wide
from rows import tuned
from test_paged_attention import decode, prefill

from metalcore.nn.attention import varlen_attn
from metalcore.recording import record

FAMILIES = ["baseline", "simulator", "hopper", "apple7"]
each_dtype = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)


def check(expected, values, function, *arguments, **options):
    """Calls the function, and checks its results by the bounds of the kernel that it takes."""
    found, made = record(function, *arguments, **options)
    assert_attention_near(found, expected, values, rounds_weights(made.kernels[0]))
    return found


def first_kernel(function, *arguments, **options):
    with tuned("baseline"):
        return record(function, *arguments, **options)[1].kernels[0].removeprefix("attention_decode_")


@each_dtype
@pytest.mark.parametrize("page_size", [1, 3, 16, 256, 999])
def test_decode(device, dtype, page_size):
    layout = "HND" if page_size == 3 else "NHD"
    requests = Requests(device, [1000, 1, 0, 41], page_size, 2, 64, dtype=dtype, layout=layout)
    q = tensor(4, 24, 64, dtype=dtype, device=device)
    expected = attention(q, requests, [1] * 4)
    assert first_kernel(decode, q, requests).startswith("matrices_64x16")
    for family in FAMILIES:
        with tuned(family):
            found = check(expected, requests.cache[1], decode, q, requests)
        assert (found[0][2] == 0).all() and (found[1][2] == -torch.inf).all()


@each_dtype
@pytest.mark.parametrize("page_size", [3, 256])
@pytest.mark.parametrize("batch, kernel", [(62, "lanes32"), (96, "lanes32"), (128, "lanes16")])
def test_lanes(device, dtype, page_size, batch, kernel):
    """Requests with few keys and none, where lanes load the operands of products."""
    requests = Requests(device, ([1600, 1, 0, 333, 767] * 26)[:batch], page_size, 2, 64, dtype=dtype)
    q = tensor(batch, 16, 64, dtype=dtype, device=device)
    with tuned("hopper"):
        made = record(decode, q, requests)[1]
        assert made.kernels[0].startswith(f"attention_decode_{kernel}_64x8")
        found = check(attention(q, requests, [1] * batch), requests.cache[1], decode, q, requests)
    assert (found[0][2] == 0).all() and (found[1][2] == -torch.inf).all()


@each_dtype
@pytest.mark.parametrize(
    "heads, longest, kernel",
    [
        (1, 9, "128x8"),
        (1, 14, "matrices_128x8"),
        (2, 14, "matrices_128x16"),
        (3, 14, "matrices_128x16"),
        (4, 14, "matrices_128x32"),
        (9, 14, "matrices_128x32"),
    ],
)
def test_prefill(device, dtype, heads, longest, kernel):
    """Rows of the usual request below and above those of a tile; requests without a query, and with some tiles."""
    lengths, counts = [37, 0, 150, 70, 12], [3, 0, longest, 1, 5]
    requests = Requests(device, lengths, 16, 2, 72, dtype=dtype, value_size=24)
    q = tensor(sum(counts), 2 * heads, 72, dtype=dtype, device=device)
    sinks = tensor(2 * heads, device=device)
    assert first_kernel(prefill, q, requests, counts).startswith(kernel)
    for options in ({}, {"causal": True}, {"window": (9, 2)}, {"causal": True, "sinks": sinks, "scale": 0.2}):
        expected = attention(q, requests, counts, **options)
        for family in FAMILIES:
            with tuned(family):
                check(expected, requests.cache[1], prefill, q, requests, counts, **options)


@each_dtype
def test_many_requests(device, dtype):
    """More requests than lanes."""
    counts = [1 + i % 3 for i in range(40)]
    counts[7] = 30
    requests = Requests(device, [count + 11 for count in counts], 4, 1, 16, dtype=dtype)
    q = tensor(sum(counts), 6, 16, dtype=dtype, device=device)
    assert first_kernel(prefill, q, requests, counts).startswith("matrices_64x32")
    expected = attention(q, requests, counts, causal=True)
    check(expected, requests.cache[1], prefill, q, requests, counts, causal=True)


@each_dtype
def test_a_page_that_does_not_exist_is_not_seen(device, dtype):
    """Nor is the page whose memory the kernel reads in its place, which is full of NaN here."""
    requests = Requests(device, [24], 8, 1, 64, dtype=dtype)
    indptr, indices, last = requests.pages
    order = torch.tensor([i for i in range(6) if i not in indices] + indices.tolist(), device=device)
    pools = [pool[order] for pool in requests.cache]
    wrong = torch.tensor([3, 1000, 5], dtype=torch.int32, device=device)
    q = tensor(1, 12, 64, dtype=dtype, device=device)
    others = False, None, None, None, 1 << 30, 1 << 30, 0.125, 0.0
    assert pools[0][0].isnan().all()
    call = lambda: torch.ops.metalcore.paged_attention(q, None, *pools, indptr, wrong, last, *others)  # noqa: E731
    assert first_kernel(call).startswith("matrices")
    for rows in (requests.keys, requests.values):
        rows[0] = torch.cat([rows[0][:8], rows[0][16:]])
    check(attention(q, requests, [1]), requests.values[0], call)


@each_dtype
def test_queries_and_caches_of_other_dtypes(device, dtype):
    requests = Requests(device, [30, 7], 8, 2, 64, dtype=dtype)
    q = tensor(2, 32, 64, device=device)
    assert first_kernel(decode, q, requests).startswith("64x8")
    assert first_kernel(decode, q.to(dtype), requests).startswith("matrices")


@each_dtype
def test_variable_lengths(device, dtype):
    """Keys that are not in pages follow each other."""
    starts_q, starts_k = [0, 3, 3, 8], [0, 150, 161, 400]
    q, k, v = (tensor(length, heads, 64, dtype=dtype, device=device) for length, heads in ((8, 4), (400, 2), (400, 2)))
    offsets = [torch.tensor(starts, dtype=torch.int32, device=device) for starts in (starts_q, starts_k)]
    call = lambda: varlen_attn(q, k, v, *offsets, 5, 239, enable_gqa=True)  # noqa: E731
    assert first_kernel(call).startswith("matrices_64x8")
    found = call()
    for i in (0, 2):
        rows, keys = slice(*starts_q[i : i + 2]), slice(*starts_k[i : i + 2])
        of_request = (wide(x[part].transpose(0, 1)) for x, part in ((q, rows), (k, keys), (v, keys)))
        exact = torch.nn.functional.scaled_dot_product_attention(*of_request, enable_gqa=True)
        assert_near(found[rows], exact.transpose(0, 1), terms=8)
