"""Attention of sequences of different lengths that follow each other in one tensor."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .._core.host_numbers import check_offsets, host_sees
from .._core.routing import accelerated, require_tensors
from ._composite import Options, attend
from ._operators import attention
from ._sdpa import MOST_HEAD_SIZE, new_seed, takes
from ._sdpa import _autocast as as_autocast
from ._sdpa import _check as check_options
from ._sdpa import _window as window_of

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
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """scaled_dot_product_attention of each sequence by itself. Bands count from a sequence's last query and key.

    Args:
        query: (tokens, heads, E).
        key, value: (tokens of key, heads, E) and (…, Ev). Their heads divide those of query.
        cu_seq_q, cu_seq_k: where sequences begin, and where the last one ends: (sequences + 1,), integers.
        max_q, max_k: the length of the longest sequence. Where the host does not see cu_seq_q and cu_seq_k, a longer
            sequence has wrong results.
        dropout_p, scale, window, softcap, sinks: as for metalcore.scaled_dot_product_attention.

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
    _check(query, key, value, cu_seq_q, cu_seq_k)
    _check_lengths("q", query, cu_seq_q, max_q)
    _check_lengths("k", key, cu_seq_k, max_k)
    q, k, v = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (query, key, value))
    check_options(_NAME, q, dropout_p, softcap, sinks)
    left, right = window_of(_NAME, window)
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
    taken = accelerated(q, k, v, sinks) and tiled and takes(q, k, v)
    bounds = (cu_seq_q.int(), cu_seq_q.int() if cu_seq_k is cu_seq_q else cu_seq_k.int())
    if taken:
        out, lse = attention(q, k, v, None, sinks, *bounds, seed, *options)
    else:
        out, lse = attend(q, k, v, None, sinks, *bounds, seed, options)
    out, lse = out.squeeze(0).transpose(0, 1), lse.squeeze(0)
    return (out, lse) if return_lse else out


def _check(query, key, value, cu_seq_q, cu_seq_k):
    if not query.dim() == key.dim() == value.dim() == 3:
        raise RuntimeError(f"{_NAME}: query, key and value must have the dimensions (tokens, heads, size)")
    if not query.dtype == key.dtype == value.dtype or not query.is_floating_point():
        raise RuntimeError(f"{_NAME}: query, key and value must have one dtype, a floating-point one")
    if not query.device == key.device == value.device:
        raise RuntimeError(f"{_NAME}: query, key and value must be on one device")
    if query.shape[-1] != key.shape[-1] or key.shape[:-1] != value.shape[:-1] or query.shape[-1] == 0:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in (query, key, value))
        raise RuntimeError(f"{_NAME}: query, key and value of the shapes {shapes} do not go together")
    if key.shape[1] == 0 or query.shape[1] % key.shape[1]:
        raise RuntimeError(f"{_NAME}: {query.shape[1]} heads of query are no multiple of {key.shape[1]} of key")
    for cu_seq in (cu_seq_q, cu_seq_k):
        integers = not (cu_seq.is_floating_point() or cu_seq.is_complex() or cu_seq.dtype is torch.bool)
        if cu_seq.dim() != 1 or cu_seq.shape != cu_seq_q.shape or not integers or not len(cu_seq):
            raise RuntimeError(f"{_NAME}: cu_seq_q and cu_seq_k must be integers of one shape (sequences + 1,)")
        if cu_seq.device != query.device:
            raise RuntimeError(f"{_NAME}: cu_seq_q and cu_seq_k must be on query's device, {query.device}")


def _check_lengths(of, tensor, cu_seq, most):
    if not isinstance(most, (int, torch.SymInt, Tensor)):
        raise TypeError(f"{_NAME}: max_{of} must be an integer, not {type(most).__name__}")
    if not host_sees(cu_seq):
        return
    offsets = check_offsets(_NAME, f"cu_seq_{of}", cu_seq, tensor.shape[0])
    for sequence, (begin, end) in enumerate(pairwise(offsets)):
        if end - begin > most:
            raise ValueError(f"{_NAME}: max_{of} is {most}, and sequence {sequence} has {end - begin} tokens")
