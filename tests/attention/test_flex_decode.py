"""flex_attention of few queries, whose keys threadgroups share, and of PyTorch's pages."""

import pytest
import torch
from flex_cases import formula
from rows import tuned
from torch.nn.attention.experimental._paged_attention import PagedAttention
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask

import metalcore

ALL = AuxRequest(lse=True, max_scores=True)


@pytest.fixture(autouse=True)
def _narrow():
    with tuned("apple7"):
        yield


def tensors(queries, keys, dtype=torch.float32):
    generator = torch.Generator().manual_seed(queries)
    shapes = (2, 4, queries, 64), (2, 2, keys, 64), (2, 2, keys, 64)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def score(s, b, h, q, k):
    return s + 0.01 * k


def mask(b, h, q, k):
    """The second batch item sees nothing, and the first one's last blocks are hidden."""
    return ((k + q) % 5 != 0) & (k < 600) & (b < 1)


@pytest.mark.parametrize(("queries", "block"), [(1, 128), (3, None), (32, 1024)])
def test_keys_are_shared(device, queries, block):
    """Without a mask, and with one block for all keys, a block is cut for several threadgroups."""
    query, key, value = tensors(queries, 700)
    block_mask = None
    if block is not None:
        block_mask = create_block_mask(mask, 2, None, queries, 700, device=device, BLOCK_SIZE=block)
    arguments = (*(x.to(device) for x in (query, key, value)), score, block_mask)
    (out, aux), recording = metalcore.recording.record(
        metalcore.flex_attention, *arguments, enable_gqa=True, return_aux=ALL
    )
    assert any("merge" in kernel for kernel in recording.kernels)
    wide = [x.double() for x in (query, key, value)]
    seen = None if block is None else mask
    expected, lse = formula(*wide, score, seen)
    scores = (wide[0] @ wide[1].repeat_interleave(2, 1).mT) / 8 + 0.01 * torch.arange(700)
    if seen is not None:
        at = torch.meshgrid(*(torch.arange(n) for n in scores.shape), indexing="ij")
        scores = scores.masked_fill(~seen(*at), -torch.inf)
    for result, exact in ((out, expected), (aux.lse, lse), (aux.max_scores, scores.amax(-1))):
        torch.testing.assert_close(result.cpu().double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("queries", [1, 3])
def test_heads_share_a_tile(device, queries):
    """The heads that share keys are rows of one tile, and functions still see their own numbers."""
    query, key, value = (x.to(device) for x in tensors(queries, 300))
    slopes = torch.tensor([0.5, -0.25, 1.0, 2.0], device=device)

    def of_head(s, b, h, q, k):
        return s * slopes[h] + 0.1 * q * (k % 3)

    def visible(b, h, q, k):
        return (k + 7 * q) % 4 != 0

    block_mask = create_block_mask(visible, None, None, queries, 300, device=device)
    results, recording = metalcore.recording.record(
        metalcore.flex_attention, query, key, value, of_head, block_mask, enable_gqa=True, return_lse=True
    )
    assert recording.dispatches[0].grid[0] == recording.dispatches[0].threadgroup[0] * 2 * 2 * 6
    slopes = slopes.cpu().double()
    expected = formula(*(x.cpu().double() for x in (query, key, value)), of_head, visible)
    for result, exact in zip(results, expected, strict=True):
        torch.testing.assert_close(result.cpu().double(), exact, rtol=1e-5, atol=1e-5)


def test_numbers_of_16_bits(device):
    """Parts of the keys have results of 32 bits, so that the sum is rounded once."""
    query, key, value = tensors(1, 1000, torch.bfloat16)
    out = metalcore.flex_attention(*(x.to(device) for x in (query, key, value)), enable_gqa=True)
    expected, _ = formula(*(x.double() for x in (query, key, value)), None, None)
    error = (out.cpu().double() - expected).abs().max()
    assert error <= 2.0**-8 * expected.abs().max()


def test_pages(device):
    """PagedAttention's block mask has pages in the place of blocks, and keys of one batch item for all."""
    page, lengths = 32, (100, 150)
    query, key, value = tensors(1, 192)
    cache = PagedAttention(16, page, 2, device=device)
    pages = [torch.zeros(1, 2, 16 * page, 64, device=device) for _ in range(2)]
    for item in (1, 0):
        at = torch.tensor([item], device=device)
        cache.reserve(at, torch.tensor([192], device=device))
        positions = torch.arange(192, device=device).view(1, -1)
        cache.assign(at, positions, key[item : item + 1].to(device), value[item : item + 1].to(device), *pages)
    ends = torch.tensor(lengths, device=device)

    def visible(b, h, q, k):
        return k < ends[b]

    logical = create_block_mask(visible, 2, None, 1, 192, device=device, BLOCK_SIZE=page)
    out = metalcore.flex_attention(
        query.to(device),
        *pages,
        cache.get_score_mod(score),
        cache.convert_logical_block_mask(logical),
        enable_gqa=True,
    )
    host = ends.cpu()
    expected, _ = formula(*(x.double() for x in (query, key, value)), score, lambda b, h, q, k: k < host[b])
    torch.testing.assert_close(out.cpu().double(), expected, rtol=1e-5, atol=1e-5)
