"""append_kv."""

import pytest
import torch
from pages import offsets
from references import DTYPES, check_operator, tensor

from metalcore.paged import append_kv

PAGES = [0, 2, 2, 5], [4, 1, 0, 5, 3], [3, 0, 2]  # 7, 0 and 10 tokens in pages of 4


def numbers(device, *vectors):
    return [torch.tensor(vector, dtype=torch.int32, device=device) for vector in vectors]


def expected(pool, new, places):
    """`places` has the request and the position of each token."""
    pool = pool.cpu().clone()
    for token, (request, position) in enumerate(places):
        page = PAGES[1][PAGES[0][request] + position // 4]
        pool[page, position % 4] = new[token].cpu().to(pool.dtype)
    return pool


def make(device, tokens, dtype=torch.float32, cache_dtype=None, size=20, value_size=12):
    new = [tensor(tokens, 2, n, dtype=dtype, device=device) for n in (size, value_size)]
    pools = [tensor(6, 4, 2, n, dtype=cache_dtype or dtype, device=device) for n in (size, value_size)]
    return new, pools


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype, cache_dtype", [(d, d) for d in DTYPES] + [(DTYPES[0], d) for d in DTYPES[1:]], ids=str)
def test_last_tokens(device, layout, dtype, cache_dtype):
    """Three tokens of the first request and two of the last, from tensors whose heads lie apart."""
    new, pools = make(device, 5, dtype, cache_dtype)
    new = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in new]
    wanted = [expected(pool, x, [(0, 4), (0, 5), (0, 6), (2, 8), (2, 9)]) for pool, x in zip(pools, new)]
    if layout == "HND":
        pools = [pool.transpose(1, 2).contiguous() for pool in pools]
    pages = numbers(device, *PAGES)
    append_kv(*new, tuple(pools), *pages, qo_indptr=offsets([3, 0, 2], device), kv_layout=layout)
    for pool, result in zip(pools, wanted):
        assert torch.equal((pool if layout == "NHD" else pool.transpose(1, 2)).cpu(), result)


def test_a_token_for_each_request(device):
    new, pools = make(device, 2, size=8, value_size=8)
    cache = torch.stack(pools, dim=1)
    append_kv(*new, cache, *numbers(device, [0, 2, 5], PAGES[1], [3, 2]))
    for i, (pool, x) in enumerate(zip(pools, new)):
        assert torch.equal(cache[:, i].cpu(), expected(pool, x, [(0, 6), (2, 9)]))


def test_overwriting_what_a_graph_saved(device):
    new, pools = make(device, 2, size=8, value_size=8)
    for pool in pools:
        product = pool * torch.ones(8, device=device, requires_grad=True)
        append_kv(*new, tuple(pools), *numbers(device, [0, 2, 5], PAGES[1], [3, 2]))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.sum().backward()


def test_named_places(device):
    """In any order; a request of -1 leaves a token out."""
    new, pools = make(device, 4)
    wanted = [expected(pool, x[[0, 1, 3]], [(2, 1), (0, 6), (2, 7)]) for pool, x in zip(pools, new)]
    requests, positions = numbers(device, [2, 0, -1, 2], [1, 6, 0, 7])
    append_kv(*new, tuple(pools), *numbers(device, *PAGES), batch_indices=requests, positions=positions)
    for pool, result in zip(pools, wanted):
        assert torch.equal(pool.cpu(), result)


@pytest.mark.parametrize(
    "requests, positions, match",
    [
        ([0, 3], [0, 0], "token 1 is of request 3, of 3"),
        ([0, 1], [0, 0], "token 1 has the position 0, and the pages of request 1 have 0"),
        ([0, 0], [8, 0], "token 0 has the position 8, and the pages of request 0 have 8"),
        ([-2, 0], [0, -1], "token 0 is of request -2"),
    ],
)
def test_wrong_places(device, requests, positions, match):
    new, pools = make(device, 2)
    pages, places = numbers("cpu", *PAGES), numbers("cpu", requests, positions)
    with pytest.raises(ValueError, match=match):
        append_kv(
            *(x.cpu() for x in new),
            tuple(pool.cpu() for pool in pools),
            *pages,
            batch_indices=places[0],
            positions=places[1],
        )
    before = [pool.clone() for pool in pools]
    pages, places = numbers(device, *PAGES), numbers(device, requests, positions)
    torch.ops.metalcore.paged_append(*new, *places, *pools, *pages[:2], False)
    changed = [(pool != old).flatten(1).any(1).sum().item() for pool, old in zip(pools, before)]
    assert max(changed) <= 1  # no more than the token whose place is right


def test_errors(device):
    new, pools = make(device, 2)
    pages = numbers(device, *PAGES)
    with pytest.raises(ValueError, match="2 tokens for 3 requests"):
        append_kv(*new, tuple(pools), *pages)
    with pytest.raises(ValueError, match="give qo_indptr, or batch_indices and positions"):
        append_kv(*new, tuple(pools), *pages, batch_indices=pages[2])
    with pytest.raises(RuntimeError, match="do not go with caches"):
        append_kv(new[0][..., :8], new[1], tuple(pools), *pages, qo_indptr=offsets([1, 0, 1], device))
    with pytest.raises(TypeError, match="key must be a tensor, not int"):
        append_kv(1, new[1], tuple(pools), *pages)


@pytest.mark.parametrize("place", ["cpu", "device"])
def test_operator(device, place):
    where = "cpu" if place == "cpu" else device
    new, pools = make(where, 2)
    places = numbers(where, [0, 2], [6, 9])
    check_operator(torch.ops.metalcore.paged_append, *new, *places, *pools, *numbers(where, *PAGES)[:2], False)
