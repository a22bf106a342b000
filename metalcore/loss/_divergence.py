"""Divergences between the distributions of a model and of its teacher: their operators, the operators' derivatives, and
the functions.
"""

from __future__ import annotations

import math
import warnings

import torch
import torch.nn.functional as F
from torch import Tensor

from .._core.operators import autograd, cpu_kernel, derive, fake_kernel
from .._core.registry import Op, Override, Sample, register
from .._core.routing import alike, autocast_to_float32, is_plain, require_tensors

__all__ = [
    "LOGITS",
    "LOG_PROBABILITIES",
    "PROBABILITIES",
    "divergence",
    "divergence_by_torch",
    "jsd",
    "kl_div",
    "require_options",
]

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


def _save_operator(ctx, inputs, output):
    input, target, *ctx.options = inputs
    beta, input_kind, target_kind, _ = ctx.options
    if beta == 0 and input_kind == LOG_PROBABILITIES and target_kind != LOGITS:
        # The derivative is -p, and PyTorch's kl_div saves that alone: callers may change the input, and what p is from.
        if target_kind == LOG_PROBABILITIES:
            target, ctx.options[2] = target.exp(), PROBABILITIES
        input = target
    ctx.save_for_backward(input, target, output[1])


def _divergence_backward(ctx, grad):
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


divergence = autograd("divergence", _divergence_backward, _save_operator, results=1)
_divergence_gradient = autograd("divergence_backward", _double_backward, _save_backward)


_REDUCTIONS = ("none", "sum", "mean", "batchmean")


def kl_div(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    log_target: bool = False,
) -> Tensor:
    """Computes the Kullback-Leibler divergence of log-probabilities from a target, as torch.nn.functional.kl_div.

    Args:
        input: log-probabilities, float32, float16 or bfloat16, any shape. It is computed in float32.
        target: probabilities, or with log_target their logarithms, of the input's shape and dtype. What broadcasts or
            requires a gradient goes to PyTorch's op, as does reduction="none".
        size_average, reduce: PyTorch's older way to name a reduction.
        reduction: "mean" (over all elements), "sum", "batchmean" (the sum over the first dimension's size) or "none".
        log_target: whether the target has logarithms.

    Returns:
        A tensor of the input's dtype, or float32 if autocast makes PyTorch's result float32, with gradients of any
        order by the input. Classes without probability add nothing.

    Example:
        >>> target = torch.full((2, 4), 0.25, device="mps")
        >>> abs(metalcore.kl_div(target.log(), target, reduction="batchmean").item()) < 1e-6
        True
    """
    if size_average is not None or reduce is not None or not _takes(input, target, reduction, log_target):
        return F.kl_div(input, target, size_average, reduce, reduction, log_target)
    if reduction == "mean":
        warnings.warn(
            "reduction: 'mean' divides the total loss by both the batch size and the support size. 'batchmean' divides "
            "only by the batch size, and aligns with the KL div math definition.",
            stacklevel=2,
        )
    if autocast_to_float32("kl_div", input):
        input, target = input.float(), target.float()
    total = _sum(input, target, log_target)
    count = 1 if reduction == "sum" else input.numel() if reduction == "mean" else input.shape[0]
    return _reduced(total, count, input)


def _takes(input, target, reduction, log_target):
    return (
        alike(input, target)
        and isinstance(target, Tensor)
        and type(reduction) is str
        and reduction in _REDUCTIONS[1:]
        and type(log_target) is bool
        and input.shape == target.shape
        and input.dim() > 0
        and input.numel() > 0
        and input.shape[-1] < 2**31
        and not target.requires_grad
    )


def _sum(input, target, log_target):
    if input.dim() != 2:
        classes = input.shape[-1]
        input, target = input.reshape(-1, classes), target.reshape(-1, classes)
    kind = LOG_PROBABILITIES if log_target else PROBABILITIES
    return divergence(input, target, 0.0, LOG_PROBABILITIES, kind, 1.0).sum()


def _reduced(total, count, input):
    """Computes total / count in the input's dtype."""
    mean = total if count == 1 else total / count
    return mean if mean.dtype is input.dtype else mean.to(input.dtype)


def jsd(
    input: Tensor,
    target: Tensor,
    beta: float = 0.5,
    *,
    temperature: float = 1.0,
    log_probabilities: bool = False,
    reduction: str = "batchmean",
) -> Tensor:
    """Computes the generalized Jensen-Shannon divergence of a student from its teacher (GKD, arXiv:2306.13649).

    With the student's probabilities q, the teacher's p and m = beta p + (1 - beta) q it is
    beta KL(p, m) + (1 - beta) KL(q, m); with beta = 0 it is KL(p, q), and with beta = 1 KL(q, p).

    Args:
        input: the student's logits (…, C), float32, float16 or bfloat16. Both are read twice, and nothing of their size
            is written but the gradient.
        target: the teacher's logits, of the input's shape and dtype. No gradient goes to the teacher.
        beta: in [0, 1].
        temperature: logits are divided by this positive number.
        log_probabilities: input and target are log-probabilities and not logits; temperature must be 1.
        reduction: "batchmean" (over all rows), "sum" or "none" (the rows' divergences).

    Returns:
        A tensor of the input's dtype, with gradients of any order by the input.

    Example:
        >>> logits = torch.randn(2, 4, device="mps")
        >>> abs(metalcore.jsd(logits, logits).item()) < 1e-6
        True
    """
    require_tensors("jsd", input=input, target=target)
    scale = require_options("jsd", beta, temperature, reduction)
    if log_probabilities and temperature != 1:
        raise ValueError("jsd: log-probabilities have a temperature of 1")
    if input.shape != target.shape or input.dim() == 0:
        raise RuntimeError(f"jsd: target must have the shape of input, {list(input.shape)}, not {list(target.shape)}")
    target = target.detach()
    kind = LOG_PROBABILITIES if log_probabilities else LOGITS
    flat = input.reshape(-1, input.shape[-1]), target.reshape(-1, input.shape[-1])
    if alike(input, target) and input.numel() and input.shape[-1] < 2**31:
        losses = divergence(*flat, float(beta), kind, kind, scale)
    else:
        losses = divergence_by_torch(*flat, float(beta), kind, kind, scale)
    if reduction == "none":
        return losses.view(input.shape[:-1]).to(input.dtype)
    return _reduced(losses.sum(), len(losses) if reduction == "batchmean" else 1, input)


# Overrides of PyTorch's kernels


def _override(previous, count, decline):
    def kernel(keyset, input, target, reduction=1, *, log_target=False):
        names = {0: "none", 1: "mean", 2: "sum"}  # "batchmean" is made of the sum
        plain = is_plain(input) and is_plain(target)
        if not plain or not _takes(input, target, names.get(reduction), log_target):
            return decline(keyset, input, target, reduction, log_target=log_target)
        total = count.run(_sum, input, target, log_target)
        return _reduced(total, input.numel() if reduction == 1 else 1, input)

    return kernel


def _samples():
    def sample(name, shape, **options):
        return Sample(
            name,
            (shape,),
            {"reduction": "batchmean", **options},
            arguments=lambda x: (x, x.detach().float().flip(0).softmax(-1).to(x.dtype)),
            terms=math.prod(shape),
        )

    return sample("rows", (9, 100)), sample("odd rows", (3, 5, 33), reduction="sum"), sample("one", (20,))


def jsd_reference(input, target, beta=0.5, *, temperature=1.0, log_probabilities=False, reduction="batchmean"):
    q, p = (input / temperature).softmax(-1), (target.detach() / temperature).softmax(-1)
    m = beta * p + (1 - beta) * q

    def kl(a, b):
        return (a * (a.log() - b.log())).sum(-1)

    losses = kl(p, q) if beta == 0 else kl(q, p) if beta == 1 else beta * kl(p, m) + (1 - beta) * kl(q, m)
    return losses if reduction == "none" else losses.sum() / (1 if reduction == "sum" else losses.numel())


register(
    Op(
        "kl_div",
        kl_div,
        namesake="torch.nn.functional.kl_div",
        operators=("divergence", "divergence_backward"),
        override=(Override("kl_div", _override, at_autograd=True), Override("kl_div", _override)),
        samples=_samples,
    )
)
register(
    Op(
        "jsd",
        jsd,
        reference=jsd_reference,
        operators=("divergence", "divergence_backward"),
        edge=tuple,  # rows that agree have no divergence, and gradients of nothing but rounding
        samples=lambda: tuple(
            Sample(
                f"beta {beta}",
                ((9, 100),),
                {"beta": beta, "temperature": 2.0},
                arguments=lambda x: (x, x.detach().flip(0)),
                terms=900,
            )
            for beta in (0.0, 0.3, 1.0)
        ),
    )
)
