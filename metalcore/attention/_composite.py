"""Attention in PyTorch's ops: for tensors that the kernels do not take, and for derivatives of derivatives.

Everything here is differentiable to any order. It holds the scores of all queries and keys, in float32 (float64 for
float64), several times.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Options", "attend", "gradients", "spread"]


class Options(NamedTuple):
    """What the operators attention and attention_backward take after their tensors.

    Attributes:
        max_q, max_k: the length of the longest sequence, where sequences have variable lengths; else ignored.
        left, right: query i sees keys from i + shift - left to i + shift + right. -1 stands for no limit.
        lower_right: whether shift is the number of keys less that of queries, and not 0.
        scale: the factor of queries' products with keys.
        softcap: scores become softcap * tanh(score / softcap). 0 stands for none.
        dropout: the probability with which a weight is dropped.
    """

    max_q: int
    max_k: int
    left: int
    right: int
    lower_right: bool
    scale: float
    softcap: float
    dropout: float


class _Weights(NamedTuple):
    q: Tensor
    k: Tensor  # one head for each head of queries
    v: Tensor
    capped: Tensor | None  # tanh(score / softcap)
    p: Tensor
    kept: Tensor | None  # what dropout multiplies p by
    lse: Tensor


def attend(q, k, v, mask, sinks, cu_seq_q, cu_seq_k, seed, options: Options) -> tuple[Tensor, Tensor]:
    """Returns the results and the logarithms of the sums of exponentials.

    Args:
        q: (batch, heads, length, head size). With cu_seq_q and cu_seq_k, batch is 1 and sequences follow each other.
        k, v: (batch, heads, length, size), where heads divide those of q.
        mask: bool or floating-point, of the shape (batch, heads of q, length of q, length of k), or None. A mask of one
            row and length of q + length of k - 1 columns has a number for each distance of a key and a query, from
            that of the last query and the first key on (`spread`). With cu_seq_q, a mask has this form, a batch item
            for each sequence, and the lengths max_q and max_k.
        sinks: a logit for each head of q, which takes part in the sum and has no value, or None.
        cu_seq_q, cu_seq_k: where sequences begin, and where the last one ends; int32, or None.
        seed: two int32 numbers for dropout, or None.
    """
    w = _weights(q, k, v, mask, sinks, cu_seq_q, cu_seq_k, seed, options)
    p = w.p if w.kept is None else w.p * w.kept
    return (p @ w.v).to(q.dtype), w.lse


def gradients(grad, grad_lse, q, k, v, mask, sinks, cu_seq_q, cu_seq_k, seed, options: Options):
    """Returns the gradients of q, k, v and of the scores after softcap (which are a mask's), and for each query the sum
    over the keys of weights times their gradients, of which the gradient of sinks is made."""
    w = _weights(q, k, v, mask, sinks, cu_seq_q, cu_seq_k, seed, options)
    g = grad.to(w.p.dtype)
    p = w.p if w.kept is None else w.p * w.kept
    dv = p.mT @ g
    dp = g @ w.v.mT
    if w.kept is not None:
        dp = dp * w.kept
    delta = (w.p * dp).sum(-1)
    if grad_lse is not None:
        delta = delta - grad_lse
    ds = d_mask = w.p * (dp - delta.unsqueeze(-1))
    if w.capped is not None:
        ds = ds * (1 - w.capped.square())
    ds = ds * options.scale
    dk, dv = _summed(ds.mT @ w.q, k), _summed(dv, v)
    return (ds @ w.k).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), d_mask, delta


def _summed(gradient, x):
    """Returns the sums over the heads of queries that share a head of x."""
    batch, heads, columns, size = x.shape
    if not heads:
        return torch.zeros_like(x)
    # autograd's is_grads_batched knows reshape, and not unflatten.
    return gradient.reshape(batch, heads, gradient.shape[1] // heads, columns, size).sum(2)


def _weights(q, k, v, mask, sinks, cu_seq_q, cu_seq_k, seed, o: Options) -> _Weights:
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    dtype, (batch, heads, rows, _), columns = q.dtype, q.shape, k.shape[2]
    group = heads // max(k.shape[1], 1)
    q, k, v = q.to(wide), k.to(wide), v.to(wide)
    if group != 1:
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = (q @ k.mT) * o.scale
    capped = None
    if o.softcap:
        capped = torch.tanh(s / o.softcap)
        s = capped * o.softcap
    if mask is not None:
        mask = spread(mask, rows, columns, cu_seq_q, cu_seq_k, o)
        s = s.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else s + mask
    hidden = _hidden(rows, columns, cu_seq_q, cu_seq_k, o, q.device)
    if hidden is not None:
        s = s.masked_fill(hidden, -torch.inf)
    # One more column: the sink, or nothing.
    sink = s.new_full((heads,), -torch.inf) if sinks is None else sinks.to(wide)
    s = torch.cat([s, sink.view(1, heads, 1, 1).expand(batch, heads, rows, 1)], -1)
    largest = s.detach().amax(-1, keepdim=True)
    largest = largest.masked_fill(largest == -torch.inf, 0)
    e = (s - largest).exp()
    total = e.sum(-1, keepdim=True)
    nothing = total == 0
    total = total.masked_fill(nothing, 1)
    lse = (largest + total.log()).masked_fill(nothing, -torch.inf).squeeze(-1)
    kept = None
    if o.dropout > 0:
        kept = _kept(seed, batch, heads, rows, columns, cu_seq_q, cu_seq_k, o.dropout).to(wide)
        kept = kept / (1 - o.dropout) if o.dropout < 1 else torch.zeros_like(kept)
    return _Weights(q, k, v, capped, (e / total)[..., :-1], kept, lse if wide == dtype else lse.float())


def _hidden(rows, columns, cu_seq_q, cu_seq_k, o: Options, device):
    """Returns which keys a query does not see, because of the band or of another sequence. None: it sees all."""
    if cu_seq_q is None and o.left < 0 and o.right < 0:
        return None
    i = torch.arange(rows, device=device).unsqueeze(-1)
    j = torch.arange(columns, device=device)
    shift, hidden = 0, torch.zeros((), dtype=torch.bool, device=device)
    if cu_seq_q is not None:
        of_q, i, q_lengths = _places(i, cu_seq_q)
        of_k, j, k_lengths = _places(j, cu_seq_k)
        hidden = (of_q != of_k) | (of_q < 0) | (of_q == q_lengths.numel())
        if o.lower_right:
            shift = torch.nn.functional.pad(k_lengths - q_lengths, (0, 1))[of_q]
    elif o.lower_right:
        shift = columns - rows
    distance = j - i - shift
    if o.left >= 0:
        hidden = hidden | (distance < -o.left)
    if o.right >= 0:
        hidden = hidden | (distance > o.right)
    return hidden


def spread(mask, rows, columns, cu_seq_q, cu_seq_k, o: Options):
    """Returns a mask with a number for each distance as one with a number for each query and key. Others stay as they
    are."""
    if cu_seq_q is None and (rows <= 1 or mask.shape[2:] != (1, rows + columns - 1)):
        return mask
    i = torch.arange(rows, device=mask.device).unsqueeze(-1)
    j = torch.arange(columns, device=mask.device)
    if cu_seq_q is None:
        return mask[:, :, 0, j - i + rows - 1]
    sequence, i, lengths = _places(i, cu_seq_q)
    _, j, _ = _places(j, cu_seq_k)
    distance = (j - i + o.max_q - 1).clamp(0, mask.shape[3] - 1)  # of other sequences, it may be any
    sequence = sequence.clamp(0, lengths.numel() - 1) if mask.shape[0] > 1 else torch.zeros_like(sequence)
    return mask[:, :, 0][sequence, :, distance].permute(2, 0, 1).unsqueeze(0)


def _places(index, cu_seq):
    """Returns the number of the sequence that a token belongs to, the token's place in it, and all lengths. Tokens
    before the first sequence have -1, and those behind the last one the number of sequences."""
    cu_seq = cu_seq.long()
    sequence = (torch.searchsorted(cu_seq, index.flatten(), right=True) - 1).view(index.shape)
    return sequence, index - cu_seq[sequence], cu_seq.diff()


# Dropout: Philox4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011). Its key is the seed, and
# its counter (key / 4, query, head, batch item) gives the random numbers of four neighbouring keys. Sequences count
# their own queries and keys.

_LOW = 0xFFFFFFFF


def _kept(seed, batch, heads, rows, columns, cu_seq_q, cu_seq_k, dropout):
    device = seed.device
    i = torch.arange(rows, device=device).view(1, 1, -1, 1)
    j = torch.arange(columns, device=device).view(1, 1, 1, -1)
    item = torch.arange(batch, device=device).view(-1, 1, 1, 1)
    if cu_seq_q is not None:
        item, i, _ = _places(i, cu_seq_q)
        j = _places(j, cu_seq_k)[1]
    head = torch.arange(heads, device=device).view(1, -1, 1, 1)
    counter = torch.broadcast_tensors(j // 4, i, head, item)
    words = _philox(counter, *(seed.long() & _LOW))
    number = torch.stack(words).gather(0, (j % 4).expand_as(words[0]).unsqueeze(0)).squeeze(0)
    return number >= dropped(dropout)


def dropped(dropout: float) -> int:
    """Returns how many of 2^32 random numbers drop a weight."""
    return min(round(dropout * 2**32), _LOW)


def _philox(counter, key0, key1):
    c0, c1, c2, c3 = (c.long() for c in counter)
    for _ in range(10):
        high0, low0 = _product(c0, 0xD2511F53)
        high1, low1 = _product(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high1 ^ c1 ^ key0, low1, high0 ^ c3 ^ key1, low0
        key0, key1 = (key0 + 0x9E3779B9) & _LOW, (key1 + 0xBB67AE85) & _LOW
    return c0, c1, c2, c3


def _product(a, b):
    """Returns the high and the low 32 bits of a product of 32-bit numbers."""
    product = a * b  # in 64 bits, which may wrap
    return (product >> 32) & _LOW, product & _LOW
