"""Attention of sequences of different lengths that follow each other in one tensor."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .._core.routing import accelerated, require_tensors
from .._core.tensors import check_offsets, host_sees, in_int32
from ..paged import PageTable, batch_prefill
from ._arguments import MOST_HEAD_SIZE, as_autocast, bias_of, check_options, check_slopes, new_seed, takes, window_of
from ._operators import Options, attend, attention

__all__ = ["varlen_attention"]

_NAME = "metalcore.nn.attention.varlen_attn"


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    dropout_p: float = 0.0,
    scale: float | None = None,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    seqused_k: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    block_table: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes scaled_dot_product_attention of each sequence by itself. Bands count from a sequence's last query and
    key.

    Args:
        query: (tokens, heads, E).
        key, value: (tokens of key, heads, E) and (…, Ev). Their heads divide those of query.
        cu_seq_q, cu_seq_k: where sequences begin, and where the last one ends: (sequences + 1,), integers.
        max_q, max_k: the length of the longest sequence. Where the host does not see cu_seq_q and cu_seq_k, a longer
            sequence has wrong results.
        dropout_p, scale, window, softcap, sinks: as for metalcore.scaled_dot_product_attention.
        alibi_slopes: as there; (heads,) or (sequences, heads).
        seqused_k: how many keys of each sequence there are, (sequences,), integers. Those behind are not seen.
        leftpad_k: how many of these stand before the first key that is seen.
        block_table: key and value are pages, (pages, page_size, heads, E) and (…, Ev), of which each sequence has those
            in its row of (sequences, most), integers. seqused_k or cu_seq_k says how many keys it has. Without
            dropout, gradients, alibi_slopes and leftpad_k no page is copied.

    Returns:
        (tokens, heads, Ev), with gradients of any order. Tokens behind the last sequence get zeros. With return_lse
        also (heads, tokens) in float32.

    Raises:
        RuntimeError: shapes, dtypes or devices do not go together.
        TypeError: an argument is no tensor, or a length is no integer.
        ValueError: as scaled_dot_product_attention; or, where the host sees the numbers, offsets descend or lead out of
            the tokens, or a sequence is longer than max_q or max_k says.
    """
    require_tensors(_NAME, query=query, key=key, value=value, cu_seq_q=cu_seq_q, cu_seq_k=cu_seq_k)
    tensors: Any = as_autocast(query, key, value)
    query, key, value = tensors
    _check(query, key, value, cu_seq_q, cu_seq_k, block_table is not None)
    _check_lengths("q", query, cu_seq_q, max_q)
    counts = _counts(cu_seq_q, seqused_k=seqused_k, leftpad_k=leftpad_k)
    left, right = window_of(_NAME, window)
    if block_table is not None:
        lengths = cu_seq_k.diff() if counts[0] is None else counts[0]
        differentiated = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        if not (dropout_p or differentiated or alibi_slopes is not None or leftpad_k is not None):
            table = PageTable.from_block_table(block_table, lengths, key.shape[1])
            result: Any = batch_prefill(
                query,
                (key, value),
                cu_seq_q,
                *table.pages,
                window=(left, right),
                softcap=softcap,
                scale=scale,
                sinks=sinks,
                return_lse=True,
            )
            return (result[0], result[1].mT) if return_lse else result[0]
        key, value, cu_seq_k = _joined_pages(key, value, block_table)
        counts = lengths, counts[1]
    else:
        _check_lengths("k", key, cu_seq_k, max_k, counts[0])
    q, k, v = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (query, key, value))
    check_options(_NAME, q, dropout_p, softcap, sinks)
    options = Options(
        max_q=int(max_q),
        max_k=int(max_k),
        left=left,
        right=right,
        lower_right=True,
        scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
        softcap=float(softcap),
        dropout=float(dropout_p),
    )
    seed = new_seed(q.device) if dropout_p > 0 else None
    tiled = max(q.shape[-1], v.shape[-1]) <= MOST_HEAD_SIZE
    fits = accelerated(q, k, v, sinks, alibi_slopes) and tiled and takes(q, k, v)
    bounds = (cu_seq_q.int(), cu_seq_q.int() if cu_seq_k is cu_seq_q else cu_seq_k.int())
    slopes = None
    if alibi_slopes is not None:
        slopes = check_slopes(_NAME, alibi_slopes, cu_seq_q.shape[0] - 1, q.shape[1], q)
    if any(count is not None for count in counts):
        bounds, parts = _seen_alone(bounds[0], bounds[1], *counts)
        if slopes is not None and slopes.shape[0] > 1:
            slopes = slopes.repeat_interleave(parts, 0)
    mask = None
    if slopes is not None:
        bounds, mask = _with_slopes(bounds[0], bounds[1], slopes, options)
    if fits:
        out, lse = attention(q, k, v, mask, sinks, bounds[0], bounds[1], seed, *options)
    else:
        out, lse = attend(q, k, v, mask, sinks, bounds[0], bounds[1], seed, options)
    out, lse = out.squeeze(0).transpose(0, 1), lse.squeeze(0)
    return (out, lse) if return_lse else out


def _seen_alone(cu_seq_q, cu_seq_k, used, first):
    """Returns where sequences begin if keys that are not seen are sequences of their own, which have no queries, and
    how many there are in the place of one."""
    begin, end = cu_seq_k[:-1], cu_seq_k[1:]
    bounds_q, bounds_k = [cu_seq_q[:-1], cu_seq_q[1:]], [begin]
    last = end if used is None else torch.minimum(begin + used.clamp(min=0), end)
    if first is not None:
        bounds_q.insert(0, cu_seq_q[:-1])
        bounds_k.append(torch.minimum(begin + first.clamp(min=0), last))
    bounds_k.append(last)
    joined = [
        torch.cat([torch.stack(parts, 1).flatten(), cu_seq[-1:]]).int()
        for parts, cu_seq in ((bounds_q, cu_seq_q), (bounds_k, cu_seq_k))
    ]
    return joined, len(bounds_k)


def _joined_pages(key, value, block_table):
    """Returns keys and values that follow each other, and where those of each sequence begin."""
    require_tensors(_NAME, block_table=block_table)
    sequences, most = block_table.shape
    pages = block_table.clamp(0, max(key.shape[0] - 1, 0)).flatten().long()
    bounds = torch.arange(sequences + 1, dtype=torch.int32, device=key.device) * (most * key.shape[1])
    return key[pages].flatten(0, 1), value[pages].flatten(0, 1), bounds


def _with_slopes(cu_seq_q, cu_seq_k, slopes, options):
    """Returns the sequences' bounds, and their biases. A sequence that is longer than the host knows has no bias for
    its ends, and there is nothing to see then."""
    queries, keys = cu_seq_q.diff(), cu_seq_k.diff()
    fits = ((queries <= options.max_q) & ((keys <= options.max_k) | (queries == 0))).all()
    bounds = cu_seq_q.where(fits, 0), cu_seq_k.where(fits, 0)
    return bounds, bias_of(slopes, keys - queries, options.max_q, options.max_k)


def _check(query, key, value, cu_seq_q, cu_seq_k, paged=False):
    if not (query.dim() == 3 and key.dim() == value.dim() == (4 if paged else 3)):
        dims = "key and value (pages, page_size, heads, size)" if paged else "key and value the same"
        raise RuntimeError(f"{_NAME}: query must have the dimensions (tokens, heads, size), and {dims}")
    if not query.dtype == key.dtype == value.dtype or not query.is_floating_point():
        raise RuntimeError(f"{_NAME}: query, key and value must have one dtype, a floating-point one")
    if not query.device == key.device == value.device:
        raise RuntimeError(f"{_NAME}: query, key and value must be on one device")
    if query.shape[-1] != key.shape[-1] or key.shape[:-1] != value.shape[:-1] or query.shape[-1] == 0:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in (query, key, value))
        raise RuntimeError(f"{_NAME}: query, key and value of the shapes {shapes} do not go together")
    if key.shape[-2] == 0 or query.shape[1] % key.shape[-2]:
        raise RuntimeError(f"{_NAME}: {query.shape[1]} heads of query are no multiple of {key.shape[-2]} of key")
    for cu_seq in (cu_seq_q, cu_seq_k):
        integers = not (cu_seq.is_floating_point() or cu_seq.is_complex() or cu_seq.dtype is torch.bool)
        if cu_seq.dim() != 1 or cu_seq.shape != cu_seq_q.shape or not integers or not len(cu_seq):
            raise RuntimeError(f"{_NAME}: cu_seq_q and cu_seq_k must be integers of one shape (sequences + 1,)")
        if cu_seq.device != query.device:
            raise RuntimeError(f"{_NAME}: cu_seq_q and cu_seq_k must be on query's device, {query.device}")


def _counts(cu_seq_q, **counts):
    """Returns the numbers of keys as int32."""
    for name, numbers in counts.items():
        if numbers is None:
            continue
        require_tensors(_NAME, **{name: numbers})
        if numbers.is_floating_point() or numbers.is_complex() or numbers.dtype is torch.bool:
            raise RuntimeError(f"{_NAME}: {name} must be integers, not {numbers.dtype}")
        if numbers.shape != (cu_seq_q.shape[0] - 1,) or numbers.device != cu_seq_q.device:
            raise RuntimeError(
                f"{_NAME}: {name} must have the shape ({cu_seq_q.shape[0] - 1},) and be on {cu_seq_q.device}, not "
                f"{tuple(numbers.shape)} and on {numbers.device}"
            )
    return tuple(None if numbers is None else in_int32(numbers) for numbers in counts.values())


def _check_lengths(of, tensor, cu_seq, most, used=None):
    if not isinstance(most, (int, torch.SymInt, Tensor)):
        raise TypeError(f"{_NAME}: max_{of} must be an integer, not {type(most).__name__}")
    if not host_sees(cu_seq):
        return
    offsets = check_offsets(_NAME, f"cu_seq_{of}", cu_seq, tensor.shape[0])
    lengths = [end - begin for begin, end in pairwise(offsets)]
    if used is not None:
        lengths = [min(length, count) for length, count in zip(lengths, used.tolist())]
    for sequence, length in enumerate(lengths):
        if length > most:
            raise ValueError(f"{_NAME}: max_{of} is {most}, and sequence {sequence} has {length} tokens")
