"""The operators of cross entropy, and their derivatives."""

from __future__ import annotations

import torch
from torch._C._functorch import is_legacy_batchedtensor

from .._core.operators import autograd, cpu_kernel, derive, fake_kernel, ops
from .._core.routing import is_plain

__all__ = ["cap", "cross_entropy_ahead", "cross_entropy_gradient", "cross_entropy_rows"]

_keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph  # pyright: ignore[reportAttributeAccessIssue]
_transforms_active = torch._C._are_functorch_transforms_active


# CPU and fake kernels


def cap(x, softcap):
    return x.where(x == -torch.inf, softcap * torch.tanh(x / softcap)) if softcap else x


def _with_classes_last(x):
    return x.movedim(1, -1) if x.dim() > 1 else x


def _coefficients(x, target, weight, ignore_index, label_smoothing):
    """Returns the coefficients of all classes in the loss, classes last; which targets are counted; their weights."""
    classes = x.shape[-1]
    weights = torch.ones(classes, dtype=x.dtype, device=x.device) if weight is None else weight.to(x.dtype)
    if target.is_floating_point():
        target = _with_classes_last(target).to(x.dtype)
        counted = torch.ones(x.shape[:-1], dtype=torch.bool, device=x.device)
        row_weights = counted.to(x.dtype)
    else:
        counted = target != ignore_index
        wrong = counted & ((target < 0) | (target >= classes))
        chosen = target.where(counted & ~wrong, 0)
        row_weights = (weights[chosen] * counted).where(~wrong, torch.nan)
        target = (torch.arange(classes, device=x.device) == chosen[..., None]).to(x.dtype)
        target = target.where(~wrong[..., None], torch.nan)
    coefficients = ((1 - label_smoothing) * target + label_smoothing / classes) * weights
    return coefficients * counted[..., None], counted, row_weights


def _composite(x, target, weight, ignore_index, label_smoothing, softcap, z_loss):
    """Returns the losses of rows, their weights, the largest logits, the sums of exponentials of differences from
    these, and the sums of coefficients, in float32 or float64."""
    wide = cap(_with_classes_last(x).to(_wide(x)), softcap)
    coefficients, counted, row_weights = _coefficients(wide, target, weight, ignore_index, label_smoothing)
    terms = -coefficients * wide.log_softmax(-1)
    losses = terms.where(coefficients != 0, 0.0).sum(-1) + z_loss * wide.logsumexp(-1).square()
    largest = wide.amax(-1)
    sums = (wide - largest[..., None]).exp().sum(-1)
    return losses.where(counted, 0.0), row_weights, largest, sums, coefficients.sum(-1)


def _wide(x):
    return torch.float64 if x.dtype == torch.float64 else torch.float32


@cpu_kernel("cross_entropy")
def _(x, target, weight, reduction, ignore_index, label_smoothing, softcap, z_loss):
    losses, weights, *parts = _composite(x, target, weight, ignore_index, label_smoothing, softcap, z_loss)
    saved = torch.stack(parts, -1).view(-1, 3).float()
    if reduction == 0:
        return losses.contiguous().to(x.dtype), saved, saved.new_empty(0)
    total = weights.sum().view(1).float() if reduction == 1 else torch.ones(1, device=x.device)
    return (losses.sum() / total[0]).to(x.dtype), saved, total


@fake_kernel("cross_entropy")
def _(x, target, weight, reduction, ignore_index, label_smoothing, softcap, z_loss):
    shape = (x.shape[:1] + x.shape[2:] if x.dim() > 1 else ()) if reduction == 0 else ()
    count = x.numel() // x.shape[1 if x.dim() > 1 else 0]
    saved, total = (x.new_empty(sizes, dtype=torch.float32) for sizes in ((count, 3), (0 if reduction == 0 else 1,)))
    return x.new_empty(shape), saved, total


def cross_entropy_gradient(grad, x, target, weight, total, reduction, ignore_index, label_smoothing, softcap, z_loss):
    """Computes cross_entropy_backward in PyTorch's ops, differentiable to any order. `total` is what a reduced loss was
    divided by."""
    wide = _with_classes_last(x).to(_wide(x))
    y = cap(wide, softcap)
    coefficients, counted, _ = _coefficients(y, target, weight, ignore_index, label_smoothing)
    factor = coefficients.sum(-1, keepdim=True) + 2 * z_loss * y.logsumexp(-1, keepdim=True)
    scale = grad.to(_wide(x)) if reduction == 0 else grad.to(_wide(x)) / total.to(_wide(x))[0]
    # The scale of a row that is not counted may be infinite. The derivatives of the row's zeros would be NaN.
    scale = scale.expand(x.shape[:1] + x.shape[2:] if x.dim() > 1 else ()).where(counted, 0.0)
    gx = (factor * y.softmax(-1) - coefficients) * scale[..., None]
    if softcap:
        gx = gx * (1 - (y / softcap).square()).where(y != -torch.inf, 0.0)
    gx = gx.where(counted[..., None], 0.0).to(x.dtype)
    return gx.movedim(-1, 1) if x.dim() > 1 else gx


@cpu_kernel("cross_entropy_backward")
def _(grad, x, target, weight, saved, total, reduction, *options):
    return cross_entropy_gradient(grad, x, target, weight, total, reduction, *options).contiguous()


@fake_kernel("cross_entropy_backward")
def _(grad, x, target, weight, saved, total, reduction, *options):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@cpu_kernel("cross_entropy_")
def _(x, target, weight, scale, *options):
    losses = _composite(x, target, weight, *options)[0]
    scale = scale if scale.numel() == 1 else scale.view(-1)
    one = torch.ones(1, device=x.device)
    x.copy_(cross_entropy_gradient(scale.squeeze(), x, target, weight, one, 2, *options))
    return losses.float()


@fake_kernel("cross_entropy_")
def _(x, target, weight, scale, *options):
    return x.new_empty(x.shape[0], dtype=torch.float32)


@cpu_kernel("cross_entropy_ahead")
def _(x, target, weight, reduction, ignore_index, label_smoothing, divided):
    options = ignore_index, label_smoothing, 0.0, 0.0
    loss, _, total = ops.cross_entropy.default(x, target, weight, reduction, *options)
    one = torch.ones((), dtype=torch.float32, device=x.device)
    grad = one.expand(target.shape) if reduction == 0 and not target.is_floating_point() else one
    kind, divisor = (1, total) if divided else (2, one.view(1))
    gradient = cross_entropy_gradient(grad, x, target, weight, divisor, kind, *options)
    return loss, gradient.contiguous(), total


@fake_kernel("cross_entropy_ahead")
def _(x, target, weight, reduction, ignore_index, label_smoothing, divided):
    shape = (x.shape[:1] + x.shape[2:] if x.dim() > 1 else ()) if reduction == 0 else ()
    total = x.new_empty(0 if reduction == 0 else 1, dtype=torch.float32)
    return x.new_empty(shape), torch.empty_like(x, memory_format=torch.contiguous_format), total


def _finished(gradient, grad, target, total, ignore_index):
    """Returns what of cross_entropy_ahead is left to do, in PyTorch's ops, differentiable to any order."""
    scale = grad.to(_wide(gradient)) if total is None else grad.to(_wide(gradient)) / total[0]
    scale = scale.expand(gradient.shape[:1] + gradient.shape[2:] if gradient.dim() > 1 else ())
    if not target.is_floating_point():
        scale = scale.where(target != ignore_index, 0.0)
    return (gradient * (scale.unsqueeze(1) if gradient.dim() > 1 else scale)).to(gradient.dtype)


@cpu_kernel("cross_entropy_finish_")
def _(gradient, grad, target, total, ignore_index):
    gradient.copy_(_finished(gradient, grad.view(-1) if grad.numel() == 1 else grad, target, total, ignore_index))
    return gradient.new_empty(0)


@fake_kernel("cross_entropy_finish_")
def _(gradient, grad, target, total, ignore_index):
    return gradient.new_empty(0)


# Derivatives


def _save(ctx, inputs, output):
    x, target, weight, *ctx.options = inputs
    _, saved, total = output
    ctx.save_for_backward(x, target, weight, saved, total)


def _backward(ctx, grad):
    if grad is None:
        return (None,) * 8
    x, target, weight, saved, total = ctx.saved_tensors
    return _rows_gradient(grad, x, target, weight, saved, total, *ctx.options), *((None,) * 7)


def _save_backward(ctx, inputs, output):
    grad, x, target, weight, _, total, *ctx.options = inputs
    ctx.save_for_backward(grad, x, target, weight, total)


def _double_backward(ctx, cotangent):
    """Differentiates cross_entropy_gradient, which is differentiable to any order."""
    grad, x, target, weight, total = ctx.saved_tensors

    def gradient(grad, x):
        return [cross_entropy_gradient(grad, x, target, weight, total, *ctx.options)]

    return *derive(gradient, [grad, x], [cotangent]), *((None,) * 9)


def _save_ahead(ctx, inputs, output):
    x, target, weight, *ctx.options = inputs
    _, gradient, total = output
    if target.is_floating_point() and ctx.options[2]:  # PyTorch saves this as well, and not the target
        smoothing, ctx.options[2] = ctx.options[2], 0.0
        target = target * (1 - smoothing) + smoothing / x.shape[1]
    ctx.save_for_backward(gradient, target, weight, total)  # neither the logits nor a loss: callers may change these
    ctx.set_materialize_grads(False)  # nobody asks for the gradient's gradient, except a second derivative


def _ahead_backward(ctx, grad, curvature):
    if grad is None and curvature is None:
        return (None,) * 7
    gradient, target, weight, total = ctx.saved_tensors
    reduction, ignore_index, label_smoothing, divided = ctx.options
    divisor = total if reduction == 1 and not divided else None
    if (
        grad is None
        or curvature is not None
        or torch.is_grad_enabled()
        or _transforms_active()
        or not is_plain(grad)
        or is_legacy_batchedtensor(grad)  # by is_grads_batched
    ):
        result = 0.0 if grad is None else _finished(gradient, grad, target, divisor, ignore_index)
        if curvature is not None:
            unit = total if divided else None
            result = result + _curved(curvature, gradient, target, weight, unit, ignore_index, label_smoothing)
        return result, *((None,) * 6)
    gradient = gradient.clone() if _keeps_graph() else gradient.detach()
    ops.cross_entropy_finish_(gradient, grad, target, divisor, ignore_index)
    return gradient, *((None,) * 6)


def _curved(v, gradient, target, weight, total, ignore_index, label_smoothing):
    """Returns the product of v and the derivative of cross_entropy_ahead's gradient, which is s (m softmax(x) - c) with
    the coefficients c, their sums m and a scale s. It is a function of that gradient and not of x, and differentiable
    to any order as such."""
    wide = _with_classes_last(gradient).to(_wide(gradient))
    coefficients, counted, _ = _coefficients(wide, target, weight, ignore_index, label_smoothing)
    mass = coefficients.sum(-1, keepdim=True)
    counted = counted[..., None] & (mass != 0)
    scale = 1.0 if total is None else 1 / total.where(total != 0, 1.0)
    p = (wide / scale + coefficients) / mass.where(counted, 1.0)
    v = _with_classes_last(v).to(p.dtype)
    result = scale * mass * p * (v - (p * v).sum(-1, keepdim=True))
    result = result.where(counted, 0.0).to(gradient.dtype)
    return result.movedim(-1, 1) if gradient.dim() > 1 else result


cross_entropy_ahead = autograd("cross_entropy_ahead", _ahead_backward, _save_ahead, results=2)
cross_entropy_rows = autograd("cross_entropy", _backward, _save, results=1)
_rows_gradient = autograd("cross_entropy_backward", _double_backward, _save_backward)
