"""What FlashInfer's interface has beside pages: pages without their dimension, packed masks, scales, ragged keys; and
tables of pages that have a row for each request."""

import pytest
import torch
from pages import Requests, attention, offsets
from references import DTYPES, tensor
from test_paged_attention import COUNTS, LENGTHS, check, decode, prefill

from metalcore.paged import PageTable, append_kv, batch_decode, batch_prefill

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@each_dtype
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_pages_of_one_token_without_their_dimension(device, dtype, layout):
    requests = Requests(device, LENGTHS, 1, 2, 32, dtype=dtype, layout=layout)
    q = tensor(4, 4, 32, dtype=dtype, device=device)
    expected = decode(q, requests)
    flat = tuple(pool.squeeze(1 if layout == "NHD" else 2) for pool in requests.cache)
    for cache in (flat, torch.stack(flat, 1)):
        found = batch_decode(q, cache, *requests.pages, kv_layout=layout, return_lse=True)
        assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
    new = tensor(1, 2, 32, dtype=dtype, device=device)
    numbers = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 1], [5], [1]))
    append_kv(new, new, flat, *numbers, kv_layout=layout)
    assert torch.equal(flat[0][5], new[0]) and torch.equal(requests.cache[1][5].view(2, 32), new[0])


def packed(masks):
    """Each request's elements in bytes of their own, the first one in the lowest bit."""
    found = []
    for mask in masks:
        bits = mask.flatten().tolist()
        parts = [bits[begin : begin + 8] for begin in range(0, len(bits), 8)]
        found += [sum(bit << place for place, bit in enumerate(part)) for part in parts]
    return torch.tensor(found, dtype=torch.uint8)


@each_dtype
def test_packed_masks(device, dtype):
    requests = Requests(device, LENGTHS, 8, 2, 32, dtype=dtype)
    q = tensor(sum(COUNTS), 4, 32, dtype=dtype, device=device)
    masks = [torch.rand(count, length) < 0.6 for count, length in zip(COUNTS, LENGTHS)]
    bits = packed(masks).to(device)
    check(prefill(q, requests, COUNTS, packed_custom_mask=bits), attention(q, requests, COUNTS, masks=masks))
    plain = torch.cat([mask.flatten() for mask in masks]).to(device)
    with pytest.raises(ValueError, match="give custom_mask or packed_custom_mask"):
        prefill(q, requests, COUNTS, custom_mask=plain, packed_custom_mask=bits)
    with pytest.raises(ValueError, match="packed_custom_mask must be uint8, not torch.bool"):
        prefill(q, requests, COUNTS, packed_custom_mask=plain)


@each_dtype
@pytest.mark.parametrize("masked", [False, True])
def test_ragged_keys(device, dtype, masked):
    requests = Requests(device, LENGTHS, 8, 2, 32, value_size=16, dtype=dtype)
    q = tensor(sum(COUNTS), 4, 32, dtype=dtype, device=device)
    k, v = (torch.cat(rows).to(device) for rows in (requests.keys, requests.values))
    options, expected = {"causal": True}, {"causal": True}
    if masked:
        masks = [torch.rand(count, length) < 0.6 for count, length in zip(COUNTS, LENGTHS)]
        options["custom_mask"] = torch.cat([mask.flatten() for mask in masks]).to(device)
        expected["masks"] = masks
    bounds = offsets(COUNTS, device), offsets(LENGTHS, device)
    found = batch_prefill(q, (k, v), *bounds, return_lse=True, **options)
    check(found, attention(q, requests, COUNTS, **expected))
    with pytest.raises(ValueError, match="None for pages of one token"):
        batch_prefill(q, requests.cache, *bounds)


@each_dtype
def test_scales(device, dtype):
    """Numbers, one element, and one for each head. They are powers of two, by which nothing is rounded."""
    requests = Requests(device, LENGTHS, 8, 2, 32, dtype=dtype)
    q = tensor(sum(COUNTS), 4, 32, dtype=dtype, device=device)
    of_q = torch.tensor([1.0, 0.5, 2.0, 0.25])
    of_k, of_v = torch.tensor([0.5, 2.0]), torch.tensor([4.0, 0.5])

    def expected(q_scale, k_scale, v_scale):
        scaled = Requests(device, LENGTHS, 8, 2, 32, dtype=dtype)
        scaled.keys = [key * k_scale.reshape(-1, 1).to(dtype) for key in requests.keys]
        scaled.values = [value * v_scale.reshape(-1, 1).to(dtype) for value in requests.values]
        return attention(q.cpu() * q_scale.reshape(-1, 1).to(dtype), scaled, COUNTS, causal=True, softcap=5.0)

    options = {"causal": True, "softcap": 5.0}
    for q_scale, k_scale, v_scale in ((of_q, of_k, of_v), (of_q[1], of_k[:1], of_v[1:])):
        scales = {"q_scale": q_scale.to(device), "k_scale": k_scale.to(device), "v_scale": v_scale.to(device)}
        found = prefill(q, requests, COUNTS, **scales, **options)
        assert found[0].dtype == dtype
        check(found, expected(q_scale, k_scale, v_scale))
    numbers = prefill(q, requests, COUNTS, q_scale=0.5, k_scale=0.5, v_scale=2, **options)
    check(numbers, expected(*torch.tensor([0.5, 0.5, 2.0])))
    one = tensor(4, 4, 32, dtype=dtype, device=device)
    plain = decode(one, requests, k_scale=of_k.to(device))
    found = decode(one, requests, k_scale=of_k.to(device), v_scale=2.0)
    assert torch.equal(found[0], plain[0] * 2)


def test_page_table(device):
    """Numbers behind the last page are of no request."""
    table = torch.tensor([[4, 1, -1], [7, -1, -1], [2, 3, 0], [-1, -1, -1]], dtype=torch.int64, device=device)
    found = PageTable.from_block_table(table, torch.tensor([9, 8, 17, 0], device=device), 8)
    assert found.kv_indptr.tolist() == [0, 2, 3, 6, 6] and found.kv_last_page_len.tolist() == [1, 8, 1, 0]
    assert found.kv_indices[:6].tolist() == [4, 1, 7, 2, 3, 0] and all(x.dtype == torch.int32 for x in found.pages)
    assert PageTable.from_block_table(
        table[:0], torch.zeros(0, dtype=torch.int32, device=device), 8
    ).kv_indptr.tolist() == [0]
    assert (
        PageTable.from_block_table(table[:, :0], torch.zeros(4, dtype=torch.int32, device=device), 8).kv_indptr.tolist()
        == [0] * 5
    )
    with pytest.raises(ValueError, match="rows for 4 requests, and lengths has 3"):
        PageTable.from_block_table(table, table[:3, 0], 8)
    with pytest.raises(ValueError, match="request 0 has 25 tokens, and 3 pages of 8"):
        PageTable.from_block_table(table.cpu(), torch.tensor([25, 0, 0, 0]), 8)


def test_compiled(device):
    requests = Requests(device, LENGTHS, 8, 2, 32)
    q = tensor(sum(COUNTS), 4, 32, device=device)
    bits = packed([torch.rand(count, length) < 0.6 for count, length in zip(COUNTS, LENGTHS)]).to(device)
    scale = torch.rand(2, device=device)

    def attend(q, scale, bits):
        numbers = offsets(COUNTS, q.device), *requests.pages
        return batch_prefill(q, requests.cache, *numbers, packed_custom_mask=bits, k_scale=scale, v_scale=scale)

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)(q, scale, bits)
    torch.testing.assert_close(compiled, attend(q, scale, bits))
