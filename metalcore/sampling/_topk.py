"""The largest numbers of rows."""

from __future__ import annotations

import torch
from torch import Tensor

from .._core.operators import autograd, cpu_kernel, fake_kernel
from .._core.registry import Op, Sample, register
from .._core.routing import accelerated

__all__ = ["topk"]

_MOST = 65536  # TOP_K_LONG_MOST of kernels/sampling/sampling.h
_EXACT_IN_FLOAT32 = 2**24  # up to here float32 counts


def topk(input: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> torch.return_types.topk:
    """Finds the k largest or smallest elements along a dimension, and their indices, as torch.topk.

    The k-th element is found without a sort; then k elements are sorted. NaN is larger than all numbers. Of equal
    elements those with lower indices come first, so that the same input gives the same indices on every run.

    Args:
        input: float32, float16 or bfloat16, any strides, with up to 2**24 elements along `dim`. PyTorch's op takes all
            other input.
        k: how many; up to 65536, more are left to PyTorch. Above 1024 they are sorted in device memory.
        dim: the dimension.
        largest: whether the largest are wanted, and not the smallest.
        sorted: the results are in their order in any case.

    Returns:
        (values, indices), of input's shape with k in the place of the dimension's size. The values have gradients of
        any order.

    Raises:
        As torch.topk.

    Example:
        >>> values, indices = metalcore.topk(torch.tensor([3.0, 9.0, 5.0], device="mps"), 2)
        >>> values.tolist(), indices.tolist()
        ([9.0, 5.0], [1, 2])
    """
    usual = type(k) is int and type(dim) is int and type(largest) is bool and type(sorted) is bool
    if not (usual and accelerated(input) and input.dim() and -input.dim() <= dim < input.dim()):
        return torch.topk(input, k, dim, largest, sorted)
    length = input.shape[dim]
    if not 0 <= k <= min(length, _MOST) or length > _EXACT_IN_FLOAT32 or input.numel() == 0:
        return torch.topk(input, k, dim, largest, sorted)
    last = dim in (-1, input.dim() - 1)
    if last and input.dim() == 2:
        return torch.return_types.topk(_topk(input, k, largest))
    moved = input if last else input.movedim(dim, -1)
    pair = _topk(moved.reshape(-1, length), k, largest)
    values, indices = (x.view(*moved.shape[:-1], k) for x in pair)
    return torch.return_types.topk((values, indices) if last else (values.movedim(-1, dim), indices.movedim(-1, dim)))


@cpu_kernel("topk")
def _(x, k, largest):
    keys = x.sort(dim=-1, descending=largest, stable=True)
    return keys.values[:, :k].contiguous(), keys.indices[:, :k].contiguous()


@fake_kernel("topk")
def _(x, k, largest):
    return x.new_empty((x.shape[0], k)), x.new_empty((x.shape[0], k), dtype=torch.int64)


def _save(ctx, inputs, output):
    _, indices = output
    ctx.mark_non_differentiable(indices)
    ctx.set_materialize_grads(False)
    ctx.shape = inputs[0].shape
    ctx.save_for_backward(indices)


def _backward(ctx, grad, _):
    if grad is None:
        return None, None, None
    (indices,) = ctx.saved_tensors
    return grad.new_zeros(ctx.shape).scatter(-1, indices, grad), None, None


_topk = autograd("topk", _backward, _save)


def _distinct(dim, count):
    """Makes the `count` largest numbers along a dimension different in all dtypes: PyTorch's op may choose others of
    equal ones."""

    def change(x):
        rank = x.argsort(dim, descending=True).argsort(dim)
        different = (0x4000 - rank.clamp(max=count)).to(torch.int16).view(torch.bfloat16).float()  # 2 and less
        return different.where(rank < count, -x.abs())

    return change


def _sample(name, *shape, k, **options):
    return Sample(name, (shape,), {"k": k, **options}, prepare=(_distinct(options.get("dim", -1), max(1000, k)),))


register(
    Op(
        "topk",
        topk,
        namesake="torch.topk",
        operators=("topk",),
        samples=lambda: (
            _sample("rows", 5, 1000, k=7),
            _sample("all", 3, 20, k=20),
            _sample("smallest of columns", 2, 300, 3, k=4, dim=1, largest=False),
            _sample("none", 3, 20, k=0),
            _sample("many", 2, 1100, k=1050),
        ),
        production=lambda batch_size=4, vocab_size=32000, k=50: _sample("", batch_size, vocab_size, k=k),
    )
)
