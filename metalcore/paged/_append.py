"""append_kv."""

from __future__ import annotations

import torch
from torch import Tensor

from .._core.operators import cpu_kernel, fake_kernel, ops
from .._core.registry import Op, Sample, register
from .._core.samples import integers
from . import _composite
from ._pages import check_append, check_pages, check_tensors, index_vector, split_cache

__all__ = ["append_kv"]


def append_kv(
    key: Tensor,
    value: Tensor,
    paged_kv_cache: Tensor | tuple[Tensor, Tensor],
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_last_page_len: Tensor,
    *,
    qo_indptr: Tensor | None = None,
    batch_indices: Tensor | None = None,
    positions: Tensor | None = None,
    kv_layout: str = "NHD",
) -> None:
    """Writes the keys and values of new tokens into their places in a cache's pages, as FlashInfer's
    append_paged_kv_cache.

    The requests have room for the new tokens already: kv_indptr, kv_indices and kv_last_page_len count them.

    Args:
        key: (tokens, heads, size), float32, float16 or bfloat16; it is converted to the cache's dtype.
        value: (tokens, heads, size of values), of key's dtype.
        paged_kv_cache: the cache (see `metalcore.paged`), which is changed.
        kv_indptr, kv_indices, kv_last_page_len: the requests' pages.
        qo_indptr: tokens qo_indptr[i]:qo_indptr[i + 1] become the last of request i. By default there is one token for
            each request.
        batch_indices, positions: instead of qo_indptr, the request of each token, and its place among the request's
            tokens. A request of -1 leaves a token out.
        kv_layout: "NHD" or "HND".

    Raises:
        RuntimeError: shapes, dtypes or devices do not go together.
        ValueError: the cache has another layout; batch_indices or positions is missing; vectors are of different
            numbers of requests; or, where the host sees the numbers, there is no such request, page or place.

    Example:
        >>> pages = torch.zeros(2, 2, 4, 1, 64, device="mps")  # two pages of four tokens
        >>> key, value = torch.ones(2, 1, 1, 64, device="mps")
        >>> indptr, indices, last = (torch.tensor(t, dtype=torch.int32, device="mps") for t in ([0, 1], [1], [3]))
        >>> metalcore.paged.append_kv(key, value, pages, indptr, indices, last)
        >>> pages[1, 0, :, 0, 0].tolist()
        [0.0, 0.0, 1.0, 0.0]
    """
    check_tensors("append_kv", 3, key=key, value=value)
    k, v = split_cache("append_kv", paged_kv_cache, kv_layout)
    heads_first = kv_layout == "HND"
    size = k.shape[2 if heads_first else 1]
    kv_indptr, kv_indices, kv_last_page_len = (
        index_vector("append_kv", name, numbers, key)
        for name, numbers in (
            ("kv_indptr", kv_indptr),
            ("kv_indices", kv_indices),
            ("kv_last_page_len", kv_last_page_len),
        )
    )
    if (batch_indices is None) != (positions is None) or (batch_indices is not None and qo_indptr is not None):
        raise ValueError("metalcore.paged.append_kv: give qo_indptr, or batch_indices and positions")
    if qo_indptr is not None:
        qo_indptr = index_vector("append_kv", "qo_indptr", qo_indptr, key)
    check_pages("append_kv", k.shape[0], size, kv_indptr, kv_indices, kv_last_page_len, qo_indptr, key.shape[0])
    if batch_indices is None or positions is None:
        batch_indices, positions = _last_places(key, size, kv_indptr, kv_last_page_len, qo_indptr)
    batch_indices = index_vector("append_kv", "batch_indices", batch_indices, key)
    positions = index_vector("append_kv", "positions", positions, key)
    check_append("append_kv", size, batch_indices, positions, kv_indptr)
    ops.paged_append(key, value, batch_indices, positions, k, v, kv_indptr, kv_indices, heads_first)
    torch.autograd.graph.increment_version((k, v))


def _last_places(key, size, kv_indptr, kv_last_page_len, qo_indptr):
    """Returns the request and the place of each token, if the tokens are the last of their requests."""
    tokens = torch.arange(key.shape[0], device=key.device, dtype=torch.int32)
    pages = kv_indptr[1:] - kv_indptr[:-1]
    lengths = torch.where(pages > 0, (pages - 1) * size + kv_last_page_len, 0)
    if qo_indptr is None:
        if tokens.shape != lengths.shape:
            raise ValueError(
                f"metalcore.paged.append_kv: there are {len(tokens)} tokens for {len(lengths)} requests; with another "
                "number for each, give qo_indptr"
            )
        return tokens, lengths - 1
    ends = qo_indptr[1:]
    requests = (tokens[:, None] >= ends).sum(1, dtype=torch.int32)  # past the last one: of no request
    last = requests.clamp(max=max(len(ends) - 1, 0)).long()
    return requests, lengths[last] - (ends[last] - tokens)


@cpu_kernel("paged_append")
def _(key, value, batch_indices, positions, k, v, kv_indptr, kv_indices, heads_first):
    _composite.append(key, value, batch_indices, positions, k, v, kv_indptr, kv_indices, heads_first)


@fake_kernel("paged_append")
def _(key, value, batch_indices, positions, k, v, kv_indptr, kv_indices, heads_first):
    return None


def _call(function, *arguments, **options):
    function(*arguments, **options)
    cache = arguments[2]
    return [cache] if isinstance(cache, Tensor) else list(cache)


def _reference(key, value, paged_kv_cache, kv_indptr, kv_indices, kv_last_page_len, *, kv_layout="NHD"):
    k, v = split_cache("append_kv", paged_kv_cache, kv_layout)
    size = k.shape[2 if kv_layout == "HND" else 1]
    places = _last_places(key, size, kv_indptr, kv_last_page_len, None)
    _composite.append(key, value, *places, k, v, kv_indptr, kv_indices, kv_layout == "HND")


def _arguments(key, value, *cache):
    indptr, indices, last = (integers(numbers, key, torch.int32) for numbers in ([0, 2, 3], [3, 0, 2], [1, 4]))
    cache = tuple(pool.clone() for pool in cache)
    return key, value, cache if len(cache) == 2 else cache[0], indptr, indices, last


_INTEGERS = ("kv_indptr", "kv_indices", "kv_last_page_len", "qo_indptr", "batch_indices", "positions")

register(
    Op(
        "append_kv",
        append_kv,
        reference=_reference,
        call=_call,
        operators=("paged_append",),
        backward=False,
        integers=dict.fromkeys(_INTEGERS, torch.int32),
        production=lambda kv_heads=8, head_size=128: Sample(
            "", (*((2, kv_heads, head_size),) * 2, (4, 2, 4, kv_heads, head_size)), arguments=_arguments
        ),
        samples=lambda: (
            Sample("NHD", ((2, 3, 64), (2, 3, 64), (4, 2, 4, 3, 64)), arguments=_arguments),
            Sample("HND", ((2, 3, 64), (2, 3, 48), (4, 3, 4, 64), (4, 3, 4, 48)), {"kv_layout": "HND"}, _arguments),
        ),
    )
)
