"""Rows of a table by index."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .._core.operators import autograd, cpu_kernel, fake_kernel
from .._core.registry import Op, Override, Sample, register
from .._core.routing import accelerated
from .._core.tensors import is_dtensor

__all__ = ["embedding"]

_aten = torch.ops.aten
INTEGERS = (torch.int32, torch.int64)


def embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """Returns weight[input], as torch.nn.functional.embedding.

    The gradient of a row is summed in the order of its uses, without atomic additions, so that the same inputs give the
    same bits.

    Args:
        input: indices, int32 or int64, any shape. The row of an index that the table does not have is NaN; no gradient
            comes from it.
        weight: the table (rows, depth), float32, float16 or bfloat16.
        padding_idx: the index whose row gets no gradient.
        max_norm, norm_type: rows are scaled to this norm first, in place. Such a call goes to PyTorch's op.
        scale_grad_by_freq: gradients of rows are divided by how often their index occurs.
        sparse: the gradient is a sparse tensor.

    Returns:
        A tensor of the input's shape and a dimension more, with gradients of any order.

    Example:
        >>> weight = torch.arange(6.0, device="mps").reshape(3, 2)
        >>> metalcore.embedding(torch.tensor([2, 0], device="mps"), weight).tolist()
        [[4.0, 5.0], [0.0, 1.0]]
    """
    if (
        max_norm is not None
        or not takes(weight, input)
        or not in_range(padding_idx, weight.shape[0])
        or type(scale_grad_by_freq) is not bool
        or type(sparse) is not bool
    ):
        return F.embedding(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    padding = -1 if padding_idx is None else padding_idx % weight.shape[0]
    if is_dtensor(weight):
        from ..distributed import vocabulary

        if vocabulary.by_rows(weight):
            return vocabulary.embedding(_embedding, weight, input, padding, scale_grad_by_freq, sparse)
    return _embedding(weight, input, padding, scale_grad_by_freq, sparse)


def takes(weight: Tensor, indices: Tensor) -> bool:
    if not accelerated(weight) or weight.dim() != 2:
        return False
    rows, depth = weight.shape
    return (
        isinstance(indices, Tensor)
        and indices.dtype in INTEGERS
        and indices.device == weight.device
        and indices.layout is torch.strided
        and rows > 0
        and indices.numel() < 2**31
        and depth < 2**31
    )


def in_range(padding_idx, rows):
    return padding_idx is None or type(padding_idx) is int and -rows <= padding_idx < rows


# CPU and fake kernels


def in_table(indices: Tensor, rows: int) -> Tensor:
    return (indices >= 0) & (indices < rows)


@cpu_kernel("embedding")
def _(weight, indices, padding_idx, scale_grad_by_freq, sparse):
    there = in_table(indices, len(weight))
    return weight[indices.where(there, 0).long()].where(there[..., None], torch.nan)


@fake_kernel("embedding")
def _(weight, indices, padding_idx, scale_grad_by_freq, sparse):
    return weight.new_empty((*indices.shape, weight.shape[1]))


def gradient_by_torch(grad, indices, bags, sizes, factors, maxima, rows, padding_idx, by_count, mode):
    """Returns the gradient of a table, in PyTorch's ops; bags, sizes and maxima are None where there are no bags."""
    wide = torch.float64 if grad.dtype == torch.float64 else torch.float32
    sorted, order = torch.sort(indices.reshape(-1), stable=True)
    source = order if bags is None else bags[order]
    terms = grad.reshape(-1, grad.shape[-1])[source].to(wide)
    if factors is not None:
        terms = terms * factors[order, None].to(wide)
    if mode == 1:
        terms = terms / sizes[source, None].clamp(min=1)
    if mode == 2:
        again = torch.zeros_like(sorted, dtype=torch.bool)
        again[1:] = (sorted[1:] == sorted[:-1]) & (source[1:] == source[:-1])
        terms = terms.where((maxima[source] == sorted[:, None]) & ~again[:, None], 0.0)
    used = in_table(sorted, rows) & (sorted != padding_idx)
    if bags is not None:
        used &= source >= 0
    index = sorted.where(used, 0).long()
    if by_count:
        counts = torch.zeros(rows, dtype=wide, device=grad.device).index_add(0, index, used.to(wide))
        terms = terms / counts[index, None].clamp(min=1)
    terms = terms.where(used[:, None], 0.0)
    return torch.zeros(rows, grad.shape[-1], dtype=wide, device=grad.device).index_add(0, index, terms).to(grad.dtype)


@cpu_kernel("embedding_backward")
def _(grad, indices, rows, padding_idx, scale_grad_by_freq):
    return gradient_by_torch(grad, indices, None, None, None, None, rows, padding_idx, scale_grad_by_freq, 0)


@fake_kernel("embedding_backward")
def _(grad, indices, rows, padding_idx, scale_grad_by_freq):
    return grad.new_empty((rows, grad.shape[-1]))


# Derivatives


def _save(ctx, inputs, output):
    weight, indices, ctx.padding, ctx.by_count, ctx.sparse = inputs
    ctx.rows = weight.shape[0]
    ctx.save_for_backward(indices)


def _backward(ctx, grad):
    (indices,) = ctx.saved_tensors
    if ctx.sparse:
        used = in_table(indices, ctx.rows)
        grad, indices = grad.where(used[..., None], 0.0), indices.where(used, 0).long()
        return _aten.embedding_sparse_backward(grad, indices, ctx.rows, ctx.padding, ctx.by_count), *_NONE
    return _gradient(grad, indices, ctx.rows, ctx.padding, ctx.by_count), *_NONE


_NONE = (None,) * 4


def _save_backward(ctx, inputs, output):
    _, indices, ctx.rows, ctx.padding, ctx.by_count = inputs
    ctx.save_for_backward(indices)


def _double_backward(ctx, cotangent):
    """Returns the gradient of the gradient, which is linear in grad: what reaches a row goes back to each of its
    uses."""
    (indices,) = ctx.saved_tensors
    used = in_table(indices, ctx.rows) & (indices != ctx.padding)
    index = indices.where(used, 0).long()
    back = cotangent[index]
    if ctx.by_count:
        counts = torch.zeros(ctx.rows, dtype=back.dtype, device=back.device)
        counts = counts.index_add(0, index.reshape(-1), used.reshape(-1).to(back.dtype))
        back = back / counts[index][..., None].clamp(min=1)
    return back.where(used[..., None], 0.0), *_NONE


_embedding = autograd("embedding", _backward, _save)
_gradient = autograd("embedding_backward", _double_backward, _save_backward)


def indices_of(x: Tensor, count: int, rows: int) -> Tensor:
    """Returns the indices of a sample: some occur often, most once."""
    place = torch.arange(count, device=x.device)
    return (place * 7 % rows) * (place % 3 > 0)


def _sample(name, rows, depth, count, **options):
    return Sample(
        name,
        ((rows, depth),),
        options,
        arguments=lambda table: (indices_of(table, count, rows), table),
        terms=count,
    )


register(
    Op(
        "embedding",
        embedding,
        namesake="torch.nn.functional.embedding",
        operators=("embedding", "embedding_backward"),
        integers={"input": torch.int64},
        override=(Override("embedding"), Override("embedding_dense_backward")),
        samples=lambda: (
            _sample("rows", 50, 64, 200),
            _sample("odd rows", 50, 33, 200, padding_idx=7),
            _sample("by count", 50, 6, 100, scale_grad_by_freq=True),
            _sample("one row", 1, 8, 30),
            _sample("many", 50, 8, 2100),
        ),
    )
)
