"""The operators attention and attention_backward, and their derivatives."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .._core.operators import autograd, cpu_kernel, derive, fake_kernel, plain_operator
from ._composite import Options, attend, gradients, spread

__all__ = ["attention", "plain_attention"]

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
