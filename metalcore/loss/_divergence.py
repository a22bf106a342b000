"""Divergences between the distributions of a model and of its teacher."""

from __future__ import annotations

import math
import warnings

import torch
import torch.nn.functional as F
from torch import Tensor

from .._core.operators import autograd, composed_kernel, cpu_kernel, fake_kernel, ops
from .._core.registry import Op, Override, Sample, register
from .._core.routing import alike, autocast_to_float32, is_plain, require_tensors
from ._fused_linear import chunk_of

__all__ = ["fused_linear_jsd", "fused_linear_kl_div", "jsd", "kl_div"]

_LOGITS, _LOG_PROBABILITIES, _PROBABILITIES = range(3)
_REDUCTIONS = ("none", "sum", "mean", "batchmean")


def kl_div(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    log_target: bool = False,
) -> Tensor:
    """The Kullback-Leibler divergence of log-probabilities from a target, as torch.nn.functional.kl_div.

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
    count = {"sum": 1, "mean": input.numel(), "batchmean": input.shape[0]}[reduction]
    return (total / count).to(input.dtype)


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
    rows = input.reshape(-1, input.shape[-1]), target.reshape(-1, input.shape[-1])
    return _divergence(*rows, 0.0, _LOG_PROBABILITIES, _LOG_PROBABILITIES if log_target else _PROBABILITIES, 1.0)[
        0
    ].sum()


def jsd(
    input: Tensor,
    target: Tensor,
    beta: float = 0.5,
    *,
    temperature: float = 1.0,
    log_probabilities: bool = False,
    reduction: str = "batchmean",
) -> Tensor:
    """The generalized Jensen-Shannon divergence of a student from its teacher (GKD, arXiv:2306.13649).

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
        A float32 tensor, with gradients of any order by the input.
    """
    require_tensors("jsd", input=input, target=target)
    scale = _check("jsd", beta, temperature, reduction)
    if log_probabilities and temperature != 1:
        raise ValueError("jsd: log-probabilities have a temperature of 1")
    if input.shape != target.shape or input.dim() == 0:
        raise RuntimeError(f"jsd: target must have the shape of input, {list(input.shape)}, not {list(target.shape)}")
    target = target.detach()
    kind = _LOG_PROBABILITIES if log_probabilities else _LOGITS
    flat = input.reshape(-1, input.shape[-1]), target.reshape(-1, input.shape[-1])
    if alike(input, target) and input.numel() and input.shape[-1] < 2**31:
        losses = _divergence(*flat, float(beta), kind, kind, scale)[0]
    else:
        losses = _by_torch(*flat, float(beta), kind, kind, scale)
    if reduction == "none":
        return losses.view(input.shape[:-1])
    return losses.sum() / (len(losses) if reduction == "batchmean" else 1)


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
    """jsd(hidden @ weight.T, teacher_hidden @ teacher_weight.T) with the logits of one chunk of rows in memory.

    Args:
        hidden: the student's states (…, H), float32, float16 or bfloat16.
        weight: (C, H), of hidden's dtype.
        teacher_hidden, teacher_weight: (…, G) and (C, G), of the same dtype. No gradient goes to the teacher.
        beta, temperature: as for `jsd`.
        labels: (…); rows with the label ignore_index do not count.
        ignore_index: see labels.
        chunk: the rows of a chunk; by default as many as have 256 MiB of logits, and at least 256.

    Returns:
        The mean over the rows that count, of hidden's dtype. Each backward() consumes the gradients; a second one
        raises a RuntimeError.
    """
    tensors = {"weight": weight, "teacher_hidden": teacher_hidden, "teacher_weight": teacher_weight}
    require_tensors("fused_linear_jsd", hidden=hidden, **tensors)  # pyright: ignore[reportArgumentType]
    require_tensors("fused_linear_jsd", optional=True, labels=labels)
    scale = _check("fused_linear_jsd", beta, temperature, "sum")
    if chunk is not None and (type(chunk) is not int or chunk < 1):
        raise ValueError(f"fused_linear_jsd: chunk must be a positive number of rows, not {chunk!r}")
    if hidden.dim() == 0 or teacher_hidden.dim() == 0:
        raise RuntimeError("fused_linear_jsd: hidden and teacher_hidden need a dimension of states")
    rows, teacher = hidden.reshape(-1, hidden.shape[-1]), teacher_hidden.detach()
    teacher, teacher_weight = teacher.reshape(-1, teacher.shape[-1]), teacher_weight.detach()
    if labels is None:
        scales = torch.full((len(rows),), 1 / max(1, len(rows)), dtype=torch.float32, device=hidden.device)
    else:
        counted = (labels.reshape(-1) != ignore_index).float()
        scales = counted / counted.sum().clamp(min=1)
    options = float(beta), scale
    if not alike(rows, weight, teacher, teacher_weight) or not rows.numel() or not weight.numel():
        losses = _linear_by_torch(rows, weight, teacher, teacher_weight, *options)
        return (losses * scales).sum()
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
    """KL(teacher, student) of two linear layers' outputs: fused_linear_jsd with beta = 0, whose arguments it has."""
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


def _check(op, beta, temperature, reduction):
    """The factor of logits."""
    if type(beta) not in (float, int) or not 0 <= beta <= 1:
        raise ValueError(f"{op}: beta must be in [0, 1], not {beta!r}")
    if type(temperature) not in (float, int) or not 0 < temperature < math.inf:
        raise ValueError(f"{op}: temperature must be a positive number, not {temperature!r}")
    if reduction not in ("batchmean", "sum", "none"):
        raise ValueError(f"{op}: reduction must be 'batchmean', 'sum' or 'none', not {reduction!r}")
    return 1.0 / temperature


# CPU and fake kernels


def _parts(input, target, input_kind, target_kind, scale):
    """p, log p and log q in float32 or float64."""
    wide = torch.float64 if input.dtype == torch.float64 else torch.float32
    log_q, given = input.to(wide), target.to(wide)
    log_q = (log_q * scale).log_softmax(-1) if input_kind == _LOGITS else log_q
    if target_kind == _PROBABILITIES:
        return given, given.log(), log_q
    log_p = (given * scale).log_softmax(-1) if target_kind == _LOGITS else given
    return log_p.exp(), log_p, log_q


def _weighed(a, b, c):
    return (a * (b - c)).where(a != 0, 0.0)


def _mixture(log_p, log_q, beta):
    return torch.logaddexp(log_p + math.log(beta), log_q + math.log(1 - beta))


def _by_torch(input, target, beta, input_kind, target_kind, scale):
    """The divergences of rows, differentiable to any order."""
    p, log_p, log_q = _parts(input, target, input_kind, target_kind, scale)
    if beta == 0:
        return _weighed(p, log_p, log_q).sum(-1)
    if beta == 1:
        return _weighed(log_q.exp(), log_q, log_p).sum(-1)
    log_m = _mixture(log_p, log_q, beta)
    return (beta * _weighed(p, log_p, log_m) + (1 - beta) * _weighed(log_q.exp(), log_q, log_m)).sum(-1)


def _gradient(grad, input, target, beta, input_kind, target_kind, scale):
    """divergence_backward in PyTorch's ops, differentiable to any order."""
    p, log_p, log_q = _parts(input, target, input_kind, target_kind, scale)
    q = log_q.exp()
    if beta == 0:
        h = -p
    elif beta == 1:
        h = _weighed(q, log_q, log_p) + q
    else:
        h = (1 - beta) * _weighed(q, log_q, _mixture(log_p, log_q, beta))
    if input_kind == _LOGITS:
        h = scale * (h - q * h.sum(-1, keepdim=True))
    return (h * grad.to(h.dtype).reshape(-1, 1)).to(input.dtype)


@cpu_kernel("divergence")
def _(input, target, *options):
    losses = _by_torch(input, target, *options).float()
    return losses, losses.new_zeros(len(losses), 3)


@fake_kernel("divergence")
def _(input, target, *options):
    rows = input.shape[0]
    return input.new_empty(rows, dtype=torch.float32), input.new_empty((rows, 3), dtype=torch.float32)


@cpu_kernel("divergence_backward")
def _(grad, input, target, saved, *options):
    return _gradient(grad, input, target, *options).contiguous()


@fake_kernel("divergence_backward")
def _(grad, input, target, saved, *options):
    return torch.empty_like(input, memory_format=torch.contiguous_format)


@cpu_kernel("divergence_")
def _(input, target, scales, *options):
    losses = _by_torch(input, target, *options).float()
    input.copy_(_gradient(scales, input, target, *options))
    return losses


@fake_kernel("divergence_")
def _(input, target, scales, *options):
    return input.new_empty(input.shape[0], dtype=torch.float32)


# Derivatives


def _save(ctx, inputs, output):
    input, target, *ctx.options = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(input, target, output[1])


def _backward(ctx, grad, _):
    if grad is None:
        return (None,) * 6
    return _divergence_gradient(grad, *ctx.saved_tensors, *ctx.options), *((None,) * 5)


def _save_backward(ctx, inputs, output):
    grad, input, target, _, *ctx.options = inputs
    ctx.save_for_backward(grad, input, target)


def _double_backward(ctx, cotangent):
    """Differentiates _gradient, which is differentiable to any order."""
    grad, input, target = ctx.saved_tensors
    with torch.enable_grad():
        inputs = [grad.view_as(grad), input.view_as(input)]
        gradient = _gradient(*inputs, target, *ctx.options)  # pyright: ignore[reportCallIssue]
    if not gradient.requires_grad:  # that of log-probabilities is a constant
        return (None,) * 8
    wanted = [t for t in inputs if t.requires_grad]
    create = torch.is_grad_enabled()
    found = iter(torch.autograd.grad(gradient, wanted, cotangent, create_graph=create, allow_unused=True))
    return *(next(found) if t.requires_grad else None for t in inputs), *((None,) * 6)


_divergence = autograd("divergence", _backward, _save)
_divergence_gradient = autograd("divergence_backward", _double_backward, _save_backward)


# Fused with linear layers


def _linear_by_torch(hidden, weight, teacher_hidden, teacher_weight, beta, scale):
    logits = F.linear(hidden, weight), F.linear(teacher_hidden, teacher_weight)
    return _by_torch(*logits, beta, _LOGITS, _LOGITS, scale)


@composed_kernel("fused_linear_divergence")
def _(hidden, weight, teacher_hidden, teacher_weight, scales, beta, scale, chunk, hidden_wanted, weight_wanted):
    rows, classes = len(hidden), len(weight)
    losses = hidden.new_empty(rows, dtype=torch.float32)
    student, teacher = hidden.new_empty((2, min(chunk, rows), classes))
    gh = torch.empty_like(hidden, memory_format=torch.contiguous_format) if hidden_wanted else hidden.new_empty(0)
    gw = torch.empty_like(weight, memory_format=torch.contiguous_format) if weight_wanted else hidden.new_empty(0)
    options = beta, _LOGITS, _LOGITS, scale
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
        if weight_wanted:
            torch.mm(y.t(), x, out=gw) if first == 0 else gw.addmm_(y.t(), x)
    return (losses * scales).sum(), gh, gw


@fake_kernel("fused_linear_divergence")
def _(hidden, weight, teacher_hidden, teacher_weight, scales, beta, scale, chunk, hidden_wanted, weight_wanted):
    made = ((hidden, hidden_wanted), (weight, weight_wanted))
    gradients = (hidden.new_empty(t.shape if wanted else (0,)) for t, wanted in made)
    return hidden.new_empty((), dtype=torch.float32), *gradients


def _save_fused(ctx, inputs, output):
    hidden, weight, teacher_hidden, teacher_weight, scales, *ctx.options = inputs
    _, *made = output
    ctx.mark_non_differentiable(*made)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(hidden, weight, teacher_hidden, teacher_weight, scales, *made)


def _fused_backward(ctx, grad, *_):
    if grad is None:
        return (None,) * 10
    *inputs, scales, gh, gw = ctx.saved_tensors
    beta, scale, _, *wanted = ctx.options
    made = [gh, gw]
    if torch.is_grad_enabled():  # backward() with create_graph, for which the logits are in memory
        leaves = [t for t, want in zip(inputs, wanted) if want]
        loss = (_linear_by_torch(*inputs, beta, scale) * scales).sum()  # pyright: ignore[reportCallIssue]
        found = iter(torch.autograd.grad(loss, leaves, grad, create_graph=True))
        made = [next(found) if want else None for want in wanted]
    elif is_plain(grad):
        for gradient in made:
            ops.scale_(gradient, grad)
            torch.autograd.graph.increment_version(gradient)
    else:
        made = [gradient * grad.to(gradient.dtype) for gradient in made]
    return *(gradient if want else None for gradient, want in zip(made, wanted)), *((None,) * 8)


_fused = autograd("fused_linear_divergence", _fused_backward, _save_fused)


# Overrides of PyTorch's kernels


def _override(previous, count, decline):
    def kernel(keyset, input, target, reduction=1, *, log_target=False):
        names = {0: "none", 1: "mean", 2: "sum"}  # "batchmean" is made of the sum
        plain = is_plain(input) and is_plain(target)
        if not plain or not _takes(input, target, names.get(reduction), log_target):
            return decline(keyset, input, target, reduction, log_target=log_target)
        total = count.run(_sum, input, target, log_target)
        return (total / (input.numel() if reduction == 1 else 1)).to(input.dtype)

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


def _reference(input, target, beta=0.5, *, temperature=1.0, log_probabilities=False, reduction="batchmean"):
    q, p = (input / temperature).softmax(-1), (target.detach() / temperature).softmax(-1)
    m = beta * p + (1 - beta) * q

    def kl(a, b):
        return (a * (a.log() - b.log())).sum(-1)

    losses = kl(p, q) if beta == 0 else kl(q, p) if beta == 1 else beta * kl(p, m) + (1 - beta) * kl(q, m)
    return losses if reduction == "none" else losses.sum() / (1 if reduction == "sum" else losses.numel())


def _fused_reference(hidden, weight, teacher_hidden, teacher_weight, beta=0.0, *, temperature=1.0, chunk=None):
    logits = hidden @ weight.mT, teacher_hidden @ teacher_weight.mT
    return _reference(*logits, beta, temperature=temperature)


def _student_and_teacher(hidden, weight):
    """The teacher is no leaf: the results have no derivative by it."""
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
        reference=_reference,
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
register(_fused_op(fused_linear_jsd, 0.5))
register(_fused_op(fused_linear_kl_div, 0.0))
