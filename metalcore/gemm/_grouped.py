"""grouped_gemm: products of groups of rows, each with a matrix of its own, as mixtures of experts have."""

from __future__ import annotations

import torch
from torch import Tensor

from .._core.operators import autograd, cpu_kernel, fake_kernel
from .._core.registry import Op, Sample, register
from .._core.routing import INT32_MAX, alike, autocast_operands, require_tensors
from .._core.samples import integers
from .._core.tensors import in_int32

__all__ = ["grouped_gemm"]


def grouped_gemm(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Computes the products of groups of rows or of terms, as torch.nn.functional.grouped_mm(x, weight, offs=offsets).

    Group g begins where group g - 1 ends, and ends before offsets[g]. What lies behind the last group belongs to none.
    The host does not read the offsets, so that it never waits for them.

    Args:
        x: (M, K), or (G, M, K): float32, float16 or bfloat16, any strides.
        weight: of x's dtype. With x (M, K) it is (G, K, N), where groups share the M rows, or (K, N), where they share
            the K terms. With x (G, M, K) it is (K, N), where groups share the N columns.
        offsets: (G,) integers that do not decrease, on x's device. An offset outside of the dimension counts as the
            nearest place that is possible.

    Returns:
        (M, N), (G, M, N), or (M, N), with gradients of any order with respect to x and weight. Rows or columns of no
        group are zero. It has x's dtype, or autocast's where that is on, as torch.matmul's (PyTorch's grouped_mm has
        no such rule).

    Raises:
        TypeError: an argument is no tensor, or offsets are no integers.
        RuntimeError: shapes do not match.

    Example:
        >>> x, weight = torch.randn(6, 4, device="mps"), torch.randn(2, 4, 3, device="mps")
        >>> offsets = torch.tensor([2, 6], dtype=torch.int32, device="mps")  # two rows, and then four
        >>> metalcore.grouped_gemm(x, weight, offsets).shape
        torch.Size([6, 3])
    """
    require_tensors("grouped_gemm", x=x, weight=weight, offsets=offsets)
    if offsets.is_floating_point() or offsets.is_complex() or offsets.dtype == torch.bool:
        raise TypeError(f"grouped_gemm: offsets must be integers, not {offsets.dtype}")
    x, weight = autocast_operands(x, weight)
    if x.dim() == 3 and weight.dim() == 2:
        return grouped_gemm(weight.T, x.mT, offsets).T
    _check(x, weight, offsets)
    if alike(x, weight) and offsets.device == x.device and max(*x.shape, *weight.shape) <= INT32_MAX:
        return _grouped(x, weight, in_int32(offsets))
    return _by_torch(x, weight, offsets)


def _check(x, weight, offsets):
    if x.dim() != 2 or weight.dim() not in (2, 3) or x.shape[1] != weight.shape[-2]:
        raise RuntimeError(
            f"grouped_gemm: x of shape {list(x.shape)} does not go with weight of shape {list(weight.shape)}"
        )
    if offsets.dim() != 1 or weight.dim() == 3 and len(offsets) != len(weight):
        raise RuntimeError(
            f"grouped_gemm: offsets of shape {list(offsets.shape)} do not go with weight of shape {list(weight.shape)}"
        )


def _groups(offsets, size):
    """Returns 0 or 1 for each group and each place of the dimension: whether the place belongs to the group."""
    ends = offsets.to(torch.int64).clamp(0, size).cummax(0).values
    begins = torch.cat((ends.new_zeros(1), ends[:-1]))
    places = torch.arange(size, device=offsets.device)
    return (places >= begins[:, None]) & (places < ends[:, None])


def _by_torch(x, weight, offsets):
    """Returns the same in PyTorch's ops. Zeros stand for what a group does not have."""
    if weight.dim() == 2:
        has = _groups(offsets, x.shape[1])
        return torch.where(has[:, None], x, 0.0) @ torch.where(has[..., None], weight, 0.0)
    has = _groups(offsets, x.shape[0])[..., None]
    return torch.where(has, torch.where(has, x, 0.0) @ weight, 0.0).sum(0)


@cpu_kernel("grouped_gemm")
def _(a, b, offsets):
    _check(a, b, offsets)
    wide = torch.promote_types(a.dtype, torch.float32)
    return _by_torch(a.to(wide), b.to(wide), offsets).to(a.dtype).contiguous()


@fake_kernel("grouped_gemm")
def _(a, b, offsets):
    _check(a, b, offsets)
    groups = () if b.dim() == 3 else (offsets.shape[0],)
    return a.new_empty((*groups, a.shape[0], b.shape[-1]))


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _backward(ctx, grad):
    a, b, offsets = ctx.saved_tensors
    by_a = grouped_gemm(grad, b.mT, offsets) if ctx.needs_input_grad[0] else None
    by_b = grouped_gemm(a.T, grad, offsets) if ctx.needs_input_grad[1] else None
    return by_a, by_b, None


_grouped = autograd("grouped_gemm", _backward, _save)


def _offsets(*ends):
    return lambda x, weight: (x, weight, integers(ends, x))


register(
    Op(
        "grouped_gemm",
        grouped_gemm,
        reference=_by_torch,
        operators=("grouped_gemm",),
        samples=lambda: (
            Sample("rows", ((80, 24), (3, 24, 40)), arguments=_offsets(5, 5, 75), terms=70),
            Sample("terms", ((24, 80), (80, 40)), arguments=_offsets(5, 5, 75), terms=70),
        ),
        production=lambda tokens=64, experts=8, hidden_size=256, outputs=256: Sample(
            "",
            ((tokens, hidden_size), (experts, hidden_size, outputs)),
            arguments=lambda x, weight: (x, weight, torch.arange(1, experts + 1, device=x.device) * tokens // experts),
            terms=max(hidden_size, outputs, tokens),
        ),
    )
)
