"""Sums, means and maxima of a table's rows in bags of indices."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .._core.operators import autograd, cpu_kernel, fake_kernel, ops
from .._core.registry import Op, Override, Sample, register
from .._core.tensors import beside
from ._embedding import gradient_by_torch, in_range, in_table, indices_of, takes

__all__ = ["embedding_bag"]

_aten = torch.ops.aten
_MODES = {"sum": 0, "mean": 1, "max": 2}  # PyTorch's numbers


def embedding_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """Computes the sums, means or maxima of rows of a table, as torch.nn.functional.embedding_bag.

    The gradient of a row is summed in the order of its uses, without atomic additions, so that the same inputs give the
    same bits.

    Args:
        input: indices, int32 or int64, (bags, n), or (n) with offsets. A bag with an index that the table does not have
            is NaN, -1 included; no gradient comes from that index.
        weight: the table (rows, depth), float32, float16 or bfloat16.
        offsets: the place of each bag's first index, of the input's dtype, in ascending order, beginning with 0. A bag
            whose offsets descend or lie outside of the input is NaN, and so is the first one if it begins behind 0.
        max_norm, norm_type: rows are scaled to this norm first, in place. Such a call goes to PyTorch's op.
        scale_grad_by_freq: gradients of rows are divided by how often their index occurs. "sum" and "mean" take it.
        mode: "sum", "mean" or "max".
        sparse: the gradient is a sparse tensor. "sum" and "mean" take it.
        per_sample_weights: a factor for each index, of weight's dtype, which only "sum" takes.
        include_last_offset: offsets has one element more, the end of the last bag.
        padding_idx: the index that no bag counts.

    Returns:
        A tensor (bags, depth), with gradients by weight and per_sample_weights of any order. Empty bags are zero.

    Example:
        >>> weight = torch.arange(6.0, device="mps").reshape(3, 2)
        >>> bags = torch.tensor([[0, 1], [2, 2]], device="mps")
        >>> metalcore.embedding_bag(bags, weight, mode="sum").tolist()
        [[2.0, 4.0], [8.0, 10.0]]
    """
    if (
        max_norm is not None
        or not takes(weight, input)
        or not type(scale_grad_by_freq) is type(sparse) is type(include_last_offset) is bool
        or not _fits(input, weight, offsets, mode, per_sample_weights, include_last_offset, padding_idx)
        or mode == "max"
        and (scale_grad_by_freq or sparse)
    ):
        return F.embedding_bag(
            input,
            weight,
            offsets,
            max_norm,
            norm_type,
            scale_grad_by_freq,
            mode,
            sparse,
            per_sample_weights,
            include_last_offset,
            padding_idx,
        )
    indices, flat = input, input.dim() == 1
    if not flat:
        bags, n = input.shape
        offsets = beside(input, torch.arange(0, bags * n, n, device=input.device))
        indices = input.reshape(-1)
    if input.dtype is not torch.int64:
        indices, offsets = indices.long(), offsets.long()  # pyright: ignore[reportOptionalMemberAccess]
    factors = None if per_sample_weights is None else per_sample_weights.reshape(-1)
    padding = -1 if padding_idx is None else padding_idx % weight.shape[0]
    last = include_last_offset and flat
    return _bag(weight, indices, offsets, _MODES[mode], factors, last, padding, scale_grad_by_freq, sparse)


def _fits(input, weight, offsets, mode, per_sample_weights, include_last_offset, padding_idx):
    if type(mode) is not str or mode not in _MODES or not in_range(padding_idx, weight.shape[0]):
        return False
    if input.dim() == 2:
        if offsets is not None or not input.numel():
            return False
    elif (
        input.dim() != 1
        or not isinstance(offsets, Tensor)
        or offsets.dim() != 1
        or offsets.dtype != input.dtype
        or offsets.device != input.device
        or not len(offsets)
    ):
        return False
    return per_sample_weights is None or (
        mode == "sum"
        and per_sample_weights.shape == input.shape
        and per_sample_weights.dtype == weight.dtype
        and per_sample_weights.device == weight.device
    )


# CPU and fake kernels


@cpu_kernel("embedding_bag")
def _(weight, indices, offsets, mode, factors, include_last_offset, padding_idx, scale_grad_by_freq, sparse):
    wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
    count = len(offsets) - include_last_offset
    ends = offsets[1:] if include_last_offset else torch.cat((offsets[1:], offsets.new_tensor([len(indices)])))
    starts = offsets[:count]
    wrong = (starts < 0) | (ends < starts) | (ends > len(indices))
    wrong[:1] |= starts[:1] > 0
    bags = _samples_of(offsets, len(indices), include_last_offset)
    place = torch.arange(len(indices), device=indices.device)
    there = in_table(indices, len(weight))
    used = (bags >= 0) & ~(there & (indices == padding_idx))
    bags = bags.clamp(min=0)
    used &= ~wrong[bags]
    rows = weight[indices.where(there, 0)].to(wide).where(there[:, None], torch.nan)
    if factors is not None:
        rows = rows * factors[:, None].to(wide)
    sizes = torch.zeros(count, dtype=torch.int64, device=weight.device).index_add(0, bags, used.long())
    shape = (count, weight.shape[1])
    if mode == 2:
        into = bags[:, None].expand_as(rows)
        low = rows.where(used[:, None], -torch.inf)
        out = torch.full(shape, -torch.inf, dtype=wide, device=weight.device).scatter_reduce(0, into, low, "amax")
        out = out.where(sizes[:, None] > 0, 0.0)
        holds = used[:, None] & ((rows == out[bags]) | rows.isnan())
        first = place[:, None].expand_as(rows).where(holds, len(indices))
        chosen = torch.full(shape, len(indices), device=weight.device).scatter_reduce(0, into, first, "amin")
        maxima = torch.cat((indices, indices.new_tensor([-1])))[chosen]
        return out.masked_fill(wrong[:, None], torch.nan).to(weight.dtype), sizes, maxima
    out = torch.zeros(shape, dtype=wide, device=weight.device).index_add(0, bags, rows.where(used[:, None], 0.0))
    if mode == 1:
        out = out / sizes[:, None].clamp(min=1)
    return out.masked_fill(wrong[:, None], torch.nan).to(weight.dtype), sizes, indices.new_empty((0, weight.shape[1]))


@fake_kernel("embedding_bag")
def _(weight, indices, offsets, mode, factors, include_last_offset, padding_idx, scale_grad_by_freq, sparse):
    count = offsets.shape[0] - int(include_last_offset)  # PyTorch 2.11 subtracts no bool from a size that is a symbol
    sizes = indices.new_empty(count, dtype=torch.int64)
    maxima = indices.new_empty((count if mode == 2 else 0, weight.shape[1]), dtype=torch.int64)
    return weight.new_empty((count, weight.shape[1])), sizes, maxima


def _samples_of(offsets, count, include_last_offset):
    """Returns the bag of each index, or -1 where offsets are wrong."""
    starts = offsets[: len(offsets) - include_last_offset].contiguous()
    place = torch.arange(count, device=offsets.device)
    bags = (torch.searchsorted(starts, place, right=True) - 1).clamp(min=0)
    ends = torch.cat((offsets[1:], offsets.new_tensor([count])))
    return bags.where((offsets[bags] <= place) & (place < ends[bags]), -1)


@cpu_kernel("embedding_bag_samples")
def _(offsets, count, include_last_offset):
    return _samples_of(offsets, count, include_last_offset)


@fake_kernel("embedding_bag_samples")
def _(offsets, count, include_last_offset):
    return offsets.new_empty(count)


@cpu_kernel("embedding_bag_factors")
def _(grad, weight, indices, bags, padding_idx):
    wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
    used = (indices != padding_idx) & in_table(indices, len(weight)) & (bags >= 0)
    products = (grad[bags.clamp(min=0)].to(wide) * weight[indices.where(used, 0)].to(wide)).sum(1)
    return products.where(used, 0.0).to(weight.dtype)


@fake_kernel("embedding_bag_factors")
def _(grad, weight, indices, bags, padding_idx):
    return weight.new_empty(indices.shape)


@cpu_kernel("embedding_bag_backward")
def _(grad, indices, bags, sizes, maxima, factors, rows, padding_idx, scale_grad_by_freq, mode):
    return gradient_by_torch(grad, indices, bags, sizes, factors, maxima, rows, padding_idx, scale_grad_by_freq, mode)


@fake_kernel("embedding_bag_backward")
def _(grad, indices, bags, sizes, maxima, factors, rows, padding_idx, scale_grad_by_freq, mode):
    return grad.new_empty((rows, grad.shape[1]))


# Derivatives


def _save(ctx, inputs, output):
    weight, indices, offsets, ctx.mode, factors, ctx.last, ctx.padding, ctx.by_count, ctx.sparse = inputs
    _, sizes, maxima = output
    ctx.save_for_backward(weight, indices, offsets, factors, sizes, maxima)


def _backward(ctx, grad):
    if grad is None:
        return (None,) * 9
    weight, indices, offsets, factors, sizes, maxima = ctx.saved_tensors
    bags = ops.embedding_bag_samples(offsets, len(indices), ctx.last)
    gradient = of_factors = None
    if ctx.needs_input_grad[0] and ctx.sparse:
        used, index, bags = _used(indices, bags, len(weight), -1)
        rows = grad[bags].where(used[:, None], 0.0)
        if ctx.mode == 1:
            rows = rows / sizes[bags, None].clamp(min=1).to(rows.dtype)
        rows = rows if factors is None else rows * factors[:, None]
        gradient = _aten.embedding_sparse_backward(rows, index, len(weight), ctx.padding, ctx.by_count)
    elif ctx.needs_input_grad[0]:
        gradient = _bag_gradient(
            grad, indices, bags, sizes, maxima, factors, len(weight), ctx.padding, ctx.by_count, ctx.mode
        )
    if factors is not None and ctx.needs_input_grad[4]:
        of_factors = _factors_gradient(grad, weight, indices, bags, ctx.padding)
    return gradient, None, None, None, of_factors, None, None, None, None


def _used(indices, bags, rows, padding):
    """Returns which indices have a gradient; and all of these and of their bags, of which others are 0."""
    used = in_table(indices, rows) & (indices != padding) & (bags >= 0)
    return used, indices.where(used, 0), bags.where(used, 0)


def _save_backward(ctx, inputs, output):
    grad, indices, bags, sizes, maxima, factors, ctx.rows, ctx.padding, ctx.by_count, ctx.mode = inputs
    ctx.save_for_backward(grad, indices, bags, sizes, maxima, factors)


def _double_backward(ctx, cotangent):
    """Returns the gradients of the gradient, which is linear in grad, and in the factors."""
    grad, indices, bags, sizes, maxima, factors = ctx.saved_tensors
    used, index, bags = _used(indices, bags, ctx.rows, ctx.padding)
    if ctx.mode == 2:
        back = cotangent.gather(0, maxima.clamp(min=0))
        back = back.where((maxima >= 0) & (maxima != ctx.padding), 0.0)
        return back, *((None,) * 9)
    rows = cotangent[index].where(used[:, None], 0.0)
    if ctx.by_count:
        counts = torch.zeros(ctx.rows, dtype=rows.dtype, device=rows.device).index_add(0, index, used.to(rows.dtype))
        rows = rows / counts[index][:, None].clamp(min=1)
    if ctx.mode == 1:
        rows = rows / sizes[bags, None].clamp(min=1).to(rows.dtype)
    of_factors = None if factors is None else (rows * grad[bags]).sum(1)
    weighted = rows if factors is None else rows * factors[:, None]
    back = torch.zeros_like(grad).index_add(0, bags, weighted)
    return back, None, None, None, None, of_factors, None, None, None, None


def _save_factors(ctx, inputs, output):
    grad, weight, indices, bags, ctx.padding = inputs
    ctx.save_for_backward(grad, weight, indices, bags)


def _factors_backward(ctx, cotangent):
    grad, weight, indices, bags = ctx.saved_tensors
    used, index, bags = _used(indices, bags, len(weight), ctx.padding)
    factor = cotangent.where(used, 0.0)[:, None]
    of_grad = torch.zeros_like(grad).index_add(0, bags, weight[index] * factor)
    of_weight = torch.zeros_like(weight).index_add(0, index, grad[bags] * factor)
    return of_grad, of_weight, None, None, None


_bag = autograd("embedding_bag", _backward, _save, results=1)
_bag_gradient = autograd("embedding_bag_backward", _double_backward, _save_backward)
_factors_gradient = autograd("embedding_bag_factors", _factors_backward, _save_factors)


def _sample(name, rows, depth, bags, n, **options):
    def arguments(table, *factors):
        indices, starts = indices_of(table, bags * n, rows), torch.arange(bags, device=table.device) * n
        return indices, table, starts - (starts > 0).long()  # bags of different sizes

    return Sample(name, ((rows, depth),), options, arguments=arguments, terms=bags * n)


def _weighted(table, factors):
    return indices_of(table, 40, len(table)).view(8, 5), table, None, None, 2.0, False, "sum", False, factors


register(
    Op(
        "embedding_bag",
        embedding_bag,
        namesake="torch.nn.functional.embedding_bag",
        operators=("embedding_bag", "embedding_bag_backward", "embedding_bag_samples", "embedding_bag_factors"),
        integers={"input": torch.int64, "offsets": torch.int64},
        override=(
            Override("_embedding_bag"),
            Override("_embedding_bag_forward_only"),
            Override("_embedding_bag_backward"),
        ),
        samples=lambda: (
            _sample("means", 50, 64, 40, 5),
            _sample("sums", 50, 33, 40, 5, mode="sum", padding_idx=7),
            _sample("maxima", 50, 36, 40, 5, mode="max"),
            Sample("factors", ((50, 20), (8, 5)), arguments=_weighted, terms=100),
        ),
    )
)
