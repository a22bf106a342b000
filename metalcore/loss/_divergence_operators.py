"""The operators of divergences between rows, and their derivatives."""

from __future__ import annotations

import math

import torch

from .._core.operators import autograd, cpu_kernel, derive, fake_kernel

__all__ = ["LOGITS", "LOG_PROBABILITIES", "PROBABILITIES", "divergence", "divergence_by_torch", "require_options"]

LOGITS, LOG_PROBABILITIES, PROBABILITIES = range(3)  # what an input holds, as the kernels number it
_SAVED = 5  # numbers that kernels keep of a row


def require_options(op, beta, temperature, reduction):
    """Returns the factor of logits."""
    if type(beta) not in (float, int) or not 0 <= beta <= 1:
        raise ValueError(f"{op}: beta must be in [0, 1], not {beta!r}")
    if type(temperature) not in (float, int) or not 0 < temperature < math.inf:
        raise ValueError(f"{op}: temperature must be a positive number, not {temperature!r}")
    if reduction not in ("batchmean", "sum", "none"):
        raise ValueError(f"{op}: reduction must be 'batchmean', 'sum' or 'none', not {reduction!r}")
    return 1.0 / temperature


# CPU and fake kernels


def _parts(input, target, input_kind, target_kind, scale):
    """Returns p, log p and log q in float32 or float64."""
    wide = torch.float64 if input.dtype == torch.float64 else torch.float32
    log_q, target = input.to(wide), target.to(wide)
    log_q = (log_q * scale).log_softmax(-1) if input_kind == LOGITS else log_q
    if target_kind == PROBABILITIES:
        return target, target.log(), log_q
    log_p = (target * scale).log_softmax(-1) if target_kind == LOGITS else target
    return log_p.exp(), log_p, log_q


def _weighed(a, b, c):
    return (a * (b - c)).where(a != 0, 0.0)


def _mixture(log_p, log_q, beta):
    return torch.logaddexp(log_p + math.log(beta), log_q + math.log(1 - beta))


def divergence_by_torch(input, target, beta, input_kind, target_kind, scale):
    """Returns the divergences of rows, differentiable to any order."""
    p, log_p, log_q = _parts(input, target, input_kind, target_kind, scale)
    if beta == 0:
        return _weighed(p, log_p, log_q).sum(-1)
    if beta == 1:
        return _weighed(log_q.exp(), log_q, log_p).sum(-1)
    log_m = _mixture(log_p, log_q, beta)
    return (beta * _weighed(p, log_p, log_m) + (1 - beta) * _weighed(log_q.exp(), log_q, log_m)).sum(-1)


def _gradient(grad, input, target, beta, input_kind, target_kind, scale):
    """Computes divergence_backward in PyTorch's ops, differentiable to any order."""
    p, log_p, log_q = _parts(input, target, input_kind, target_kind, scale)
    q = log_q.exp()
    if beta == 0:
        h = -p
    elif beta == 1:
        h = _weighed(q, log_q, log_p) + q
    else:
        h = (1 - beta) * _weighed(q, log_q, _mixture(log_p, log_q, beta))
    if input_kind == LOGITS:
        h = scale * (h - q * h.sum(-1, keepdim=True))
    return (h * grad.to(h.dtype).reshape(-1, 1)).to(input.dtype)


@cpu_kernel("divergence")
def _(input, target, *options):
    losses = divergence_by_torch(input, target, *options).float()
    return losses, losses.new_zeros(len(losses), _SAVED)


@fake_kernel("divergence")
def _(input, target, *options):
    rows = input.shape[0]
    return input.new_empty(rows, dtype=torch.float32), input.new_empty((rows, _SAVED), dtype=torch.float32)


@cpu_kernel("divergence_backward")
def _(grad, input, target, saved, *options):
    return _gradient(grad, input, target, *options).contiguous()


@fake_kernel("divergence_backward")
def _(grad, input, target, saved, *options):
    return torch.empty_like(input, memory_format=torch.contiguous_format)


@cpu_kernel("divergence_")
def _(input, target, scales, *options):
    losses = divergence_by_torch(input, target, *options).float()
    input.copy_(_gradient(scales, input, target, *options))
    return losses


@fake_kernel("divergence_")
def _(input, target, scales, *options):
    return input.new_empty(input.shape[0], dtype=torch.float32)


# Derivatives


def _save(ctx, inputs, output):
    input, target, *ctx.options = inputs
    beta, input_kind, target_kind, _ = ctx.options
    if beta == 0 and input_kind == LOG_PROBABILITIES and target_kind != LOGITS:
        # The derivative is -p, and PyTorch's kl_div saves that alone: callers may change the input, and what p is from.
        if target_kind == LOG_PROBABILITIES:
            target, ctx.options[2] = target.exp(), PROBABILITIES
        input = target
    ctx.save_for_backward(input, target, output[1])


def _backward(ctx, grad):
    if grad is None:
        return (None,) * 6
    return _divergence_gradient(grad, *ctx.saved_tensors, *ctx.options), *((None,) * 5)


def _save_backward(ctx, inputs, output):
    grad, input, target, _, *ctx.options = inputs
    ctx.save_for_backward(grad, input, target)


def _double_backward(ctx, cotangent):
    """Differentiates _gradient, which is differentiable to any order."""
    grad, input, target = ctx.saved_tensors

    def gradient(grad, input):
        return [_gradient(grad, input, target, *ctx.options)]

    return *derive(gradient, [grad, input], [cotangent]), *((None,) * 6)


divergence = autograd("divergence", _backward, _save, results=1)
_divergence_gradient = autograd("divergence_backward", _double_backward, _save_backward)
