"""batch_prefill, batch_decode and merge_states."""

import pytest
import torch
from pages import Requests, attention, offsets
from references import DTYPES, assert_attention_near, assert_near, check_operator, rounds_weights, tensor, wide
from rows import tuned

import metalcore
from metalcore.paged import batch_decode, batch_prefill, merge_states
from metalcore.recording import on_meta, record

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
each_layout = pytest.mark.parametrize("layout", ["NHD", "HND"])
each_width = pytest.mark.usefixtures("each_width")
LENGTHS, COUNTS = [37, 0, 5, 70], [3, 0, 5, 1]


def check(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        assert_near(ours, theirs, terms=8)


def decode(q, requests, **options):
    return batch_decode(q, requests.cache, *requests.pages, return_lse=True, **requests.layout, **options)


def prefill(q, requests, counts, **options):
    pages = requests.pages
    return batch_prefill(
        q, requests.cache, offsets(counts, q.device), *pages, return_lse=True, **requests.layout, **options
    )


@each_layout
@pytest.mark.parametrize("page_size", [1, 3, 16, 256, 999])
def test_decode(device, layout, page_size):
    lengths = [1000, 1, 0, 41]
    requests = Requests(device, lengths, page_size, 2, 64, layout=layout)
    q = tensor(4, 4, 64, device=device)
    expected = attention(q, requests, [1] * 4)
    for family in ("baseline", "simulator", "apple7"):
        with tuned(family):
            found, recording = record(decode, q, requests)
        assert ("attention_merge_float" in recording.kernels) == (family != "simulator")
        check(found, expected)
    assert (found[0][2] == 0).all() and (found[1][2] == -torch.inf).all()


@each_width
@each_layout
@pytest.mark.parametrize("page_size", [1, 16, 23])
def test_prefill(device, layout, page_size):
    requests = Requests(device, LENGTHS, page_size, 2, 40, layout=layout, value_size=24)
    q = tensor(sum(COUNTS), 6, 40, device=device)
    for options in ({}, {"causal": True}, {"window": (9, 2)}, {"causal": True, "window": (9, -1), "softcap": 2.0}):
        check(prefill(q, requests, COUNTS, **options), attention(q, requests, COUNTS, **options))


@each_width
@pytest.mark.parametrize("q_dtype, dtype", [(d, d) for d in DTYPES] + [(DTYPES[0], d) for d in DTYPES[1:]], ids=str)
def test_dtypes(device, q_dtype, dtype):
    """The cache may have another dtype than the queries, of which the result is."""
    requests = Requests(device, LENGTHS, 8, 1, 128, dtype=dtype)
    sinks = tensor(5, dtype=q_dtype, device=device)
    q = tensor(sum(COUNTS), 5, 128, dtype=q_dtype, device=device)
    options = {"causal": True, "sinks": sinks, "scale": 0.2}
    found, recording = record(prefill, q, requests, COUNTS, **options)
    assert found[0].dtype == q_dtype and found[1].dtype == torch.float32
    expected = attention(q, requests, COUNTS, **options)
    assert_attention_near(found, expected, requests.cache[1], rounds_weights(recording.kernels[0]))


@each_width
def test_many_queries(device):
    """More rows than a threadgroup has, in requests of different lengths, of which there are more than lanes."""
    counts = [1 + i % 3 for i in range(40)]
    counts[7] = 50
    lengths = [count + 11 for count in counts]
    requests = Requests(device, lengths, 4, 1, 16)
    q = tensor(sum(counts), 3, 16, device=device)
    check(prefill(q, requests, counts, causal=True), attention(q, requests, counts, causal=True))


@each_width
def test_custom_mask(device):
    requests = Requests(device, LENGTHS, 8, 2, 32)
    q = tensor(sum(COUNTS), 2, 32, device=device)
    masks = [torch.rand(count, length) < 0.6 for count, length in zip(COUNTS, LENGTHS)]
    masks[2][1] = False
    flat = torch.cat([mask.flatten() for mask in masks]).to(device)
    for causal in (False, True):
        found = prefill(q, requests, COUNTS, custom_mask=flat, causal=causal)
        check(found, attention(q, requests, COUNTS, masks=masks, causal=causal))
    assert (found[0][4] == 0).all() and (found[1][4] == -torch.inf).all()


@pytest.mark.only_on("simulator")
def test_a_custom_mask_of_another_size(device):
    requests = Requests(device, [11, 5], 4, 2, 16)
    q = tensor(4, 2, 16, device=device)
    for count in (0, 43, 45):
        with pytest.raises(ValueError, match=f"custom_mask has {count} elements, .* are 44"):
            prefill(q, requests, [4, 0], custom_mask=torch.ones(count, dtype=torch.bool, device=device))


@pytest.mark.only_on("simulator")
@each_width
@pytest.mark.parametrize("index", range(3))
def test_numbers_that_do_not_fit_in_32_bits(device, index):
    requests = Requests(device, [11, 5], 4, 2, 16)
    pages = [numbers.long() for numbers in requests.pages]
    pages[index][-1] += 2**32
    with pytest.raises(ValueError, match="has numbers that do not fit in int32"):
        batch_decode(tensor(2, 2, 16, device=device), requests.cache, *pages)


def test_one_tensor_for_keys_and_values(device):
    requests = Requests(device, [30, 7], 8, 2, 64)
    q = tensor(2, 4, 64, device=device)
    found = batch_decode(q, torch.stack(requests.cache, dim=1), *requests.pages, return_lse=True)
    check(found, attention(q, requests, [1, 1]))


def test_queries_of_no_request(device):
    requests = Requests(device, [30, 7], 8, 2, 64)
    q = tensor(9, 4, 64, device=device)
    out, lse = batch_prefill(
        q, requests.cache, torch.tensor([2, 4, 7], device=device), *requests.pages, return_lse=True
    )
    check((out[2:7], lse[2:7]), attention(q[2:7], requests, [2, 3]))
    for rest in (slice(0, 2), slice(7, 9)):
        assert (out[rest] == 0).all() and (lse[rest] == -torch.inf).all()


def test_cpu_and_gradients(device):
    requests = Requests("cpu", LENGTHS, 8, 2, 32)
    q = tensor(sum(COUNTS), 4, 32)
    check(
        prefill(q, requests, COUNTS, causal=True, softcap=3.0), attention(q, requests, COUNTS, causal=True, softcap=3.0)
    )
    q.requires_grad_()
    prefill(q, requests, COUNTS)[0].square().sum().backward()
    assert q.grad is not None and q.grad.isfinite().all()


@each_dtype
def test_merge_states(device, dtype):
    v, s = tensor(6, 5, 3, 70, dtype=dtype, device=device), tensor(6, 5, 3, device=device, scale=4)
    s[0, 1], s[1], s[2, :3] = -torch.inf, -torch.inf, 80.0
    out, lse = merge_states(v, s)
    weights = torch.softmax(wide(s), dim=1).nan_to_num(0.0)
    check((out, lse), ((weights[..., None] * wide(v)).sum(1), wide(s).logsumexp(1)))
    assert out.dtype == dtype and (out[1] == 0).all()
    out, lse = merge_states(v[..., :0], s)
    assert out.shape == (6, 3, 0)
    assert_near(lse, wide(s).logsumexp(1), terms=8)
    with pytest.raises(RuntimeError, match="a last dimension of 1 and more"):
        torch.ops.metalcore.merge_states(v[..., :0], s)


@each_dtype
@pytest.mark.parametrize("parts", [1, 2, 8, 9, 16, 17, 128, 129, 300])
@pytest.mark.parametrize("family, tokens, heads", [("baseline", 2, 3), ("hopper", 100, 5)])
def test_merged_parts(device, parts, dtype, family, tokens, heads):
    """Below and above the parts that a simdgroup and a team of them have at a time, and the elements of a team. Of five
    heads the last threadgroup has fewer than others."""
    for size in (1, 63, 65):
        v = tensor(tokens, parts, heads, size, dtype=dtype, device=device)
        s = tensor(tokens, parts, heads, device=device, scale=4)
        weights = torch.softmax(wide(s), dim=1)
        with tuned(family):
            check(merge_states(v, s), ((weights[..., None] * wide(v)).sum(1), wide(s).logsumexp(1)))


def test_merged_numbers_that_are_not_finite(device):
    """They reach their own elements only, also where they are in the last part."""
    v, s = torch.ones(1, 9, 1, 3, device=device), torch.zeros(1, 9, 1, device=device)
    v[0, 8, 0, :2] = torch.tensor([torch.inf, torch.nan])
    out, lse = merge_states(v, s)
    assert out[0, 0, 0] == torch.inf and out[0, 0, 1].isnan()
    assert_near(out[..., 2:], torch.ones(1, 1, 1, dtype=torch.float64))
    assert_near(lse, wide(s).logsumexp(1))
    s[0, 3] = torch.nan
    assert merge_states(v, s)[0].isnan().all()


def test_merged_parts_are_the_whole(device):
    requests = Requests(device, [32, 24], 8, 2, 64)
    q = tensor(2, 4, 64, device=device)
    indices = requests.pages[1].tolist()
    cut = [index for i, index in enumerate(indices) if i in (0, 4)]
    parts = [
        batch_decode(q, requests.cache, *(torch.tensor(x, device=device) for x in numbers), return_lse=True)
        for numbers in (([0, 1, 2], cut, [8, 8]), ([0, 3, 5], [x for x in indices if x not in cut], [8, 8]))
    ]
    found = merge_states(*(torch.stack(both, dim=1) for both in zip(*parts)))
    for ours, whole in zip(found, decode(q, requests)):
        assert_near(ours, wide(whole), terms=8)


@pytest.mark.parametrize(
    "name, wrong, match",
    [
        ("kv_indices", [99, 1, 2], "has the page 99"),
        ("kv_indices", [0, -1, 2], "has the page -1"),
        ("kv_indptr", [0, 2, 9], "kv_indptr must be numbers of 0 to 3"),
        ("kv_indptr", [0, 3, 2], "kv_indptr must be"),
        ("kv_last_page_len", [9, 1], r"kv_last_page_len\[0\] is 9"),
        ("kv_last_page_len", [8, 0], r"kv_last_page_len\[1\] is 0"),
        ("qo_indptr", [0, 1, 5], "qo_indptr must be numbers of 0 to 2"),
    ],
)
def test_wrong_numbers(device, name, wrong, match):
    """They raise on the host; kernels themselves stay inside of every tensor."""
    pool = tensor(6, 8, 2, 64, device=device)
    names = {"qo_indptr": [0, 1, 2], "kv_indptr": [0, 2, 3], "kv_indices": [4, 0, 5], "kv_last_page_len": [8, 3]}
    numbers = {key: torch.tensor(wrong if key == name else value, dtype=torch.int32) for key, value in names.items()}
    q = tensor(2, 2, 64, device=device)
    with pytest.raises(ValueError, match=match):
        batch_prefill(q.cpu(), (pool.cpu(), pool.cpu()), *numbers.values())
    on_device = [value.to(device) for value in numbers.values()]
    others = None, None, None, 1 << 30, 1 << 30, 0.125, 0.0

    def kernel():
        return torch.ops.metalcore.paged_attention(q, on_device[0], pool, pool, *on_device[1:], False, *others)

    if device == "mps" and getattr(torch._C, "_metalcore_simulates_mps", False):
        with pytest.raises(ValueError, match=match):
            batch_prefill(q, (pool, pool), *on_device)
        with metalcore.simulator.checking():
            out, _ = kernel()
    else:
        out, _ = kernel()
    assert out.isfinite().all()


@each_width
def test_a_page_that_does_not_exist_is_not_seen(device):
    requests = Requests(device, [24], 8, 1, 64)
    indptr, indices, last = requests.pages
    q = tensor(1, 1, 64, device=device)
    wrong = indices.clone()
    wrong[1] = 1000
    others = False, None, None, None, 1 << 30, 1 << 30, 0.125, 0.0
    found = torch.ops.metalcore.paged_attention(q, None, *requests.cache, indptr, wrong, last, *others)
    for rows in (requests.keys, requests.values):
        rows[0] = torch.cat([rows[0][:8], rows[0][16:]])
    check(found, attention(q, requests, [1]))


@pytest.mark.parametrize(
    "change, error, match",
    [
        ({"kv_layout": "NDH"}, ValueError, "kv_layout must be one of NHD, HND"),
        ({"q": torch.zeros(2, 64)}, ValueError, "q must have 3 dimensions"),
        ({"q": torch.zeros(2, 3, 64)}, RuntimeError, "3 heads of q are no multiple of 2"),
        ({"q": torch.zeros(2, 2, 32)}, RuntimeError, "do not go together"),
        ({"paged_kv_cache": torch.zeros(4, 8, 2, 64)}, ValueError, r"the shape \(pages, 2, …\)"),
        ({"paged_kv_cache": torch.zeros(4, 2, 0, 2, 64)}, ValueError, "a token and more, not 0"),
        ({"k_scale": "1"}, TypeError, "k_scale must be a number or a tensor, not str"),
        ({"q_scale": torch.ones(3)}, ValueError, r"q_scale must be a floating-point number or 2 of them, not \(3,\)"),
        ({"v_scale": torch.ones(2, dtype=torch.int32)}, ValueError, "v_scale must be a floating-point number or 2"),
        ({"kv_indices": torch.zeros(2)}, ValueError, "kv_indices must have integers"),
        ({"kv_last_page_len": torch.zeros(3, dtype=torch.int32)}, ValueError, "2 numbers in kv_last_page_len, not 3"),
        ({"window": (1, -2)}, ValueError, "window must be two integers"),
        ({"softcap": -1.0}, ValueError, "softcap must be"),
        ({"softcap": torch.inf}, ValueError, "softcap must be"),
    ],
)
def test_errors(device, change, error, match):
    given = {
        "q": torch.zeros(2, 2, 64),
        "paged_kv_cache": torch.zeros(4, 2, 8, 2, 64),
        "kv_indptr": torch.tensor([0, 1, 2]),
        "kv_indices": torch.tensor([0, 1]),
        "kv_last_page_len": torch.tensor([1, 1]),
        **change,
    }
    with pytest.raises(error, match=match):
        batch_decode(**{name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in given.items()})


def test_lengths_are_checked_where_the_host_sees_no_numbers():
    """A GPU's numbers would have to be waited for, and lengths not."""
    q, cache = torch.empty(2, 2, 64, device="meta"), torch.empty(4, 2, 8, 2, 64, device="meta")
    three, two = (torch.empty(count, dtype=torch.int32, device="meta") for count in (3, 2))
    with on_meta("cuda"):
        batch_decode(q, cache, three, two, two)
        with pytest.raises(ValueError, match="2 requests need 2 numbers in kv_last_page_len, not 3"):
            batch_decode(q, cache, three, two, three)
        with pytest.raises(ValueError, match="2 requests need 3 numbers in qo_indptr, not 2"):
            batch_prefill(q, cache, two, three, two, two)


@pytest.mark.parametrize("place", ["cpu", "device"])
def test_operators(device, place):
    where = "cpu" if place == "cpu" else device
    requests = Requests(where, [11, 5], 4, 2, 16)
    q = tensor(2, 2, 16, device=where)
    others = False, None, None, None, 1 << 30, 1 << 30, 0.25, 0.0
    check_operator(torch.ops.metalcore.paged_attention, q, None, *requests.cache, *requests.pages, *others)
    check_operator(torch.ops.metalcore.merge_states, tensor(2, 3, 2, 8, device=where), tensor(2, 3, 2, device=where))


def test_compile(device):
    requests = Requests(device, [11, 5], 4, 2, 16)
    q = tensor(2, 2, 16, device=device)

    def function(q):
        return batch_decode(q * 2, requests.cache, *requests.pages)

    found = torch.compile(function, fullgraph=True, backend="aot_eager")(q)
    assert torch.equal(found, function(q))
