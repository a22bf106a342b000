"""The operators attention and attention_backward, their derivatives, and attention in PyTorch's ops: for tensors that
the kernels do not take, and for derivatives of derivatives.

What is in PyTorch's ops is differentiable to any order. It holds the scores of all queries and keys, in float32
(float64 for float64), several times.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .._core.operators import autograd, cpu_kernel, derive, fake_kernel, plain_operator

__all__ = ["Options", "attend", "attention", "gradients", "plain_attention", "spread"]


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


# The places of an operator's arguments: tensors, and then Options.
_FORWARD, _BACKWARD = 8, 13


def like_heads(tensor: Tensor, size: int) -> Tensor:
    """Returns a new tensor (batch, heads, length, size) whose heads and rows lie in memory in the order of
    `tensor`'s."""
    batch, heads, length, _ = tensor.shape
    if tensor.stride(1) < tensor.stride(2):
        return tensor.new_empty(batch, length, heads, size).transpose(1, 2)
    return tensor.new_empty(batch, heads, length, size)


def _as_heads(value: Tensor, tensor: Tensor) -> Tensor:
    return like_heads(tensor, value.shape[-1]).copy_(value)


def _lse_dtype(q):
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _new_rests(q, v, differentiable):
    """Returns what the operator also gives if it is to be differentiated: the softmax's sums, as two logarithms to base
    2 of which the first is rounded and the second makes it whole, and what rounding takes from 16-bit results."""
    sums = q.new_empty((2, *q.shape[:-1]) if differentiable else 0, dtype=_lse_dtype(q))
    return sums, like_heads(q, v.shape[-1]) if differentiable and q.element_size() == 2 else q.new_empty(0)


@cpu_kernel("attention")
def _(q, k, v, mask, sinks, cu_seq_q, cu_seq_k, seed, *options):
    *options, differentiable = options
    out, lse = attend(q, k, v, mask, sinks, cu_seq_q, cu_seq_k, seed, Options(*options))
    sums, rests = _new_rests(q, v, differentiable)
    if differentiable:
        blind = lse == -torch.inf
        zero = torch.zeros_like(lse)
        sums.copy_(torch.stack([(lse / math.log(2)).where(~blind, zero), zero.masked_fill(blind, torch.inf)]))
    return _as_heads(out, q), lse.contiguous(), sums, rests.zero_()


@fake_kernel("attention")
def _(q, k, v, mask, sinks, cu_seq_q, cu_seq_k, seed, *options):
    return like_heads(q, v.shape[-1]), q.new_empty(q.shape[:-1], dtype=_lse_dtype(q)), *_new_rests(q, v, options[-1])


def _plain(causal, scale):
    return Options(0, 0, -1, 0 if causal else -1, False, scale, 0.0, 0.0)


@cpu_kernel("plain_attention")
def _(q, k, v, causal, scale):
    return _as_heads(attend(q, k, v, None, None, None, None, None, _plain(causal, scale))[0], q)


@fake_kernel("plain_attention")
def _(q, k, v, causal, scale):
    return like_heads(q, v.shape[-1])


@cpu_kernel("attention_backward")
def _(grad, grad_lse, q, k, v, out, sums, rests, mask, sinks, cu_seq_q, cu_seq_k, seed, *options):
    dq, dk, dv, _, delta = gradients(grad, grad_lse, q, k, v, mask, sinks, cu_seq_q, cu_seq_k, seed, Options(*options))
    return _as_heads(dq, q), _as_heads(dk, k), _as_heads(dv, v), delta.contiguous()


@fake_kernel("attention_backward")
def _(grad, grad_lse, q, k, v, out, sums, rests, mask, sinks, cu_seq_q, cu_seq_k, seed, *options):
    gradient_of = [like_heads(x, x.shape[-1]) for x in (q, k, v)]
    return *gradient_of, q.new_empty(q.shape[:-1], dtype=_lse_dtype(q))


def _save(ctx, inputs, output):
    ctx.options = inputs[_FORWARD:-1]
    ctx.save_for_backward(*inputs[:_FORWARD], *output)
    ctx.set_materialize_grads(False)  # that of lse is rarely asked for


def _backward(ctx, grad, grad_lse):
    q, k, v, mask, sinks, cu_seq_q, cu_seq_k, seed, out, lse, sums, rests = ctx.saved_tensors
    gradient_of: list = [None] * (_FORWARD + len(ctx.options) + 1)
    if grad is None and grad_lse is None:
        return tuple(gradient_of)
    if grad is None:
        grad = torch.zeros_like(out)
    others = mask, sinks, cu_seq_q, cu_seq_k, seed
    *gradient_of[:3], delta = _gradient(grad, grad_lse, q, k, v, out, sums, rests, *others, *ctx.options)
    if mask is not None and ctx.needs_input_grad[3]:
        of_scores = gradients(grad, grad_lse, q, k, v, *others, Options(*ctx.options))[3]
        with torch.enable_grad():
            leaf = mask.detach().requires_grad_()
            spread_out = spread(leaf, q.shape[2], k.shape[2], cu_seq_q, cu_seq_k, Options(*ctx.options))
        if spread_out is leaf:
            gradient_of[3] = of_scores.sum_to_size(mask.shape).to(mask.dtype)
        else:
            (gradient_of[3],) = torch.autograd.grad(
                spread_out, leaf, of_scores.sum_to_size(spread_out.shape).to(mask.dtype), create_graph=True
            )
    if sinks is not None and ctx.needs_input_grad[4]:
        # A sink is a score whose value is zero.
        weight = (sinks.to(lse.dtype).view(1, -1, 1) - lse).exp()
        gradient_of[4] = -(weight * delta).nan_to_num(0.0).sum((0, 2)).to(sinks.dtype)
    return tuple(gradient_of)


def _save_backward(ctx, inputs, output):
    ctx.options = inputs[_BACKWARD:]
    ctx.save_for_backward(*inputs[:_BACKWARD])
    ctx.set_materialize_grads(False)


def _double_backward(ctx, *cotangents):
    """Differentiates `gradients`, which is differentiable to any order. What `out` contributes is part of it, as it
    is a function of the other arguments."""

    def differentiable(grad, grad_lse, q, k, v, out, sums, rests, *others):
        results = gradients(grad, grad_lse, q, k, v, *others, Options(*ctx.options))  # pyright: ignore[reportCallIssue]
        return *results[:3], results[4]

    return *derive(differentiable, ctx.saved_tensors, cotangents), *((None,) * len(ctx.options))


_attention = autograd("attention", _backward, _save, results=2)
_gradient = autograd("attention_backward", _double_backward, _save_backward)


def attention(q, k, v, mask, sinks, cu_seq_q, cu_seq_k, seed, *options) -> tuple[Tensor, Tensor]:
    """Returns the results and the logarithms of the softmax's sums: `attend` with kernels, for tensors that `takes`
    accepts."""
    tensors = q, k, v, mask, sinks
    differentiable = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    return _attention(*tensors, cu_seq_q, cu_seq_k, seed, *options, differentiable)


def _differentiable(q, k, v, causal, scale):
    return attention(q, k, v, None, None, None, None, None, *_plain(causal, scale))[0]


plain_attention = plain_operator("plain_attention", _differentiable)
