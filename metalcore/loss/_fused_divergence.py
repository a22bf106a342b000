"""Divergences between linear layers' outputs, without the logits of more than a chunk of rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .._core.operators import autograd, composed_kernel, derive, fake_kernel, ops
from .._core.registry import Op, Sample, register
from .._core.routing import alike, require_tensors
from .._core.tensors import beside
from ._divergence import LOGITS, divergence_by_torch, jsd_reference, require_options
from ._fused_linear import chunk_of
from ._fused_linear_operators import scaled
from ._weight_gradient import WeightGradient, accumulation

__all__ = ["fused_linear_jsd", "fused_linear_kl_div"]


def fused_linear_jsd(
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    beta: float = 0.5,
    *,
    temperature: float = 1.0,
    labels: Tensor | None = None,
    ignore_index: int = -100,
    chunk: int | None = None,
) -> Tensor:
    """Computes jsd(hidden @ weight.T, teacher_hidden @ teacher_weight.T) with the logits of one chunk of rows in
    memory.

    Args:
        hidden: the student's states (…, H), float32, float16 or bfloat16.
        weight: (C, H), of hidden's dtype.
        teacher_hidden, teacher_weight: (…, G) and (C, G), of the same dtype. No gradient goes to the teacher.
        beta, temperature: as for `jsd`.
        labels: (…); rows with the label ignore_index do not count.
        ignore_index: see labels.
        chunk: the rows of a chunk; by default as many as have 256 MiB of logits, and at least 256.

    Returns:
        The mean over the rows that count, of hidden's dtype. backward() overwrites the gradients that the
        forward pass has made, except with retain_graph=True, which copies them.

    Example:
        >>> hidden, weight = torch.randn(2, 8, device="mps"), torch.randn(4, 8, device="mps")
        >>> abs(metalcore.fused_linear_jsd(hidden, weight, hidden, weight).item()) < 1e-6
        True
    """
    tensors = {"weight": weight, "teacher_hidden": teacher_hidden, "teacher_weight": teacher_weight}
    require_tensors("fused_linear_jsd", hidden=hidden, **tensors)  # pyright: ignore[reportArgumentType]
    require_tensors("fused_linear_jsd", optional=True, labels=labels)
    scale = require_options("fused_linear_jsd", beta, temperature, "sum")
    if chunk is not None and (type(chunk) is not int or chunk < 1):
        raise ValueError(f"fused_linear_jsd: chunk must be a positive number of rows, not {chunk!r}")
    if hidden.dim() == 0 or teacher_hidden.dim() == 0:
        raise RuntimeError("fused_linear_jsd: hidden and teacher_hidden need a dimension of states")
    rows, teacher = hidden.reshape(-1, hidden.shape[-1]), teacher_hidden.detach()
    teacher, teacher_weight = teacher.reshape(-1, teacher.shape[-1]), teacher_weight.detach()
    if labels is None:
        mean = torch.full((len(rows),), 1 / max(1, len(rows)), dtype=torch.float32, device=hidden.device)
        scales = beside(hidden, mean)
    else:
        counted = (labels.reshape(-1) != ignore_index).float()
        scales = counted / counted.sum().clamp(min=1)
    options = float(beta), scale
    if not alike(rows, weight, teacher, teacher_weight) or not rows.numel() or not weight.numel():
        losses = _linear_by_torch(rows, weight, teacher, teacher_weight, *options)
        return (losses * scales).sum().to(hidden.dtype)
    chunk = chunk or chunk_of(len(rows), len(weight), rows.element_size())
    wanted = [torch.is_grad_enabled() and t.requires_grad for t in (hidden, weight)]
    return _fused(rows, weight, teacher, teacher_weight, scales, *options, chunk, *wanted)[0].to(hidden.dtype)


def fused_linear_kl_div(
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    *,
    temperature: float = 1.0,
    labels: Tensor | None = None,
    ignore_index: int = -100,
    chunk: int | None = None,
) -> Tensor:
    """Computes KL(teacher, student) of two linear layers' outputs: `fused_linear_jsd` with beta = 0, whose arguments it
    has.

    Example:
        >>> hidden, weight = torch.randn(2, 8, device="mps"), torch.randn(4, 8, device="mps")
        >>> abs(metalcore.fused_linear_kl_div(hidden, weight, hidden, weight).item()) < 1e-6
        True
    """
    require_tensors("fused_linear_kl_div", hidden=hidden, weight=weight)
    return fused_linear_jsd(
        hidden,
        weight,
        teacher_hidden,
        teacher_weight,
        0.0,
        temperature=temperature,
        labels=labels,
        ignore_index=ignore_index,
        chunk=chunk,
    )


def _linear_by_torch(hidden, weight, teacher_hidden, teacher_weight, beta, scale):
    logits = F.linear(hidden, weight), F.linear(teacher_hidden, teacher_weight)
    return divergence_by_torch(*logits, beta, LOGITS, LOGITS, scale)


@composed_kernel("fused_linear_divergence")
def _(hidden, weight, teacher_hidden, teacher_weight, scales, beta, scale, chunk, hidden_wanted, weight_wanted):
    rows, classes = len(hidden), len(weight)
    losses = hidden.new_empty(rows, dtype=torch.float32)
    student, teacher = hidden.new_empty((2, min(chunk, rows), classes))
    gh = torch.empty_like(hidden, memory_format=torch.contiguous_format) if hidden_wanted else hidden.new_empty(0)
    gw = WeightGradient(weight, accumulation(weight, rows, chunk, None)) if weight_wanted else None
    options = beta, LOGITS, LOGITS, scale
    for first in range(0, rows, chunk):
        part = slice(first, min(first + chunk, rows))
        x, y, z = hidden[part], student[: part.stop - first], teacher[: part.stop - first]
        torch.mm(x, weight.t(), out=y)
        torch.mm(teacher_hidden[part], teacher_weight.t(), out=z)
        if not hidden_wanted and not weight_wanted:
            losses[part] = ops.divergence(y, z, *options)[0]
            continue
        losses[part] = ops.divergence_(y, z, scales[part], *options)
        if hidden_wanted:
            torch.mm(y, weight, out=gh[part])
        if gw is not None:
            gw.add(x, y)
    return (losses * scales).sum(), gh, hidden.new_empty(0) if gw is None else gw.result()


@fake_kernel("fused_linear_divergence")
def _(hidden, weight, teacher_hidden, teacher_weight, scales, beta, scale, chunk, hidden_wanted, weight_wanted):
    inputs = ((hidden, hidden_wanted), (weight, weight_wanted))
    gradients = (hidden.new_empty(t.shape if wanted else (0,)) for t, wanted in inputs)
    return hidden.new_empty((), dtype=torch.float32), *gradients


def _save_fused(ctx, inputs, output):
    hidden, weight, teacher_hidden, teacher_weight, scales, *ctx.options = inputs
    _, *gradients = output
    ctx.mark_non_differentiable(*gradients)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(hidden, weight, teacher_hidden, teacher_weight, scales, *gradients)


def _fused_backward(ctx, grad, *_):
    if grad is None:
        return (None,) * 10
    *inputs, scales, gh, gw = ctx.saved_tensors
    beta, scale, _, *wanted = ctx.options
    gradients = [gh, gw]
    if torch.is_grad_enabled():  # backward() with create_graph, for which the logits are in memory

        def loss(*tensors):
            return [(_linear_by_torch(*tensors, beta, scale) * scales).sum()]  # pyright: ignore[reportCallIssue]

        gradients = derive(loss, inputs, [grad])[:2]
    else:
        gradients = scaled(gradients, grad)
    return *(gradient if want else None for gradient, want in zip(gradients, wanted)), *((None,) * 8)


_fused = autograd("fused_linear_divergence", _fused_backward, _save_fused)


def _fused_reference(hidden, weight, teacher_hidden, teacher_weight, beta=0.0, *, temperature=1.0, chunk=None):
    logits = hidden @ weight.mT, teacher_hidden @ teacher_weight.mT
    return jsd_reference(*logits, beta, temperature=temperature)


def _student_and_teacher(hidden, weight):
    """Returns arguments with a teacher that is no leaf: the results have no derivative by it."""
    half = weight.detach() * 0.5
    return hidden, weight, hidden.detach().flip(0), half.flip(1)


def _fused_op(function, beta):
    def reference(*tensors, **options):
        return _fused_reference(*tensors, **({"beta": beta} | options))

    return Op(
        function.__name__,
        function,
        reference=reference,
        operators=("fused_linear_divergence", "divergence_", "scale_"),
        edge=tuple,  # logits of other sizes leave more of their rounding than the bound allows, or no divergence at all
        samples=lambda: (
            Sample(
                "chunks",
                ((40, 16), (50, 16)),
                {"chunk": 16, "temperature": 2.0},
                arguments=_student_and_teacher,
                terms=2000,
                roundings=16,
            ),
        ),
    )


register(_fused_op(fused_linear_jsd, 0.5))
register(_fused_op(fused_linear_kl_div, 0.0))
