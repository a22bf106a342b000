"""What the kernels of pages compute, in PyTorch's ops, for tensors on the CPU and for derivatives."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["append", "attend", "merge"]


def attend(
    q, qo_indptr, k, v, kv_indptr, kv_indices, last, heads_first, mask, mask_indptr, sinks, left, right, scale, softcap
):
    """Returns the operator paged_attention."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    starts = list(range(q.shape[0] + 1)) if qo_indptr is None else qo_indptr.tolist()
    indptr, last = kv_indptr.tolist(), last.tolist()
    out = q.new_zeros(*q.shape[:-1], v.shape[-1])
    lse = q.new_full(q.shape[:-1], -torch.inf, dtype=wide)
    outs, sums, done = [], [], 0
    for request, length in enumerate(last):
        begin, end = starts[request], starts[request + 1]
        pages = kv_indices[indptr[request] : indptr[request + 1]]
        of_request = None if mask is None else mask[int(mask_indptr[request]) :]
        result = _attend_request(
            q[begin:end].to(wide),
            _tokens(k, pages, length, heads_first).to(wide),
            _tokens(v, pages, length, heads_first).to(wide),
            of_request,
            sinks,
            left,
            right,
            scale,
            softcap,
        )
        outs += [out[done:begin], result[0].to(q.dtype)]
        sums += [lse[done:begin], result[1]]
        done = end
    return torch.cat([*outs, out[done:]]), torch.cat([*sums, lse[done:]])


def _tokens(pool, pages, last, heads_first):
    """Returns the keys or values of a request: (length, heads, size)."""
    tokens = pool.index_select(0, pages)
    tokens = (tokens.transpose(1, 2) if heads_first else tokens).flatten(0, 1)
    size = pool.shape[2 if heads_first else 1]
    return tokens[: max(len(pages) - 1, 0) * size + (last if len(pages) else 0)]


def _attend_request(q, k, v, mask, sinks, left, right, scale, softcap):
    queries, heads, _ = q.shape
    group = heads // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    position = torch.arange(queries, device=q.device)[:, None] + len(k) - queries
    distance = torch.arange(len(k), device=q.device) - position
    seen = (distance <= right) & (distance >= -left)
    if mask is not None:
        seen = seen & mask[: queries * len(k)].view(queries, len(k))
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype).view(-1, 1, 1).expand(-1, queries, 1)], -1)
    lse = torch.logsumexp(scores, -1) if scores.shape[-1] else scores.new_full(scores.shape[:-1], -torch.inf)
    weights = (scores[..., : len(k)] - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()
    return torch.einsum("hqk,khd->qhd", weights, v), lse.mT


def append(key, value, batch_indices, positions, k, v, kv_indptr, kv_indices, heads_first):
    """Computes the operator paged_append."""
    size = k.shape[2 if heads_first else 1]
    indptr, indices = kv_indptr.tolist(), kv_indices.tolist()
    for token, (request, position) in enumerate(zip(batch_indices.tolist(), positions.tolist())):
        if not 0 <= request < len(indptr) - 1 or not 0 <= position < (indptr[request + 1] - indptr[request]) * size:
            continue
        page, slot = indices[indptr[request] + position // size], position % size
        if not 0 <= page < k.shape[0]:
            continue
        for pool, new in ((k, key), (v, value)):
            (pool[page, :, slot] if heads_first else pool[page, slot]).copy_(new[token])


def merge(v: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the operator merge_states."""
    lse = torch.logsumexp(s, 1) if s.shape[1] else s.new_full((s.shape[0], s.shape[2]), -torch.inf)
    weights = (s - lse.masked_fill(lse == -torch.inf, 0.0)[:, None]).exp()
    return (weights[..., None] * v).sum(1).to(v.dtype), lse
