"""Cross entropy of a linear layer's outputs, which are never in memory as a whole."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor

from .._core.derivatives import derive
from .._core.operators import autograd, composed_kernel, fake_kernel, ops
from .._core.registry import Op, Sample, register
from .._core.routing import alike, autocast_dtype, is_plain, require_tensors
from .._core.sharded import is_dtensor
from ._cross_entropy import REDUCTIONS, _classes, _takes, cross_entropy, target_weight
from ._cross_entropy_operators import cross_entropy_gradient as of_logits

__all__ = ["fused_linear_cross_entropy"]

_CHUNK_BYTES = 256 << 20


def chunk_of(rows: int, classes: int, itemsize: int) -> int:
    """How many rows have their logits in memory at once: about 256 MiB of them, and whole tiles of a product."""
    return min(rows, max(256, _CHUNK_BYTES // (classes * itemsize) // 256 * 256))


def fused_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    chunk: int | None = None,
) -> Tensor:
    """cross_entropy(hidden @ weight.T + bias, target) with the logits of one chunk of rows in memory at a time.

    Each chunk's logits give way to their gradient as soon as their losses are known, and this to its products with the
    weight and with the hidden states (the method of Liger-Kernel, arXiv:2410.10989). So backward() has only to scale
    the gradients, and peak memory is that of the gradients and of a chunk.

    Args:
        hidden: (…, H), float32, float16 or bfloat16, any strides.
        weight: (C, H), of hidden's dtype, or under autocast of any.
        target: classes, int64, of hidden's shape without H.
        bias: (C) or None.
        class_weight, ignore_index, reduction, label_smoothing, softcap, z_loss: as for `cross_entropy`.
        chunk: the rows of a chunk; by default as many as have 256 MiB of logits, and at least 256.

    Returns:
        The loss, float32 under autocast, otherwise of hidden's dtype. With reduction="none" the gradient computes the
        logits again. The gradient of the weight is summed over the chunks in the weight's dtype. backward()
        overwrites the gradients that the forward pass has made, except with retain_graph=True, which copies them.
    """
    require_tensors("fused_linear_cross_entropy", hidden=hidden, weight=weight, target=target)
    require_tensors("fused_linear_cross_entropy", optional=True, bias=bias, class_weight=class_weight)
    if chunk is not None and (type(chunk) is not int or chunk < 1):
        raise ValueError(f"fused_linear_cross_entropy: chunk must be a positive number of rows, not {chunk!r}")
    autocast = autocast_dtype(hidden)
    if autocast is not None:
        hidden, weight = hidden.to(autocast), weight.to(autocast)
        bias = bias if bias is None else bias.to(autocast)
    out = hidden.dtype if autocast is None else torch.float32
    if is_dtensor(hidden) and reduction != "none":
        from ..distributed import losses

        size = chunk or chunk_of(hidden.shape[:-1].numel(), len(weight), hidden.element_size())
        options = ignore_index, reduction, label_smoothing, softcap, z_loss
        return losses.fused_linear_cross_entropy(hidden, weight, target, bias, class_weight, *options, size).to(out)
    taken = _fusible(hidden, weight, target, bias, class_weight, reduction, label_smoothing, ignore_index)
    if is_dtensor(hidden) or not taken:
        logits = F.linear(hidden, weight, bias)
        logits, shape = logits.reshape(-1, logits.shape[-1]), target.shape
        loss = cross_entropy(
            logits.to(out),
            target.reshape(-1),
            class_weight if class_weight is None else class_weight.to(out),
            None,
            ignore_index,
            None,
            reduction,
            label_smoothing,
            softcap=softcap,
            z_loss=z_loss,
        )
        return loss.view(shape) if reduction == "none" else loss
    rows = hidden.reshape(-1, hidden.shape[-1])
    chunk = chunk or chunk_of(len(rows), len(weight), rows.element_size())
    wanted = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in (hidden, weight, bias)]
    loss = _fused(
        rows,
        weight,
        target.reshape(-1),
        bias,
        class_weight,
        REDUCTIONS[reduction],
        ignore_index,
        float(label_smoothing),
        float(softcap or 0.0),
        float(z_loss),
        chunk,
        *wanted,
    )[0]
    return (loss.view(target.shape) if reduction == "none" else loss).to(out)


def _fusible(hidden, weight, target, bias, class_weight, reduction, label_smoothing, ignore_index):
    return (
        alike(hidden, weight, bias)
        and (class_weight is None or class_weight.is_floating_point() and class_weight.device == hidden.device)
        and hidden.dim() > 0
        and weight.dim() == 2
        and weight.shape[1] == hidden.shape[-1]
        and (bias is None or bias.shape == weight.shape[:1])
        and (class_weight is None or class_weight.shape == weight.shape[:1] and not class_weight.requires_grad)
        and target.shape == hidden.shape[:-1]
        and target.dtype == torch.int64
        and weight.numel() > 0
        and target.numel() > 0
        and _takes(hidden.new_empty(()).expand(2, len(weight)), target.new_empty(()).expand(2), None, reduction,
                   label_smoothing, ignore_index)
    )  # fmt: skip


def _product(x, weight, bias, out):
    return torch.mm(x, weight.t(), out=out) if bias is None else torch.addmm(bias, x, weight.t(), out=out)


def _gradients(hidden, weight, target, bias, class_weight, scale, options, chunk, wanted):
    """The losses of rows, and the gradients of sum(scale * loss) by hidden, weight and bias where they are wanted."""
    hidden_wanted, weight_wanted, bias_wanted = wanted
    rows, classes = len(hidden), len(weight)
    losses = hidden.new_empty(rows, dtype=torch.float32)
    logits = hidden.new_empty((min(chunk, rows), classes))
    gh = torch.empty_like(hidden, memory_format=torch.contiguous_format) if hidden_wanted else hidden.new_empty(0)
    gw = torch.empty_like(weight, memory_format=torch.contiguous_format) if weight_wanted else hidden.new_empty(0)
    gb = torch.zeros(classes, dtype=torch.float32, device=hidden.device) if bias_wanted else None
    for first in range(0, rows, chunk):
        part = slice(first, min(first + chunk, rows))
        x, y = hidden[part], logits[: part.stop - first]
        _product(x, weight, bias, y)
        if not any(wanted):
            losses[part] = ops.cross_entropy(y.float(), target[part], class_weight, 0, *options)[0]
            continue
        losses[part] = ops.cross_entropy_(
            y, target[part], class_weight, scale if scale.numel() == 1 else scale[part], *options
        )
        if hidden_wanted:
            torch.mm(y, weight, out=gh[part])
        if weight_wanted:
            torch.mm(y.t(), x, out=gw) if first == 0 else gw.addmm_(y.t(), x)
        if gb is not None:
            gb += y.sum(0, dtype=torch.float32)
    return losses, gh, gw, hidden.new_empty(0) if gb is None else gb.to(hidden.dtype)


@composed_kernel("fused_linear_cross_entropy")
def _(hidden, weight, target, bias, class_weight, reduction, ignore_index, *rest):
    *options, chunk, hidden_wanted, weight_wanted, bias_wanted = rest
    total = target_weight(target, class_weight, ignore_index, reduction == 1)
    # Without a reduction the upstream gradient has to be known first.
    wanted = (hidden_wanted, weight_wanted, bias_wanted) if reduction else (False, False, False)
    losses, gh, gw, gb = _gradients(
        hidden, weight, target, bias, class_weight, total.reciprocal(), (ignore_index, *options), chunk, wanted
    )
    return losses.sum() / total[0] if reduction else losses, gh, gw, gb


def _fake(hidden, weight, bias, wanted):
    shapes = (hidden.shape, weight.shape, weight.shape[:1])
    return [hidden.new_empty(shape if want else (0,)) for shape, want in zip(shapes, wanted)]


@fake_kernel("fused_linear_cross_entropy")
def _(hidden, weight, target, bias, class_weight, reduction, *rest):
    wanted = rest[-3:] if reduction else (False, False, False)
    loss = hidden.new_empty(() if reduction else target.shape, dtype=torch.float32)
    return loss, *_fake(hidden, weight, bias, wanted)


@composed_kernel("fused_linear_cross_entropy_backward")
def _(grad, hidden, weight, target, bias, class_weight, *rest):
    *options, chunk, hidden_wanted, weight_wanted, bias_wanted = rest
    wanted = (hidden_wanted, weight_wanted, bias_wanted)
    return _gradients(hidden, weight, target, bias, class_weight, grad.contiguous(), options, chunk, wanted)[1:]


@fake_kernel("fused_linear_cross_entropy_backward")
def _(grad, hidden, weight, target, bias, class_weight, *rest):
    return tuple(_fake(hidden, weight, bias, rest[-3:]))


def scaled(made: Sequence[Tensor], grad: Tensor) -> Sequence[Tensor]:
    """Gradients that the forward pass made, times the upstream gradient: in place, where no other backward() will need
    them."""
    kept = torch._C._autograd._get_current_graph_task_keep_graph()  # pyright: ignore[reportAttributeAccessIssue]
    if kept or not is_plain(grad) or is_legacy_batchedtensor(grad):  # by is_grads_batched
        return [gradient * grad.to(gradient.dtype) for gradient in made]
    for gradient in made:
        ops.scale_(gradient, grad)
        torch.autograd.graph.increment_version(gradient)
    return made


def _save(ctx, inputs, output):
    hidden, weight, target, bias, class_weight, *ctx.options = inputs
    _, *made = output
    ctx.mark_non_differentiable(*made)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(hidden, weight, target, bias, class_weight, *made)


def _backward(ctx, grad, *_):
    if grad is None:
        return (None,) * 14
    hidden, weight, target, bias, class_weight, *made = ctx.saved_tensors
    reduction, *options = ctx.options
    wanted = options[-3:]
    if reduction == 0 or torch.is_grad_enabled():  # backward() with create_graph
        if reduction:
            grad = (grad / target_weight(target, class_weight, options[0], reduction == 1)).expand(target.shape)
        made = _fused_gradient(grad, hidden, weight, target, bias, class_weight, *options)
    else:
        made = scaled(made, grad)
    gh, gw, gb = (gradient if want else None for gradient, want in zip(made, wanted))
    return gh, gw, None, gb, *((None,) * 10)


def _save_backward(ctx, inputs, output):
    grad, hidden, weight, target, bias, class_weight, *ctx.options = inputs
    ctx.save_for_backward(grad, hidden, weight, target, bias, class_weight)
    ctx.set_materialize_grads(False)


def _double_backward(ctx, *cotangents):
    """Differentiates the gradients' formula, for which the logits are in memory."""
    grad, hidden, weight, target, bias, class_weight = ctx.saved_tensors
    *options, _, _, _, _ = ctx.options

    def gradients(rows, x, matrix, added):
        one = torch.ones(1, dtype=torch.float32, device=x.device)
        gradient = of_logits(rows, F.linear(x, matrix, added), target, class_weight, one, 0, *options)
        return gradient @ matrix, gradient.t() @ x, gradient.sum(0)

    grad, hidden, weight, bias = derive(gradients, (grad, hidden, weight, bias), cotangents)
    return grad, hidden, weight, None, bias, *((None,) * 9)


_fused = autograd("fused_linear_cross_entropy", _backward, _save)
_fused_gradient = autograd("fused_linear_cross_entropy_backward", _double_backward, _save_backward)


def _reference(hidden, weight, target, bias=None, *, class_weight=None, chunk=None, softcap=None, **options):
    logits = F.linear(hidden, weight, bias)
    logits = softcap * torch.tanh(logits / softcap) if softcap else logits
    return F.cross_entropy(logits, target, class_weight, **options)


def _sample(name, biased=False, **options):
    shapes = ((40, 16), (50, 16), *[(50,)] * biased)
    return Sample(
        name,
        shapes,
        {"chunk": 16, **options},
        arguments=lambda x, w, *bias: (x, w, _classes(x.new_empty(40, 50)), *bias),
        terms=40 * 50,
        roundings=4,
    )


def _production(tokens=128, hidden_size=128, vocab_size=2000):
    return Sample(
        "",
        ((tokens, hidden_size), (vocab_size, hidden_size)),
        {"chunk": 64},
        arguments=lambda x, w: (x, w, _classes(x.new_empty(tokens, vocab_size))),
        terms=tokens * vocab_size,
        roundings=4,
    )


register(
    Op(
        "fused_linear_cross_entropy",
        fused_linear_cross_entropy,
        reference=_reference,
        operators=("fused_linear_cross_entropy", "fused_linear_cross_entropy_backward", "cross_entropy_", "scale_"),
        integers={"target": torch.int64},
        samples=lambda: (
            _sample("chunks"),
            _sample("with a bias", True, label_smoothing=0.1, reduction="sum", ignore_index=7),
            _sample("losses of rows", True, reduction="none", softcap=3.0),
        ),
        production=_production,
    )
)
