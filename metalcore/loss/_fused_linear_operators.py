"""The operators of fused_linear_cross_entropy, and their derivatives."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor

from .._core.operators import autograd, composed_kernel, derive, fake_kernel, ops
from .._core.routing import is_plain
from ._cross_entropy_operators import cross_entropy_gradient as of_logits
from ._cross_entropy_output import log_sum, target_probability, target_weight
from ._weight_gradient import WeightGradient

__all__ = ["fused", "scaled"]


def _product(x, weight, bias, out):
    return torch.mm(x, weight.t(), out=out) if bias is None else torch.addmm(bias, x, weight.t(), out=out)


def _gradients(hidden, weight, target, bias, class_weight, scale, scaling, wide, options, chunk, wanted, more):
    """Returns the losses of rows, the gradients of sum(scale * loss) by hidden, weight and bias where they are wanted,
    the part of z_loss in the losses, and the predicted classes.

    scaling: whether each loss is multiplied by its target's probability.
    more: whether the last two are wanted.
    """
    hidden_wanted, weight_wanted, bias_wanted = wanted
    squares_wanted, predictions_wanted = more
    ignore_index, _, softcap, z_loss = options
    rows, classes = len(hidden), len(weight)
    losses = hidden.new_empty(rows, dtype=torch.float32)
    logits = hidden.new_empty((min(chunk, rows), classes))
    gh = torch.empty_like(hidden, memory_format=torch.contiguous_format) if hidden_wanted else hidden.new_empty(0)
    gw = WeightGradient(weight, torch.float32 if wide else weight.dtype) if weight_wanted else None
    gb = torch.zeros(classes, dtype=torch.float32, device=hidden.device) if bias_wanted else None
    squares = hidden.new_empty(rows if squares_wanted else 0, dtype=torch.float32)
    predicted = hidden.new_empty(rows if predictions_wanted else 0, dtype=torch.int64)
    for first in range(0, rows, chunk):
        part = slice(first, min(first + chunk, rows))
        x, y = hidden[part], logits[: part.stop - first]
        _product(x, weight, bias, y)
        of_rows, factors = scale if scale.numel() == 1 else scale[part], None
        if predictions_wanted:
            predicted[part] = y.argmax(-1)
        if squares_wanted or scaling:
            saved = ops.cross_entropy(y, target[part], None, 0, ignore_index, 0.0, softcap, 0.0)[1]
            if scaling:
                factors = target_probability(y, target[part], ignore_index, softcap, saved)
                of_rows = of_rows * factors
            if squares_wanted:
                square = z_loss * log_sum(saved).square()
                squares[part] = square if factors is None else square * factors
        if any(wanted):
            loss = ops.cross_entropy_(y, target[part], class_weight, of_rows, *options)
        else:
            loss = ops.cross_entropy(y.float(), target[part], class_weight, 0, *options)[0]
        losses[part] = loss if factors is None else loss * factors
        if hidden_wanted:
            torch.mm(y, weight, out=gh[part])
        if gw is not None:
            gw.add(x, y)
        if gb is not None:
            gb += y.sum(0, dtype=torch.float32)
    del logits
    # An operator's results may not be one tensor, not even an empty one.
    gw = hidden.new_empty(0) if gw is None else gw.result()
    gb = hidden.new_empty(0) if gb is None else gb.to(hidden.dtype)
    return losses, gh, gw, gb, squares, predicted


@composed_kernel("fused_linear_cross_entropy")
def _(hidden, weight, target, bias, class_weight, token_weight, reduction, *rest):
    squares_wanted, predictions_wanted, scaling, wide, ignore_index, *options, chunk, of_hidden, of_weight, of_bias = (
        rest
    )
    total = target_weight(target, class_weight, ignore_index, reduction == 1, token_weight)
    scale = total.reciprocal() if token_weight is None else token_weight / total
    # Without a reduction the upstream gradient has to be known first.
    wanted = (of_hidden, of_weight, of_bias) if reduction else (False, False, False)
    options, more = (ignore_index, *options), (squares_wanted, predictions_wanted)
    losses, gh, gw, gb, squares, predicted = _gradients(
        hidden, weight, target, bias, class_weight, scale, scaling, wide, options, chunk, wanted, more
    )
    if token_weight is not None:
        counted = target != ignore_index
        losses, squares = (
            (part * token_weight).where(counted, 0.0) if part.numel() else part for part in (losses, squares)
        )
    return losses.sum() / total[0] if reduction else losses, gh, gw, gb, squares, predicted


def _fake(hidden, weight, bias, wanted):
    shapes = (hidden.shape, weight.shape, weight.shape[:1])
    return [hidden.new_empty(shape if want else (0,)) for shape, want in zip(shapes, wanted)]


@fake_kernel("fused_linear_cross_entropy")
def _(hidden, weight, target, bias, class_weight, token_weight, reduction, squares_wanted, predictions_wanted, *rest):
    wanted = rest[-3:] if reduction else (False, False, False)
    loss = hidden.new_empty(() if reduction else target.shape, dtype=torch.float32)
    squares = hidden.new_empty(len(hidden) if squares_wanted else 0, dtype=torch.float32)
    predicted = hidden.new_empty(len(hidden) if predictions_wanted else 0, dtype=torch.int64)
    return loss, *_fake(hidden, weight, bias, wanted), squares, predicted


@composed_kernel("fused_linear_cross_entropy_backward")
def _(grad, hidden, weight, target, bias, class_weight, scaling, wide, *rest):
    *options, chunk, of_hidden, of_weight, of_bias = rest
    wanted = (of_hidden, of_weight, of_bias)
    return _gradients(
        hidden,
        weight,
        target,
        bias,
        class_weight,
        grad.contiguous(),
        scaling,
        wide,
        options,
        chunk,
        wanted,
        (False, False),
    )[1:4]


@fake_kernel("fused_linear_cross_entropy_backward")
def _(grad, hidden, weight, target, bias, class_weight, *rest):
    return tuple(_fake(hidden, weight, bias, rest[-3:]))


def scaled(gradients: Sequence[Tensor], grad: Tensor) -> Sequence[Tensor]:
    """Returns gradients that the forward pass made, times the upstream gradient: in place, where no other backward()
    will need them."""
    kept = torch._C._autograd._get_current_graph_task_keep_graph()  # pyright: ignore[reportAttributeAccessIssue]
    if kept or not is_plain(grad) or is_legacy_batchedtensor(grad):  # by is_grads_batched
        return [gradient * grad.to(gradient.dtype) for gradient in gradients]
    for gradient in gradients:
        ops.scale_(gradient, grad)
        torch.autograd.graph.increment_version(gradient)
    return gradients


def _save(ctx, inputs, output):
    hidden, weight, target, bias, class_weight, token_weight, ctx.reduction, _, _, *ctx.options = inputs
    _, *gradients, squares, predicted = output
    ctx.mark_non_differentiable(*gradients, squares, predicted)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(hidden, weight, target, bias, class_weight, token_weight, *gradients)


def _backward(ctx, grad, *_):
    if grad is None:
        return (None,) * 19
    hidden, weight, target, bias, class_weight, token_weight, *gradients = ctx.saved_tensors
    ignore_index, wanted = ctx.options[2], ctx.options[-3:]
    if ctx.reduction == 0 or torch.is_grad_enabled():  # backward() with create_graph
        if ctx.reduction:
            total = target_weight(target, class_weight, ignore_index, ctx.reduction == 1, token_weight)
            grad = (grad / total).expand(target.shape)
        grad = grad if token_weight is None else grad * token_weight
        gradients = _fused_gradient(grad, hidden, weight, target, bias, class_weight, *ctx.options)
    else:
        gradients = scaled(gradients, grad)
    gh, gw, gb = (gradient if want else None for gradient, want in zip(gradients, wanted))
    return gh, gw, None, gb, *((None,) * 15)


def _save_backward(ctx, inputs, output):
    grad, hidden, weight, target, bias, class_weight, *ctx.options = inputs
    ctx.save_for_backward(grad, hidden, weight, target, bias, class_weight)
    ctx.set_materialize_grads(False)


def _double_backward(ctx, *cotangents):
    """Differentiates the gradients' formula, for which the logits are in memory."""
    grad, hidden, weight, target, bias, class_weight = ctx.saved_tensors
    scaling, _, ignore_index, *options, _, _, _, _ = ctx.options

    def gradients(rows, x, matrix, added):
        one = torch.ones(1, dtype=torch.float32, device=x.device)
        logits = F.linear(x, matrix, added)
        if scaling:
            rows = rows * target_probability(logits.detach(), target, ignore_index, options[1])
        gradient = of_logits(rows, logits, target, class_weight, one, 0, ignore_index, *options)
        return gradient @ matrix, gradient.t() @ x, gradient.sum(0)

    grad, hidden, weight, bias = derive(gradients, (grad, hidden, weight, bias), cotangents)
    return grad, hidden, weight, None, bias, *((None,) * 11)


_call = autograd("fused_linear_cross_entropy", _backward, _save)
_fused_gradient = autograd("fused_linear_cross_entropy_backward", _double_backward, _save_backward)


def fused(*inputs):
    loss, _, _, _, squares, predicted = _call(*inputs)
    return loss, squares, predicted
