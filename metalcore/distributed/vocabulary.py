"""Losses and embeddings of DTensors whose vocabulary is sharded: cross entropy of shards of the vocabulary, of rows, or
of both on a mesh of several dimensions, and lookups in tables that are sharded by rows.

Ranks exchange, for each row of logits, the largest one, the sum of exponentials and the target's logit: never the
logits. Over rows they exchange the sums of losses and of targets' weights.

Source: Shoeybi et al., "Megatron-LM", 2019, section 3. Gradients of chunks: Hsu et al., "Liger Kernel", 2024.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from .._core.tensors import beside, is_dtensor, whole

__all__ = ["by_rows", "cross_entropy", "embedding", "fused_linear_cross_entropy"]


class _Options(NamedTuple):
    ignore_index: int
    label_smoothing: float
    softcap: float
    z_loss: float
    classes: int  # of all shards
    offset: int  # the first class of this shard
    groups: tuple  # over which the classes are sharded


class _Rows(NamedTuple):
    """What the gradient of rows needs, besides the logits."""

    largest: Tensor  # logit of all shards
    log_sum: Tensor  # of exponentials of differences from that; one float32 for their sum would lose its digits
    target_weight: Tensor
    inside: Tensor  # whether the target is a class of this shard
    place: Tensor  # where it is
    counted: Tensor


def _reduced(x, how, groups):
    for group in groups:
        x = collectives.all_reduce(x, how, group)
    return x


def _cap(logits, softcap):
    x = logits.float()
    return x.where(x == -torch.inf, softcap * torch.tanh(x / softcap)) if softcap else x


def _losses(y, target, weight, options):
    """Returns the losses of rows of capped logits, of which this rank has some classes, and what their gradient
    needs."""
    counted = target != options.ignore_index
    wrong = counted & ((target < 0) | (target >= options.classes))
    place = target - options.offset
    inside = counted & (place >= 0) & (place < y.shape[1])
    place = place.where(inside, 0)
    largest = _reduced(y.amax(1), "max", options.groups)
    largest = largest.where(largest.abs() != torch.inf, 0.0)
    y = y - largest[:, None]
    sums = [y.exp().sum(1), y.gather(1, place[:, None])[:, 0].where(inside, 0.0)]
    smoothing, whole_weight = options.label_smoothing / options.classes, float(options.classes)
    if weight is not None:
        whole_weight = weight.sum()
    if smoothing:
        sums.append((y if weight is None else y * _part(weight, y, options)).sum(1))
    exponentials, picked, *rest = _reduced(torch.stack(sums), "sum", options.groups)
    log_sum = exponentials.log()
    chosen = target.where(counted & ~wrong, 0)
    target_weight = torch.ones_like(log_sum) if weight is None else weight[chosen]
    target_weight = (target_weight * counted).where(~wrong, torch.nan)
    losses = (1 - options.label_smoothing) * target_weight * (log_sum - picked)
    losses = losses + options.z_loss * (largest + log_sum).square()
    if smoothing:
        losses = losses + smoothing * (whole_weight * log_sum - rest[0])
    return losses.where(counted, 0.0), _Rows(largest, log_sum, target_weight, inside, place, counted)


def _part(weight, y, options):
    """Returns the weights of this rank's classes."""
    return weight[options.offset : options.offset + y.shape[1]]


def _gradient(y, rows, weight, scale, options):
    """Returns the gradient of sum(scale * losses) by the logits before the cap."""
    smoothing = options.label_smoothing / options.classes
    chosen = (1 - options.label_smoothing) * rows.target_weight
    mass = chosen + smoothing * (options.classes if weight is None else weight.sum())
    factor = mass + 2 * options.z_loss * (rows.largest + rows.log_sum)
    gradient = (y - rows.largest[:, None] - rows.log_sum[:, None]).exp() * factor[:, None]
    if smoothing:
        gradient -= smoothing * (1.0 if weight is None else _part(weight, y, options))
    gradient.scatter_add_(1, rows.place[:, None], -(chosen * rows.inside)[:, None])
    if options.softcap:
        gradient *= (1 - (y / options.softcap).square()).where(y != -torch.inf, 0.0)
    return (gradient * scale[:, None]).where(rows.counted[:, None], 0.0)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, target, weight, options):
        losses, rows = _losses(_cap(logits, options.softcap), target, weight, options)
        ctx.options = options
        ctx.save_for_backward(logits, weight, *rows)
        return losses

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        logits, weight, *rows = ctx.saved_tensors
        y = _cap(logits, ctx.options.softcap)
        return _gradient(y, _Rows(*rows), weight, grad, ctx.options).to(logits.dtype), None, None, None


class _Linear(torch.autograd.Function):
    """The sum of scale * losses of hidden @ weight.T + bias, with the gradients of a chunk of rows made as soon as its
    losses are."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, target, class_weight, scale, options, chunk):
        wanted = ctx.needs_input_grad[:3]
        total = hidden.new_zeros((), dtype=torch.float32)
        gh = torch.empty_like(hidden) if wanted[0] else None
        gw = torch.zeros_like(weight, dtype=torch.float32) if wanted[1] else None
        gb = torch.zeros_like(bias, dtype=torch.float32) if wanted[2] else None
        for first in range(0, len(hidden), chunk):
            part = slice(first, first + chunk)
            y = _cap(F.linear(hidden[part], weight, bias), options.softcap)
            losses, rows = _losses(y, target[part], class_weight, options)
            total += (losses * scale).sum()
            if any(wanted):
                g = _gradient(y, rows, class_weight, scale.expand(len(y)), options).to(hidden.dtype)
                if gh is not None:
                    torch.mm(g, weight, out=gh[part])
                if gw is not None:
                    gw += g.mT @ hidden[part]
                if gb is not None:
                    gb += g.sum(0, dtype=torch.float32)
        ctx.gradients = gh, gw if gw is None else gw.to(weight.dtype), gb if gb is None else gb.to(bias.dtype)
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        if ctx.gradients is None:
            raise RuntimeError("fused_linear_cross_entropy: backward() runs once; its gradients have been used")
        gradients, ctx.gradients = ctx.gradients, None
        return *(None if g is None else g * grad.to(g.dtype) for g in gradients), None, None, None, None, None


def cross_entropy(input, target, weight, ignore_index, reduction, label_smoothing, softcap, z_loss) -> Tensor:
    """Computes metalcore.cross_entropy for logits that are a DTensor (N, C, …), and classes as targets.

    Logits that are sharded along C or N stay so; others are redistributed to Replicate. Targets are a DTensor, or a
    tensor that every rank has.

    Returns:
        A DTensor: the losses of rows, sharded as the rows, or the reduced loss, which every rank has.
    """
    _check(input, target, reduction)
    mesh = input.device_mesh
    placements = [p if p in (Shard(0), Shard(1)) else Replicate() for p in input.placements]
    input = input.redistribute(mesh, placements)
    rows = [Shard(0) if p == Shard(0) else Replicate() for p in placements]
    target = (target if is_dtensor(target) else beside(input, target)).redistribute(mesh, rows).to_local()  # pyright: ignore[reportAttributeAccessIssue]
    options = _options(input, 1, placements, ignore_index, label_smoothing, softcap, z_loss)
    logits = input.to_local(grad_placements=placements).movedim(1, -1)
    weight = None if weight is None else whole(weight).float()
    losses = _CrossEntropy.apply(logits.flatten(0, -2), target.flatten(), weight, options).view(target.shape)
    if reduction == "none":
        return DTensor.from_local(losses.to(input.dtype), mesh, rows, run_check=False)
    total = losses.sum()
    if reduction == "mean":
        total = total / _weight_of(target, weight, ignore_index, _groups(mesh, rows))
    return _summed(total, mesh, rows, input.dtype)


def fused_linear_cross_entropy(
    hidden, weight, target, bias, class_weight, ignore_index, reduction, label_smoothing, softcap, z_loss, chunk
) -> Tensor:
    """Computes metalcore.fused_linear_cross_entropy for DTensors, with the reduction "mean" or "sum".

    Along a dimension of the mesh that shards the weight by classes, hidden is replicated: a sequence that is sharded
    there is gathered, and its gradient scattered. Along others hidden may be sharded by any dimension except its last.
    """
    _check(hidden, target, reduction)
    mesh = hidden.device_mesh
    weight = weight if is_dtensor(weight) else beside(hidden, weight)
    classes = [p if p == Shard(0) else Replicate() for p in weight.placements]  # pyright: ignore[reportAttributeAccessIssue]
    rows = [
        p if isinstance(p, Shard) and p.dim < hidden.ndim - 1 and c == Replicate() else Replicate()
        for p, c in zip(hidden.placements, classes)
    ]
    target = (target if is_dtensor(target) else beside(hidden, target)).redistribute(mesh, rows).to_local()  # pyright: ignore[reportAttributeAccessIssue]
    of_hidden = [Partial() if c == Shard(0) else r for r, c in zip(rows, classes)]
    of_weight = [Partial() if isinstance(r, Shard) else c for r, c in zip(rows, classes)]
    weight = weight.redistribute(mesh, classes)  # pyright: ignore[reportAttributeAccessIssue]
    options = _options(weight, 0, classes, ignore_index, label_smoothing, softcap, z_loss)
    x = hidden.redistribute(mesh, rows).to_local(grad_placements=of_hidden).flatten(0, -2)
    w = weight.to_local(grad_placements=of_weight)
    if bias is not None:
        bias = bias if is_dtensor(bias) else beside(hidden, bias)
        bias = bias.redistribute(mesh, classes).to_local(grad_placements=of_weight)  # pyright: ignore[reportAttributeAccessIssue]
    class_weight = None if class_weight is None else whole(class_weight).float()
    scale = torch.ones((), device=x.device)
    if reduction == "mean":
        scale = scale / _weight_of(target, class_weight, ignore_index, _groups(mesh, rows))
    total = _Linear.apply(x, w, bias, target.flatten(), class_weight, scale, options, chunk)
    return _summed(total, mesh, rows, hidden.dtype)


def _check(x, target, reduction):
    if target.is_floating_point():
        raise NotImplementedError("cross entropy of DTensors takes classes as targets, and no probabilities")
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"{reduction} is not a valid value for reduction")
    if x.ndim < 2:
        raise RuntimeError(f"cross entropy of DTensors takes rows of at least 2 dimensions, not {list(x.shape)}")


def _groups(mesh, placements):
    return tuple(mesh.get_group(place) for place, p in enumerate(placements) if isinstance(p, Shard))


def _options(x, dim, placements, ignore_index, label_smoothing, softcap, z_loss):
    offset = compute_local_shape_and_global_offset(x.shape, x.device_mesh, placements)[1][dim]
    sharded = [p if isinstance(p, Shard) and p.dim == dim else Replicate() for p in placements]
    groups = _groups(x.device_mesh, sharded)
    return _Options(
        ignore_index, float(label_smoothing), float(softcap or 0), float(z_loss), x.shape[dim], offset, groups
    )


def _weight_of(target, weight, ignore_index, groups):
    """Returns the sum of the targets' weights over all ranks."""
    counted = target != ignore_index
    if weight is None:
        return _reduced(counted.sum(dtype=torch.float32), "sum", groups)
    valid = counted & (target >= 0) & (target < len(weight))
    return _reduced((weight[target.where(valid, 0)] * valid).sum(), "sum", groups)


def _summed(total, mesh, rows, dtype):
    partial = [Partial() if isinstance(p, Shard) else Replicate() for p in rows]
    loss = DTensor.from_local(total, mesh, partial, run_check=False).redistribute(mesh, [Replicate()] * mesh.ndim)
    return loss.to(dtype)


def by_rows(weight: Tensor) -> bool:
    """Returns whether a table is a DTensor that is sharded by rows."""
    return is_dtensor(weight) and Shard(0) in weight.placements  # pyright: ignore[reportAttributeAccessIssue]


def embedding(local: Callable, weight, indices, padding: int, *options) -> Tensor:
    """Looks up the rows that this rank has, with zeros for all others: a partial sum over the ranks.

    Args:
        local: the lookup in one rank's rows. It gives NaN for indices that are none of them, and no gradient.
        weight: as `by_rows` says. Where it is not sharded by rows it is replicated.
        indices: a DTensor, or a tensor that every rank has.
        padding: the row without gradient, or -1.
    """
    mesh = weight.device_mesh
    tables = [p if p == Shard(0) else Replicate() for p in weight.placements]
    indices = indices if is_dtensor(indices) else beside(weight, indices)
    rows = [p if isinstance(p, Shard) and t != Shard(0) else Replicate() for p, t in zip(indices.placements, tables)]  # pyright: ignore[reportAttributeAccessIssue]
    of_weight = [Partial() if isinstance(r, Shard) else t for r, t in zip(rows, tables)]
    weight = weight.redistribute(mesh, tables)
    first = compute_local_shape_and_global_offset(weight.shape, mesh, tables)[1][0]
    table = weight.to_local(grad_placements=of_weight)
    chosen = indices.redistribute(mesh, rows).to_local()  # pyright: ignore[reportAttributeAccessIssue]
    place = chosen - first
    inside = (place >= 0) & (place < len(table))
    nowhere = (chosen < 0) | (chosen >= len(weight))
    padding = padding - first if first <= padding < first + len(table) else -1
    part = local(table, place.where(inside, -1), padding, *options)
    part = torch.where((inside | nowhere)[..., None], part, 0)
    placements = [Partial() if t == Shard(0) else r for r, t in zip(rows, tables)]
    return DTensor.from_local(part, mesh, placements, run_check=False)
