"""What PyTorch's operators flex_attention and flex_attention_backward compute, by kernels that have the functions in
them. PyTorch's composition takes what no kernel does."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops.flex_attention import sdpa_dense, sdpa_dense_backward
from torch.fx import GraphModule

from ..._core.routing import DEVICES, FLOAT_DTYPES, device_type
from ..pointwise.numbers import MEMORY, Unsupported
from . import launches
from .graphs import INDICES, Captured, derivative_of, trace_mod, with_captures

__all__ = ["check_devices", "flex_backward", "flex_forward", "marked", "takes"]


def takes(q: Tensor, k: Tensor, v: Tensor, captures: Sequence) -> bool:
    """Returns whether kernels compute a call."""
    tensors = [x for x in captures if isinstance(x, Tensor)]
    return (
        device_type(q) in DEVICES
        and all(x.dim() == 4 and not x.is_nested for x in (q, k, v))
        and q.dtype in FLOAT_DTYPES
        and q.dtype == k.dtype == v.dtype
        and 0 < max(q.shape[3], v.shape[3]) <= launches.MOST_SIZE
        and all(x.device == q.device for x in (k, v))
        and all(x.dtype in MEMORY and (x.device == q.device or x.is_cpu and not x.dim()) for x in tensors)
    )


def check_devices(q: Tensor, captures: Sequence) -> None:
    """Refuses captured tensors on another device. PyTorch's message begins like this one."""
    for x in captures:
        if isinstance(x, Tensor) and x.device != q.device and not (x.is_cpu and not x.dim()):
            raise RuntimeError(
                f"metalcore.flex_attention: Buffers cannot be created for a captured tensor of shape {[*x.shape]} on "
                f"{x.device}; query is on {q.device}"
            )


_traced: weakref.WeakKeyDictionary[GraphModule, dict] = weakref.WeakKeyDictionary()


def _captured(function: Callable, kind: str, q: Tensor, captures: Sequence) -> Captured:
    """Returns a function with what it captures. A graph is traced once."""
    captures = [x.to(q.device) if isinstance(x, Tensor) and x.device != q.device else x for x in captures]
    dtype = q.dtype if kind == "score_mod" else None
    if not isinstance(function, GraphModule):
        return trace_mod(function, kind, dtype, q.device, captures)
    if ready := with_captures(function, captures):
        return ready
    known = _traced.setdefault(function, {})
    key = dtype, q.device, *((x.shape, x.dtype) if isinstance(x, Tensor) else x for x in captures)
    if key not in known:
        known[key] = trace_mod(function, kind, dtype, q.device, captures)
    own = known[key].captures[sum(isinstance(x, Tensor) for x in captures) :]
    return Captured(known[key].graph, (*(x for x in captures if isinstance(x, Tensor)), *own))


def _call(q, k, v, scale):
    batch = q.shape[0]
    q, k, v = map(_with_dense_rows, (q, k, v))
    return launches.Call(q, k.expand(batch, -1, -1, -1), v.expand(batch, -1, -1, -1), float(scale))


def _with_dense_rows(tensor):
    if tensor.stride(3) == 1 or tensor.shape[3] == 1:
        return tensor
    return launches.like(tensor, tensor.shape[3]).copy_(tensor)


def flex_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable,
    block_mask: tuple,
    scale: float,
    kernel_options: dict[str, Any],
    score_captures: tuple = (),
    mask_captures: tuple = (),
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the results, and the logarithms of softmax's sums and the largest scores to base 2, as PyTorch's operator
    does.

    Raises:
        RuntimeError: a function captures a tensor on another device.
    """
    if device_type(query) in DEVICES:
        check_devices(query, (*score_captures, *mask_captures))
    if not takes(query, key, value, (*score_captures, *mask_captures)):
        return sdpa_dense(
            query, key, value, score_mod, block_mask, scale, kernel_options, score_captures, mask_captures
        )
    try:
        score = _captured(score_mod, "score_mod", query, score_captures)
        mask = _captured(block_mask[-1], "mask_mod", query, mask_captures)
        return forward(query, key, value, score, mask, block_mask, scale)
    except Unsupported:
        return sdpa_dense(
            query, key, value, score_mod, block_mask, scale, kernel_options, score_captures, mask_captures
        )


def forward(query, key, value, score: Captured | None, mask: Captured | None, block_mask, scale):
    """The same for functions that are traced."""
    call = _call(query, key, value, scale)
    if query.numel() == 0 or value.numel() == 0:
        out = query.new_zeros(*query.shape[:3], value.shape[3])
        blind = torch.full(query.shape[:3], -torch.inf, dtype=torch.float32, device=query.device)
        return out, blind, blind.clone()
    return launches.forward(call, launches.tables_of(block_mask, False), launches.Functions(score, mask))


def flex_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    grad_out: Tensor | None,
    grad_logsumexp: Tensor | None,
    fw_graph: Callable,
    joint_graph: Callable | None,
    block_mask: tuple,
    scale: float,
    kernel_options: dict[str, Any],
    score_captures: tuple = (),
    mask_captures: tuple = (),
    wanted: Sequence[bool] | None = None,
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor | None, ...]]:
    """Returns the gradients of queries, keys, values and of what score_mod captures.

    Args:
        wanted: which of the captured tensors need a gradient; by default those that say so.
    """
    if wanted is None:
        wanted = [isinstance(x, Tensor) and x.requires_grad for x in score_captures]
    if isinstance(joint_graph, GraphModule):  # AOTAutograd has a tensor also where there is no gradient
        returned: Any = next(node for node in joint_graph.graph.nodes if node.op == "output").args[0]
        wanted = [want and gradient is not None for want, gradient in zip(wanted, returned[INDICES + 1 :])]
    captures = marked(score_captures, wanted)
    try:
        if not takes(query, key, value, (*score_captures, *mask_captures)) or joint_graph is None:
            raise Unsupported("the dtype, the size of heads or the device")
        score = _captured(fw_graph, "score_mod", query, captures)
        mask = _captured(block_mask[-1], "mask_mod", query, mask_captures)
        d_out = torch.zeros_like(out) if grad_out is None else grad_out
        arguments = (mask, block_mask, scale, out, logsumexp, d_out, grad_logsumexp)
        wants = iter(want for x, want in zip(captures, wanted) if isinstance(x, Tensor))
        of_graph = [isinstance(x, Tensor) and next(wants, False) for x in score.captures]  # which may have no numbers
        dq, dk, dv, found = backward(query, key, value, score, *arguments, of_graph)
        gradients = iter(gradient for x, gradient in zip(score.captures, found) if isinstance(x, Tensor))
        return dq, dk, dv, tuple(next(gradients) if isinstance(x, Tensor) else None for x in captures)
    except Unsupported:
        return sdpa_dense_backward(
            *(query, key, value, out, logsumexp, grad_out, grad_logsumexp, fw_graph, joint_graph, block_mask, scale),
            *(kernel_options, captures, mask_captures),  # pyright: ignore[reportArgumentType]
        )


for function in (flex_forward, flex_backward):
    function.pure = True  # pyright: ignore[reportFunctionMemberAccess]  (programs may move other operations across it)


def marked(captures, wanted):
    """Returns captured tensors of which those that need a gradient say so."""
    return tuple(x.detach().requires_grad_(want) if isinstance(x, Tensor) else x for x, want in zip(captures, wanted))


def backward(query, key, value, score, mask, block_mask, scale, out, lse, d_out, d_lse, wanted=()):
    """Returns the gradients of queries, keys and values for functions that are traced, and of what that of scores
    captures.

    Args:
        wanted: which of the captured tensors need a gradient. They say so, too.
    """
    captures = () if score is None else score.captures
    wanted = (*wanted, *(False,) * (len(captures) - len(wanted)))
    if query.numel() == 0 or value.numel() == 0:
        found = tuple(torch.zeros_like(x) if want else None for x, want in zip(captures, wanted))
        return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value), found
    call = _call(query, key, value, scale)
    joint = None if score is None else Captured(derivative_of(score, query.dtype, query.device), captures)
    functions = launches.Functions(score, mask, joint, has_derivative=True)
    d_out, out = _with_dense_rows(d_out), _with_dense_rows(out)
    lse, d_lse = lse.contiguous(), None if d_lse is None else d_lse.contiguous()
    of_queries, of_keys = launches.tables_of(block_mask, False), launches.tables_of(block_mask, True)
    dq, delta, found = launches.dq(call, of_queries, functions, out, lse, d_out, d_lse, wanted)
    dk, dv = launches.dkv(call, of_keys, functions, lse, delta, d_out)
    if key.shape[0] != query.shape[0]:
        dk, dv = dk.sum(0, keepdim=True), dv.sum(0, keepdim=True)
    return dq, dk, dv, found
