"""Operations on captured vectors as simpler ones: look-ups by indices, products and sums."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._decomp import get_decompositions
from torch._dynamo._trace_wrapped_higher_order_op import mod_index
from torch.fx import GraphModule

__all__ = ["DECOMPOSITIONS", "read_at", "without_writes"]

aten = torch.ops.aten
_MOST_FACTORS = 16


def _mm(left: Tensor, right: Tensor) -> Tensor:
    return (left.unsqueeze(-1) * right.unsqueeze(-3)).sum(-2)


def _index_select(source: Tensor, dim: int, index: Tensor) -> Tensor:
    if not source.dim():
        return source.expand(index.shape)
    return source.movedim(dim, 0)[index.reshape(-1)].movedim(0, dim)


def _gather(source: Tensor, dim: int, index: Tensor, sparse_grad: bool = False) -> Tensor:
    return source[index] if source.dim() == index.dim() == 1 else NotImplemented


def _take(source: Tensor, index: Tensor) -> Tensor:
    return aten.index.Tensor(source.reshape(-1), [index])


def _prod(source: Tensor, dim: int, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    """Multiplies few elements one by one: the derivative of a whole product takes scans."""
    if not 0 < source.shape[dim] <= _MOST_FACTORS or dtype is not None or not source.is_floating_point():
        return NotImplemented
    product = functools.reduce(torch.mul, (source.select(dim, i) for i in range(source.shape[dim])))
    return product.unsqueeze(dim) if keepdim else product


def _vector_norm(
    source: Tensor,
    ord: float = 2,
    dim: list[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Takes the root of 1 where all elements are 0: the derivative is 0 there, and no NaN."""
    if not 1 < ord < math.inf:
        return _FROM_PYTORCH[aten.linalg_vector_norm.default](source, ord, dim, keepdim, dtype=dtype)
    wide = source.float()
    total = (wide.square() if ord == 2 else wide.abs().pow(ord)).sum(dim, keepdim)
    is_zero = total == 0
    root = torch.where(is_zero, 1.0, total).pow(1 / ord)
    return torch.where(is_zero, 0.0, root).to(dtype or source.dtype)


def _sinc(source: Tensor) -> Tensor:
    is_zero = source == 0
    angle = math.pi * torch.where(is_zero, 1, source)
    return torch.where(is_zero, 1.0, angle.sin() / angle)  # whose derivative is 0 at 0, and no NaN


def _bucketize(source: Tensor, ends: Tensor, *, out_int32: bool = False, right: bool = False) -> Tensor:
    source = source.unsqueeze(-1)
    below = ends <= source if right else ends < source
    return below.sum(-1, dtype=torch.int32 if out_int32 else torch.int64)


def _shifted(operation: Callable, number: int, by: Tensor) -> Tensor:
    return operation(torch.full((), number, dtype=by.dtype, device=by.device), by)


def _max(source: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    return source.amax(dim, keepdim), source.argmax(dim, keepdim)


def _min(source: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    return source.amin(dim, keepdim), source.argmin(dim, keepdim)


_FROM_PYTORCH: dict[Any, Callable] = get_decompositions(
    [
        *(aten._softmax, aten._log_softmax, aten.logsumexp, aten.linalg_vector_norm, aten.norm, aten.dist),
        *(aten.mv, aten.addmv, aten.addmm, aten.baddbmm, aten.embedding),
        *(aten.celu, aten.logit, aten.log_sigmoid_forward, aten.glu, aten.logaddexp2, aten.special_entr),
        *(aten.mse_loss, aten.smooth_l1_loss, aten.huber_loss, aten.binary_cross_entropy_with_logits),
        *(aten.elu_backward, aten.softplus_backward, aten.log_sigmoid_backward, aten.mish_backward),
        *(aten.glu_backward, aten.logit_backward, aten.special_xlog1py),
        *(aten.native_layer_norm, aten.native_layer_norm_backward),
    ]
)
DECOMPOSITIONS: dict[Any, Callable] = {
    **_FROM_PYTORCH,
    aten.linalg_vector_norm.default: _vector_norm,
    aten.sinc.default: _sinc,
    aten.bucketize.Tensor: _bucketize,
    aten.bitwise_left_shift.Scalar_Tensor: functools.partial(_shifted, aten.bitwise_left_shift.Tensor),
    aten.bitwise_right_shift.Scalar_Tensor: functools.partial(_shifted, aten.bitwise_right_shift.Tensor),
    aten.mm.default: _mm,
    aten.bmm.default: _mm,
    aten.index_select.default: _index_select,
    aten.gather.default: _gather,
    aten.take.default: _take,
    aten.prod.dim_int: _prod,
    aten.max.dim: _max,
    aten.min.dim: _min,
}


def read_at(source: Tensor, index: Any) -> Tensor | None:
    """Returns source[index] for numbers in tensors beside slices, or None for another index. Python would ask for the
    numbers."""
    index = index if isinstance(index, tuple) else (index,)
    numbers = [x for x in index if isinstance(x, Tensor)]
    if len(numbers) == len(index) or any(x.dim() or x.dtype not in (torch.int32, torch.int64) for x in numbers):
        return None
    if not numbers or any(isinstance(x, (list, bool)) for x in index):
        return None
    missing = source.dim() - sum(x is not None and x is not Ellipsis for x in index)
    every: list[Any] = []
    for x in index:
        every += [slice(None)] * missing if x is Ellipsis else [x]
    view = source[tuple(slice(None) if isinstance(x, Tensor) else x for x in every)]
    left = [x for x in every if not isinstance(x, int)]  # which are dimensions of the view
    places = [d for d, x in enumerate(left) if isinstance(x, Tensor)]
    return mod_index(view.movedim(places, [*range(len(places))]), numbers)


def without_writes(module: GraphModule) -> GraphModule:
    """Lets the operations of a traced graph that write into their first argument make another tensor: what reads that
    argument later reads their result in such a graph."""
    for node in module.graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        packet = node.target.overloadpacket.__name__
        if packet.endswith("_") and not packet.startswith("_"):
            node.target = getattr(getattr(aten, packet[:-1]), node.target._overloadname)
    module.recompile()
    return module
