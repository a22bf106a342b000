"""PagedKVCache: which sequence has which pages, and what is in them."""

import pytest
import torch
from references import assert_near, tensor, wide

from metalcore.paged import PagedKVCache, batch_decode


def make(device, pages=8, page_size=4, **options):
    return PagedKVCache(pages, page_size, heads=2, head_size=16, device=device, **options)


def tokens(device, count):
    return tensor(count, 2, 16, device=device), tensor(count, 2, 16, device=device)


def stored(cache, sequence, layer=0):
    """The keys and values of a sequence."""
    indptr, indices, last = cache.table([sequence]).pages
    pool = cache.layer(layer).cpu()
    pages = pool[indices.cpu().long()]
    if cache.kv_layout == "HND":
        pages = pages.transpose(2, 3)
    rows = pages.transpose(0, 1).flatten(1, 2)[:, : cache.length(sequence)]
    assert indptr.tolist() == [0, len(indices)] and (not len(indices) or 1 <= last.item() <= cache.page_size)
    return rows


def same(cache, sequence, key, value):
    return torch.equal(stored(cache, sequence), torch.stack([key.cpu(), value.cpu()]))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_append_and_attend(device, layout):
    cache = make(device, kv_layout=layout)
    a, b = cache.allocate(), cache.allocate()
    first, second = tokens(device, 9), tokens(device, 2)
    cache.append([a, b], *(torch.cat([x[:7], x[7:]]) for x in first), tokens=[7, 2])
    table = cache.append([b, a], *second)
    key = torch.cat([first[0][:7], second[0][1:]]), torch.cat([first[0][7:], second[0][:1]])
    value = torch.cat([first[1][:7], second[1][1:]]), torch.cat([first[1][7:], second[1][:1]])
    assert same(cache, a, key[0], value[0]) and same(cache, b, key[1], value[1])
    assert (cache.length(a), cache.length(b), cache.free_pages) == (8, 3, 5)
    q = tensor(2, 2, 16, device=device)
    found = batch_decode(q, cache.layer(), *table.pages, kv_layout=layout)
    for i, j in ((0, 1), (1, 0)):
        weights = torch.softmax(torch.einsum("hd,khd->hk", wide(q[i]), wide(key[j])) / 4, dim=-1)
        assert_near(found[i], torch.einsum("hk,khd->hd", weights, wide(value[j])), terms=8)


def test_layers(device):
    cache = make(device, layers=2)
    a = cache.allocate()
    table = cache.reserve([a], [5])
    parts = [tokens(device, 5) for _ in range(2)]
    for layer, part in enumerate(parts):
        cache.write(table, *part, layer=layer)
    for layer, part in enumerate(parts):
        assert torch.equal(stored(cache, a, layer), torch.stack(part).cpu())


def test_fork_shares_pages_until_they_change(device):
    cache = make(device)
    a = cache.allocate()
    key, value = tokens(device, 6)
    cache.append([a], key, value)
    b, c = cache.fork(a), cache.fork(a)
    assert cache.free_pages == 6
    new = tokens(device, 3)
    cache.append([a, b, c], *new)
    assert cache.free_pages == 4  # two copies of the last page; the third sequence keeps it
    for i, sequence in enumerate((a, b, c)):
        assert same(cache, sequence, torch.cat([key, new[0][i : i + 1]]), torch.cat([value, new[1][i : i + 1]]))
    indices = [cache.table([sequence]).kv_indices.tolist() for sequence in (a, b, c)]
    assert len({pages[0] for pages in indices}) == 1 and len({pages[1] for pages in indices}) == 3
    cache.free(a)
    assert cache.free_pages == 5
    cache.free(b)
    cache.free(c)
    assert cache.free_pages == 8


def test_a_fork_at_the_end_of_a_page_copies_nothing(device):
    cache = make(device)
    a = cache.allocate()
    key, value = tokens(device, 4)
    cache.append([a], key, value)
    b = cache.fork(a)
    new = tokens(device, 1)
    cache.append([b], *new)
    assert cache.free_pages == 6 and same(cache, a, key, value)
    assert same(cache, b, torch.cat([key, new[0]]), torch.cat([value, new[1]]))


def test_too_few_pages_change_nothing(device):
    cache = make(device, pages=3)
    a = cache.allocate()
    key, value = tokens(device, 6)
    cache.append([a], key, value)
    b = cache.fork(a)
    with pytest.raises(RuntimeError, match="2 pages are needed, and 1 are free"):
        cache.append([a], *tokens(device, 3))
    assert (cache.length(a), cache.free_pages) == (6, 1) and same(cache, a, key, value)
    new = tokens(device, 2)
    cache.append([a, b], *new)  # one copy: the other sequence keeps the page
    assert cache.free_pages == 0 and cache.length(b) == 7
    cache.free(a)
    assert cache.free_pages == 1


def test_errors(device):
    cache = make(device)
    a = cache.allocate()
    for call in (cache.free, cache.fork, cache.length, lambda s: cache.table([s]), lambda s: cache.reserve([s], [1])):
        with pytest.raises(ValueError, match="there is no sequence 7"):
            call(7)
    for sequences, counts in (([a, a], [1, 1]), ([a], [1, 2]), ([a], [-1])):
        with pytest.raises(ValueError, match="different sequences, and a number of tokens for each"):
            cache.reserve(sequences, counts)
    with pytest.raises(ValueError, match="3 tokens are no equal parts for 2 sequences"):
        cache.append([a, cache.allocate()], *tokens(device, 3))
    with pytest.raises(ValueError, match="there are 3 tokens, and not 2"):
        cache.append([a], *tokens(device, 3), tokens=[2])
    with pytest.raises(TypeError, match="numbers of tokens must be integers"):
        cache.reserve([a], [1.5])
    key, value = tokens(device, 2)
    for wrong, match in (
        ((key[:, :1], value), "key must have the shape"),
        ((key, value[:1]), "value must have the shape"),
        ((key.int(), value.int()), "one floating-point dtype"),
        ((key, value.half()), "one floating-point dtype"),
    ):
        with pytest.raises(ValueError, match=match):
            cache.append([a], *wrong)
        assert cache.length(a) == 0  # nothing has changed
    with pytest.raises(ValueError, match="page_size must be 1 and more, not 0"):
        make(device, page_size=0)
    with pytest.raises(ValueError, match="kv_layout must be one of"):
        make(device, kv_layout="DHN")
