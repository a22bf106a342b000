"""What metalcore.flex_attention runs: PyTorch's function of this name, compiled by itself."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor
from torch._higher_order_ops.flex_attention import flex_attention as flex_operator
from torch.autograd.function import once_differentiable
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask

from ..._core.routing import device_type
from ..._core.tensors import is_dtensor
from . import running
from .graphs import Captured, trace_mod
from .known import traced_once
from .shards import of_shards

__all__ = ["flex_attention"]

_NAME = "metalcore.flex_attention"


def flex_attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
    """Computes metalcore.flex_attention.

    Args:
        options: all arguments that metalcore/attention/_flex.py has behind these three.
    """
    score_mod, block_mask, aux = options["score_mod"], options["block_mask"], options["return_aux"]
    _check_types(score_mod, block_mask, options["kernel_options"], aux)
    is_traced = torch.compiler.is_compiling()
    if device_type(query) not in running.DEVICES or not is_traced and not running.takes(query, key, value, ()):
        return torch_flex.flex_attention(query, key, value, **options)
    if options["return_lse"] and aux is not None:
        raise ValueError(f"{_NAME}: return_lse and return_aux do not go together")
    if any(map(is_dtensor, (query, key, value))):
        return of_shards(flex_attention, query, key, value, options)
    _check_shapes(query, key, value, block_mask, options["enable_gqa"])
    scale = 1 / math.sqrt(query.shape[3]) if options["scale"] is None else options["scale"]
    if is_traced:
        out, lse, largest = _traced(query, key, value, score_mod, block_mask, scale, aux)
    else:
        out, lse, largest = _run(query, key, value, score_mod, block_mask, scale)
    if aux is not None:
        return out, AuxOutput(
            lse=lse * math.log(2) if aux.lse else None,
            max_scores=largest * math.log(2) if aux.max_scores else None,
        )
    return (out, lse * math.log(2)) if options["return_lse"] else out


def _run(query, key, value, score_mod, block_mask, scale):
    score = None if score_mod is None else _once(score_mod, "score_mod", query.dtype, query.device)
    mask = None
    if block_mask is None:
        tables = _one_block(query.device)
    else:
        tables = block_mask.as_tuple()
        mask = _once(block_mask.mask_mod, "mask_mod", None, query.device)
        if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in mask.captures):
            raise RuntimeError(f"{_NAME}: what mask_mod captures has no gradient; detach() it")
    captures = () if score is None else score.captures
    running.check_devices(query, captures if mask is None else (*captures, *mask.captures))
    if score is not None and any(isinstance(x, Tensor) and x.is_cpu for x in captures):  # numbers that have a gradient
        captures = tuple(x.to(query.device) if isinstance(x, Tensor) else x for x in captures)
        score = Captured(score.graph, captures)
    return _Flex.apply(query, key, value, score, mask, tables, scale, *captures)


_one_blocks: dict[torch.device, tuple] = {}


def _one_block(device):
    """Returns the tuple of a mask that hides nothing. PyTorch makes it by some thirty operations."""
    if device in _one_blocks:
        return _one_blocks[device]
    one = torch.ones(1, device=device)
    tables = torch_flex._create_empty_block_mask(one, one).as_tuple()
    if type(one) is Tensor:  # and no fake one
        _one_blocks[device] = tables
    return tables


def _once(function, kind, dtype, device):
    return traced_once(function, kind, lambda: trace_mod(function, kind, dtype, device), dtype, device)


def _traced(query, key, value, score_mod, block_mask, scale, return_aux):
    """Calls PyTorch's operator, in whose place programs call the kernels. Its function refuses gradients on `mps`."""
    for tensor in (query, key, value):
        for dimension in (-3, -1):
            torch._dynamo.mark_static(tensor, dimension)
    block_mask = torch_flex._create_empty_block_mask(query, key) if block_mask is None else block_mask
    options = {
        **dict.fromkeys(("PRESCALE_QK", "ROWS_GUARANTEED_SAFE", "BLOCKS_ARE_CONTIGUOUS"), False),
        "BACKEND": "AUTO",
        "WRITE_DQ": True,
        "OUTPUT_LOGSUMEXP": True,
        "OUTPUT_MAX": return_aux is not None and return_aux.max_scores,
    }
    score_mod = torch_flex._identity if score_mod is None else score_mod
    return flex_operator(query, key, value, score_mod, block_mask.as_tuple(), scale, options)


def _check_types(score_mod, block_mask, kernel_options, return_aux):
    for name, argument, kind in (
        ("block_mask", block_mask, BlockMask),
        ("kernel_options", kernel_options, dict),
        ("return_aux", return_aux, AuxRequest),
    ):
        if argument is not None and not isinstance(argument, kind):
            raise TypeError(f"{_NAME}: {name} must be a {kind.__name__}, not {type(argument).__name__}")
    if score_mod is not None and not callable(score_mod):
        raise TypeError(f"{_NAME}: score_mod must be a function, not {type(score_mod).__name__}")


def _check_shapes(query, key, value, block_mask, enable_gqa):
    q, k, v = query.shape, key.shape, value.shape
    if not len(q) == len(k) == len(v) == 4:
        raise ValueError(f"{_NAME}: query, key and value must have 4 dimensions, not {len(q)}, {len(k)} and {len(v)}")
    if q[3] != k[3] or k[:3] != v[:3] or k[0] not in (1, q[0]):
        raise ValueError(f"{_NAME}: query, key and value of the shapes {[*q]}, {[*k]} and {[*v]} do not go together")
    if q[1] != k[1] and not (enable_gqa and k[1] and q[1] % k[1] == 0):
        need = "a multiple of those of key" if enable_gqa else "as many as key where enable_gqa is not set"
        raise ValueError(f"{_NAME}: query has {q[1]} heads and key has {k[1]}; it must have {need}")
    if block_mask is None:
        return
    if block_mask.mask_mod is torch_flex._sliced_mask_mod_error:
        raise RuntimeError(f"{_NAME}: block_mask is a slice of another one, and needs a mask_mod of its own")
    if block_mask.kv_num_blocks.device != query.device:
        raise ValueError(f"{_NAME}: block_mask is on {block_mask.kv_num_blocks.device}, and query on {query.device}")
    of_mask = (1, 1, *block_mask.kv_num_blocks.shape[:-1])[-2:]
    if of_mask[0] not in (1, q[0]) or of_mask[1] not in (1, q[1]):
        raise ValueError(
            f"{_NAME}: block_mask is for {of_mask[0]} batch items and {of_mask[1]} heads, not {q[0]} and {q[1]}"
        )
    lengths = tuple(block_mask.shape[-2:])
    whole = all(size == torch_flex._LARGE_SPARSE_BLOCK_SIZE for size in block_mask.BLOCK_SIZE)
    if lengths != (q[2], k[2]) and not whole:
        raise ValueError(
            f"{_NAME}: block_mask is for {lengths[0]} queries and {lengths[1]} keys, not {q[2]} and {k[2]}"
        )


class _Flex(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, score: Captured | None, mask: Captured | None, block_mask, scale, *captures):  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.set_materialize_grads(False)
        out, lse, largest = running.forward(query, key, value, score, mask, block_mask, scale)
        ctx.mark_non_differentiable(largest)
        ctx.functions, ctx.block_mask, ctx.scale = (score, mask), block_mask, scale
        ctx.save_for_backward(query, key, value, out, lse, *(x for x in captures if isinstance(x, Tensor)))
        return out, lse, largest

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out, d_lse, _):  # pyright: ignore[reportIncompatibleMethodOverride]
        query, key, value, out, lse, *_ = ctx.saved_tensors
        (score, mask), block_mask, scale = ctx.functions, ctx.block_mask, ctx.scale
        if block_mask[6] is None:
            raise RuntimeError(f"{_NAME}: block_mask has no q_indices; create it with compute_q_blocks=True")
        wanted = ctx.needs_input_grad[7:]

        def gradients_of(d_out, d_lse):
            d_out = torch.zeros_like(out) if d_out is None else d_out
            arguments = (mask, block_mask, scale, out, lse, d_out, d_lse)
            *gradients, found = running.backward(query, key, value, score, *arguments, wanted)
            return *gradients, None, None, None, None, *found

        return _of_each(gradients_of, d_out, d_lse)


def _of_each(function, *arguments):
    """Returns the results of a function, also for tensors of torch.autograd.grad(is_grads_batched=True), from one call
    for each item of the batch: a generated kernel is no operator, whose batches PyTorch would take apart."""
    batches = [x for x in arguments if x is not None and is_legacy_batchedtensor(x)]
    if not batches:
        return function(*arguments)

    def unwrapped(tensor, level):
        return torch._remove_batch_dim(tensor, level, 1, 0)  # pyright: ignore[reportPrivateImportUsage]

    level = next(n for n in range(1, 64) if not is_legacy_batchedtensor(unwrapped(batches[0], n)))
    items = [
        unwrapped(x, level).unbind() if any(x is one for one in batches) else itertools.repeat(x) for x in arguments
    ]
    results = [
        torch.stack(each) if each[0] is not None else None for each in zip(*(function(*one) for one in zip(*items)))
    ]
    return tuple(None if x is None else torch._add_batch_dim(x, 0, level) for x in results)  # pyright: ignore[reportPrivateImportUsage]
