"""batch_prefill, batch_decode and merge_states."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .._core.operators import cpu_kernel, fake_kernel, ops
from .._core.registry import Op, Sample, register
from .._core.routing import accelerated
from .._core.samples import integers
from . import _composite
from ._pages import check_mask, check_pages, check_tensors, index_vector, scaled, split_cache

__all__ = ["batch_decode", "batch_prefill", "merge_states"]

_FAR = 2**30  # as good as no limit of a window
MOST_HEAD_SIZES = ((256, 256), (576, 512))  # of keys and values, that kernels take


def batch_prefill(
    q: Tensor,
    paged_kv_cache: Tensor | tuple[Tensor, Tensor],
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor | None = None,
    kv_last_page_len: Tensor | None = None,
    *,
    kv_layout: str = "NHD",
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    scale: float | None = None,
    custom_mask: Tensor | None = None,
    packed_custom_mask: Tensor | None = None,
    sinks: Tensor | None = None,
    q_scale: float | Tensor | None = None,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes attention of each request's queries to its keys in pages, as FlashInfer's
    BatchPrefillWithPagedKVCacheWrapper.

    The last query of a request stands at its last key. Where a gradient is asked for, PyTorch's ops compute it.

    Args:
        q: (tokens, heads, size): float32, float16 or bfloat16. Heads may be a multiple of the cache's.
        paged_kv_cache: the cache (see `metalcore.paged`): float32, float16 or bfloat16, whatever q is.
        qo_indptr, kv_indptr, kv_indices, kv_last_page_len: the requests' queries and pages. Without the last two, pages
            have one token, and those of each request follow each other, as keys and values do that are in no pages
            (FlashInfer's BatchPrefillWithRaggedKVCacheWrapper).
        kv_layout: "NHD" or "HND".
        causal: a query sees the keys up to its own place.
        window: (left, right): it sees so many keys before and behind its place. -1 stands for no limit.
        softcap: a score s becomes softcap * tanh(s / softcap). 0 stands for none.
        scale: 1 / sqrt(size) by default.
        custom_mask: bool, True where a query sees a key: (queries, keys) of the first request, then of the next …, all
            in one vector. It restricts what causal and window leave.
        packed_custom_mask: the same with 8 elements in a byte, the first one in the lowest bit, as FlashInfer's
            segment_packbits packs them: uint8, where each request begins with a byte of its own.
        sinks: a logit for each head that takes its part of the softmax, and has no value.
        q_scale, k_scale, v_scale: what queries, keys and values are multiplied by, as those of a quantized cache: a
            number, or a floating-point tensor with one, or with one for each head (of q, or of the cache).
        return_lse: return the logarithms of the softmax's sums, too.

    Returns:
        (tokens, heads, size of values) of q's dtype; with return_lse also (tokens, heads), float32: natural logarithms,
        where FlashInfer's have base 2. A query that sees no key gives zeros, and -inf.

    Raises:
        RuntimeError: shapes, dtypes or devices do not go together.
        ValueError: the cache has another layout; vectors are of different numbers of requests; both masks are given; a
            scale has not one number or one for each head; or, where the host sees the numbers, there is no such page,
            or custom_mask has another number of elements.

    Example:
        >>> cache = metalcore.paged.PagedKVCache(8, 4, heads=2, head_size=64, device="mps")
        >>> table = cache.append([cache.allocate()], *torch.randn(2, 3, 2, 64, device="mps"))
        >>> q, begins = torch.randn(3, 2, 64, device="mps"), torch.tensor([0, 3], dtype=torch.int32, device="mps")
        >>> metalcore.paged.batch_prefill(q, cache.layer(), begins, *table.pages, causal=True).shape
        torch.Size([3, 2, 64])
    """
    if kv_indices is None:
        check_tensors("batch_prefill", 1, kv_indptr=kv_indptr)
        kv_indices, kv_last_page_len = _tokens(paged_kv_cache, kv_layout, kv_indptr, kv_last_page_len)
    packed = packed_custom_mask is not None
    if packed and custom_mask is not None:
        raise ValueError("metalcore.paged.batch_prefill: give custom_mask or packed_custom_mask")
    return _attend(
        "batch_prefill",
        q,
        paged_kv_cache,
        qo_indptr,
        (kv_indptr, kv_indices, kv_last_page_len),
        kv_layout,
        causal,
        window,
        softcap,
        scale,
        _bits(packed_custom_mask) if packed else custom_mask,
        sinks,
        (q_scale, k_scale, v_scale),
        return_lse,
        packed,
    )


def batch_decode(
    q: Tensor,
    paged_kv_cache: Tensor | tuple[Tensor, Tensor],
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_last_page_len: Tensor,
    *,
    kv_layout: str = "NHD",
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    scale: float | None = None,
    sinks: Tensor | None = None,
    q_scale: float | Tensor | None = None,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes attention of one query of each request to its keys in pages, as FlashInfer's
    BatchDecodeWithPagedKVCacheWrapper.

    Keys are split among threadgroups, whose results a second dispatch merges (FlashDecoding: Dao et al., 2023).

    Args:
        q: (requests, heads, size). The query stands at its request's last key.
        paged_kv_cache, kv_indptr, kv_indices, kv_last_page_len, kv_layout: as for `batch_prefill`.
        window, softcap, scale, sinks, q_scale, k_scale, v_scale, return_lse: as for `batch_prefill`.

    Returns:
        (requests, heads, size of values), and with return_lse (requests, heads); as `batch_prefill`.

    Example:
        >>> cache = metalcore.paged.PagedKVCache(8, 4, heads=2, head_size=64, device="mps")
        >>> table = cache.append([cache.allocate()], *torch.randn(2, 3, 2, 64, device="mps"))
        >>> metalcore.paged.batch_decode(torch.randn(1, 2, 64, device="mps"), cache.layer(), *table.pages).shape
        torch.Size([1, 2, 64])
    """
    return _attend(
        "batch_decode",
        q,
        paged_kv_cache,
        None,
        (kv_indptr, kv_indices, kv_last_page_len),
        kv_layout,
        False,
        window,
        softcap,
        scale,
        None,
        sinks,
        (q_scale, k_scale, v_scale),
        return_lse,
    )


def merge_states(v: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """Merges attention's results over disjoint sets of keys into the result over all of them, as FlashInfer's
    merge_states.

    Args:
        v: (tokens, sets, heads, size): results, float32, float16 or bfloat16.
        s: (tokens, sets, heads), float32: the natural logarithms of the sums, as return_lse gives them.

    Returns:
        (tokens, heads, size) of v's dtype and (tokens, heads) in float32. Where a gradient is asked for, PyTorch's ops
        compute it.

    Example:
        >>> v, s = torch.randn(3, 2, 4, 64, device="mps"), torch.zeros(3, 2, 4, device="mps")  # of two sets of keys
        >>> merged, logsumexp = metalcore.paged.merge_states(v, s)
        >>> merged.shape, logsumexp.shape
        (torch.Size([3, 4, 64]), torch.Size([3, 4]))
    """
    check_tensors("merge_states", 4, v=v)
    check_tensors("merge_states", 3, s=s)
    if accelerated(v, s) and s.dtype == torch.float32 and v.shape[-1] and not _needs_gradient(v, s):
        return ops.merge_states(v, s)
    return _composite.merge(v, s)


def _attend(
    function,
    q,
    cache,
    qo_indptr,
    pages,
    kv_layout,
    causal,
    window,
    softcap,
    scale,
    mask,
    sinks,
    scales,
    return_lse,
    packed=False,
):
    check_tensors(function, 3, q=q)
    k, v = split_cache(function, cache, kv_layout)
    left, right = _limits(function, window)
    if not isinstance(softcap, (int, float)) or not 0 <= softcap < math.inf:
        raise ValueError(
            f"metalcore.paged.{function}: softcap must be a finite number that is not negative, not {softcap!r}"
        )
    heads_first = kv_layout == "HND"
    names = ("kv_indptr", "kv_indices", "kv_last_page_len")
    pages = [index_vector(function, name, numbers, q) for name, numbers in zip(names, pages)]
    if qo_indptr is not None:
        qo_indptr = index_vector(function, "qo_indptr", qo_indptr, q)
    check_pages(function, k.shape[0], k.shape[2 if heads_first else 1], *pages, qo_indptr, q.shape[0])  # pyright: ignore[reportCallIssue]
    right = 0 if causal else right
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    mask_indptr = None
    if sinks is not None:
        check_tensors(function, 1, sinks=sinks)
    if mask is not None:
        check_tensors(function, 1, custom_mask=mask)
        page_size = k.shape[2 if heads_first else 1]
        mask, mask_indptr = mask.contiguous(), _mask_indptr(qo_indptr, *pages[::2], page_size, packed)
        check_mask(function, mask, mask_indptr)
    dtype = q.dtype
    q, scale, of_values = scaled(function, q, k.shape[1 if heads_first else 2], scale, *scales)
    arguments = (q, qo_indptr, k, v, *pages, heads_first, mask, mask_indptr, sinks, left, right, scale, float(softcap))
    if accelerated(q, k, v, sinks) and _has_kernel(k, v) and not _needs_gradient(q, k, v, sinks):
        out, lse = ops.paged_attention(*arguments)
    else:
        out, lse = _composite.attend(*arguments)  # pyright: ignore[reportCallIssue]
    out = (out if of_values is None else out.to(lse.dtype) * of_values).to(dtype)
    return (out, lse) if return_lse else out


def _limits(function, window):
    if not (isinstance(window, (tuple, list)) and len(window) == 2 and all(type(n) is int and n >= -1 for n in window)):
        raise ValueError(f"metalcore.paged.{function}: window must be two integers of -1 and more, not {window!r}")
    return [_FAR if size < 0 else min(size, _FAR) for size in window]


def _tokens(cache, kv_layout, kv_indptr, kv_last_page_len):
    """Returns the indices of all pages, each of which has one token."""
    k, _ = split_cache("batch_prefill", cache, kv_layout)
    if k.shape[2 if kv_layout == "HND" else 1] != 1 or kv_last_page_len is not None:
        raise ValueError(
            "metalcore.paged.batch_prefill: kv_indices and kv_last_page_len are None for pages of one token"
        )
    return torch.arange(k.shape[0], dtype=torch.int32, device=k.device), torch.ones_like(kv_indptr[1:])


def _bits(packed):
    """Returns the elements of a packed mask."""
    check_tensors("batch_prefill", 1, packed_custom_mask=packed)
    if packed.dtype != torch.uint8:
        raise ValueError(f"metalcore.paged.batch_prefill: packed_custom_mask must be uint8, not {packed.dtype}")
    places = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return (packed.unsqueeze(-1) >> places & 1).flatten().bool()


def _mask_indptr(qo_indptr, kv_indptr, kv_last_page_len, page_size, packed):
    """Returns where the mask of each request begins: of a packed one, at a byte of its own."""
    pages = kv_indptr[1:] - kv_indptr[:-1]
    lengths = torch.where(pages > 0, (pages - 1) * page_size + kv_last_page_len, 0)
    sizes = (qo_indptr[1:] - qo_indptr[:-1]) * lengths
    if packed:
        sizes = (sizes + 7) // 8 * 8
    return torch.cat([sizes.new_zeros(1), sizes.cumsum(0, dtype=torch.int32)])


def _has_kernel(k, v):
    return any(0 < k.shape[-1] <= most_k and 0 < v.shape[-1] <= most_v for most_k, most_v in MOST_HEAD_SIZES)


def _needs_gradient(*tensors):
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


@cpu_kernel("paged_attention")
def _(*arguments):
    return _composite.attend(*arguments)


@fake_kernel("paged_attention")
def _(q, qo_indptr, k, v, *others):
    return q.new_empty(*q.shape[:-1], v.shape[-1]), q.new_empty(q.shape[:-1], dtype=_wide(q))


@cpu_kernel("merge_states")
def _(v, s):
    return _composite.merge(v, s)


@fake_kernel("merge_states")
def _(v, s):
    return v.new_empty(v.shape[0], *v.shape[2:]), s.new_empty(s.shape[0], s.shape[2])


def _wide(q):
    return torch.float64 if q.dtype == torch.float64 else torch.float32


# Samples


def _prefill_arguments(q, *cache):
    """Returns three requests of 2, 0 and 5 queries and 11, 0 and 5 keys."""
    vectors = ([0, 2, 2, 7], [0, 3, 3, 5], [4, 1, 3, 0, 5], [3, 0, 1])
    return q, cache if len(cache) == 2 else cache[0], *(integers(numbers, q, torch.int32) for numbers in vectors)


def _decode_arguments(q, cache):
    """Returns two requests with all pages but one between them."""
    pages = cache.shape[0] - 1
    indptr, last = (integers(numbers, q, torch.int32) for numbers in ([0, 1, pages], [3, 2]))
    return q, cache, indptr, torch.arange(pages, 0, -1, dtype=torch.int32, device=q.device), last


def _reference_of(ragged):
    def reference(q, cache, *numbers, kv_layout="NHD", causal=False, window=(-1, -1), softcap=0.0, return_lse=False):
        left, right = (_FAR if size < 0 else size for size in window)
        qo_indptr, pages = (numbers[0], numbers[1:]) if ragged else (None, numbers)
        others = (None, None, None, left, 0 if causal else right, q.shape[-1] ** -0.5, softcap)
        pools = split_cache("batch_prefill", cache, kv_layout)
        result = _composite.attend(q, qo_indptr, *pools, *pages, kv_layout == "HND", *others)  # pyright: ignore[reportCallIssue]
        return result if return_lse else result[0]

    return reference


_INTEGERS = {
    **dict.fromkeys(("qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_len"), torch.int32),
    "custom_mask": torch.bool,
}
register(
    Op(
        "batch_prefill",
        batch_prefill,
        reference=_reference_of(ragged=True),
        operators=("paged_attention",),
        backward=False,
        integers=_INTEGERS,
        production=lambda heads=32, kv_heads=8, head_size=128: Sample(
            "",
            ((7, heads, head_size), (6, 2, 4, kv_heads, head_size)),
            {"causal": True},
            _prefill_arguments,
            terms=head_size,
        ),
        samples=lambda: (
            Sample("causal", ((7, 4, 64), (6, 2, 4, 2, 64)), {"causal": True}, _prefill_arguments, terms=64),
            Sample(
                "HND, window, softcap",
                ((7, 2, 24), (6, 2, 4, 24), (6, 2, 4, 20)),
                {"kv_layout": "HND", "window": (3, 1), "softcap": 5.0, "return_lse": True},
                _prefill_arguments,
                terms=64,
            ),
        ),
    )
)
register(
    Op(
        "batch_decode",
        batch_decode,
        reference=_reference_of(ragged=False),
        operators=("paged_attention",),
        backward=False,
        integers=_INTEGERS,
        production=lambda heads=32, kv_heads=8, head_size=128, pages=64: Sample(
            "",
            ((2, heads, head_size), (pages + 1, 2, 16, kv_heads, head_size)),
            {},
            _decode_arguments,
            terms=16 * pages,
        ),
        samples=lambda: (
            Sample("few keys", ((2, 4, 64), (5, 2, 4, 2, 64)), {}, _decode_arguments, terms=64),
            Sample("many heads", ((2, 24, 64), (5, 2, 4, 2, 64)), {}, _decode_arguments, terms=64),
            Sample(
                "many keys",
                ((2, 4, 128), (33, 2, 16, 1, 128)),
                {"return_lse": True},
                _decode_arguments,
                terms=512,
            ),
        ),
    )
)
register(
    Op(
        "merge_states",
        merge_states,
        reference=_composite.merge,
        operators=("merge_states",),
        backward=False,
        samples=lambda: (
            Sample("states", ((5, 3, 2, 64), (5, 3, 2)), arguments=lambda v, s: (v, s.to(_wide(v))), terms=16),
        ),
    )
)
