"""The functions of the package flash_attn (2.x) by metalcore's attention, for code that calls them directly.

    from metalcore.integrations.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

They take float32 too, and head sizes up to 256.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..attention import scaled_dot_product_attention
from ..attention._varlen import varlen_attention
from ..paged import PageTable, append_kv

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    s_aux: Tensor | None = None,
):
    """Computes attention of q, k and v of the shape (batch, length, heads, size).

    Args:
        causal, window_size: the last query is at the last key.
        alibi_slopes: (heads,) or (batch, heads): the score of query i and key j gets -slope * |i - j|, where the last
            query is at the last key.
        deterministic: is accepted. Results always are.
        return_attn_probs: also returns the logarithms of the sums (batch, heads, length), and None.
        s_aux: a sink's logit for each head.

    Returns:
        (batch, length, heads, size of v).

    Example:
        >>> from metalcore.integrations.flash_attn import flash_attn_func
        >>> q, k, v = torch.randn(3, 1, 8, 2, 64, device="mps")
        >>> flash_attn_func(q, k, v, causal=True).shape
        torch.Size([1, 8, 2, 64])
    """
    result: Any = scaled_dot_product_attention(
        *(tensor.transpose(1, 2) for tensor in (q, k, v)),
        dropout_p=dropout_p,
        scale=softmax_scale,
        enable_gqa=q.shape[2] != k.shape[2],
        window=_window(causal, window_size),
        lower_right=True,
        softcap=softcap,
        sinks=s_aux,
        alibi_slopes=alibi_slopes,
        return_lse=return_attn_probs,
    )
    return (result[0].transpose(1, 2), result[1], None) if return_attn_probs else result.transpose(1, 2)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    s_aux: Tensor | None = None,
    *,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
):
    """Computes `flash_attn_func` for sequences that follow each other: q, k and v have the shape (tokens, heads, size).

    Args:
        cu_seqlens_q, cu_seqlens_k: where sequences begin, and where the last one ends.
        max_seqlen_q, max_seqlen_k: the length of the longest sequence.
        alibi_slopes: (heads,) or (sequences, heads), as for flash_attn_func.
        block_table: (sequences, most), integers: the pages of each sequence. k and v are then (pages, page_size, heads,
            size), with pages of any size. Gradients, dropout_p, alibi_slopes and leftpad_k copy the pages.
        seqused_k: how many keys of each sequence are seen, (sequences,), integers.
        leftpad_k: how many of these stand before the first one that is seen.
        return_attn_probs: also returns the logarithms of the sums (heads, tokens), and None.

    Example:
        >>> from metalcore.integrations.flash_attn import flash_attn_varlen_func
        >>> q, k, v = torch.randn(3, 5, 2, 64, device="mps")
        >>> begins = torch.tensor([0, 2, 5], dtype=torch.int32, device="mps")  # of two sequences
        >>> flash_attn_varlen_func(q, k, v, begins, begins, 3, 3, causal=True).shape
        torch.Size([5, 2, 64])
    """
    result = varlen_attention(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p=dropout_p,
        scale=softmax_scale,
        window=_window(causal, window_size),
        softcap=softcap,
        sinks=s_aux,
        alibi_slopes=alibi_slopes,
        seqused_k=seqused_k,
        leftpad_k=leftpad_k,
        block_table=block_table,
        return_lse=return_attn_probs,
    )
    return (*result, None) if return_attn_probs else result


@torch.no_grad()
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
):
    """Computes attention of new tokens to a cache, into which their keys and values are written first. It has no
    gradient.

    Args:
        q: (batch, length, heads, size).
        k_cache, v_cache: (batch of the cache, length of the cache, heads, size); with block_table (pages, page_size,
            heads, size), with pages of any size. They are changed if k and v are given.
        k, v: (batch, new tokens, heads, size), of which the first stands behind cache_seqlens tokens.
        rotary_cos, rotary_sin: (positions, half of the size that rotates): rotate k, and q, whose first token stands
            behind cache_seqlens tokens (all of them without causal and window_size).
        cache_seqlens: how many tokens the cache has: a number, or one for each batch item (integers). By default all.
        cache_batch_idx: which item of the cache is that of each batch item, (batch,), integers.
        cache_leftpad: how many tokens stand before the first one of each batch item, (batch,), integers.
        block_table: (batch, most), integers: the pages of each batch item.
        causal, window_size, alibi_slopes: as for flash_attn_func.
        rotary_interleaved: rotates neighbours, and not the first half with the second one.
        num_splits: is accepted.
        return_softmax_lse: also returns the logarithms of the sums (batch, heads, length).

    Returns:
        (batch, length, heads, size of v).

    Raises:
        ValueError: arguments do not go together.
        TypeError, RuntimeError: as metalcore.scaled_dot_product_attention and metalcore.paged.append_kv.

    Example:
        >>> from metalcore.integrations.flash_attn import flash_attn_with_kvcache
        >>> k_cache, v_cache = torch.zeros(2, 1, 16, 2, 64, device="mps")
        >>> q, k, v = torch.randn(3, 1, 1, 2, 64, device="mps")
        >>> flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=3).shape
        torch.Size([1, 1, 2, 64])
    """
    name = "flash_attn_with_kvcache"
    if (k is None) != (v is None) or (rotary_cos is None) != (rotary_sin is None):
        raise ValueError(f"{name}: k and v, and rotary_cos and rotary_sin, go together")
    if q.dim() != 4 or k_cache.dim() != 4 or v_cache.dim() != 4:
        raise ValueError(f"{name}: q, k_cache and v_cache must have 4 dimensions")
    if block_table is not None and (cache_batch_idx is not None or cache_leftpad is not None):
        raise ValueError(f"{name}: block_table goes with neither cache_batch_idx nor cache_leftpad")
    if rotary_cos is not None and k is None:
        raise ValueError(f"{name}: rotary_cos needs k and v")
    if k is not None and cache_seqlens is None:
        raise ValueError(f"{name}: k needs cache_seqlens, the places of its tokens")
    batch, length, size = q.shape[0], q.shape[1], k_cache.shape[1]
    if block_table is None:  # an item of the cache is a page
        items = cache_batch_idx
        if items is None:
            items = torch.arange(batch, dtype=torch.int32, device=q.device)
        block_table = items.unsqueeze(1)
    if cache_seqlens is None:
        cache_seqlens = block_table.shape[1] * size
    if not isinstance(cache_seqlens, Tensor):
        cache_seqlens = torch.full((batch,), cache_seqlens, dtype=torch.int32, device=q.device)
    window = _window(causal, window_size)
    if rotary_cos is not None:
        first = cache_seqlens if cache_leftpad is None else cache_seqlens - cache_leftpad
        tables = rotary_cos, rotary_sin, rotary_interleaved
        q = _rotated(q, first, *tables, advances=window != (-1, -1))
        k = _rotated(k, first, *tables)
    if k is not None and v is not None:
        cache_seqlens = cache_seqlens + k.shape[1]
        table = PageTable.from_block_table(block_table, cache_seqlens, size)
        ends = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * k.shape[1]
        append_kv(k.flatten(0, 1), v.flatten(0, 1), (k_cache, v_cache), *table.pages, qo_indptr=ends)
    bounds = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * length
    result: Any = varlen_attention(
        q.flatten(0, 1),
        k_cache,
        v_cache,
        bounds,
        bounds,
        length,
        block_table.shape[1] * size,
        scale=softmax_scale,
        window=window,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        seqused_k=cache_seqlens,
        leftpad_k=cache_leftpad,
        block_table=block_table,
        return_lse=True,
    )
    out = result[0].unflatten(0, (batch, length))
    return (out, result[1].unflatten(1, (batch, length)).transpose(0, 1)) if return_softmax_lse else out


def _rotated(x, first, cos, sin, interleaved, advances=True):
    """Returns x (batch, length, heads, size), whose first token has the position `first`, rotated in float32."""
    places = torch.arange(x.shape[1], device=x.device) * advances
    c, s = (table[first.unsqueeze(1) + places].unsqueeze(2).float() for table in (cos, sin))
    turned = x[..., : 2 * cos.shape[-1]].float()
    a, b = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    pair = a * c - b * s, a * s + b * c
    turned = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat([turned.to(x.dtype), x[..., 2 * cos.shape[-1] :]], -1)


def _window(causal, window_size):
    left, right = (-1 if limit is None else limit for limit in window_size)
    return left, 0 if causal else right
