"""metalcore.flex_attention: PyTorch's function of this name. metalcore.programs makes its kernels, which have the
caller's functions in them; this package is below it, and is told where they are."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch._higher_order_ops.flex_attention import flex_attention as flex_operator
from torch._higher_order_ops.flex_attention import flex_attention_backward as flex_backward_operator

from .._core.registry import Op, Sample, register
from .._core.routing import DEVICES, autocast_operands, device_type, require_tensors

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import AuxRequest, BlockMask

__all__ = ["compute_with", "flex_attention"]

_AUTOCAST = DispatchKey.AutocastMPS  # pyright: ignore[reportAttributeAccessIssue]

_load: Callable[[], Callable]


def compute_with(load: Callable[[], Callable]) -> None:
    """Sets what returns the function that computes a call on a GPU."""
    global _load
    _load = load


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    return_aux: AuxRequest | None = None,
) -> Any:
    """Computes attention with functions of scores and places, as torch.nn.attention.flex_attention.flex_attention does.

    The functions become a part of the kernels: tensors that they capture are read there, and numbers that change make
    no new kernel. Blocks that the mask hides are not visited, forward or backward. Results are the same bits on every
    run. (Dong et al., "Flex Attention: A Programming Model for Generating Optimized Attention Kernels", 2024.)

    Args:
        query: (batch, heads, L, E) in float32, float16 or bfloat16.
        key, value: (batch or 1, heads, S, E) and (batch or 1, heads, S, Ev) of the same dtype.
        score_mod: a function of a score and the numbers of its batch item, head, query and key, all of them tensors
            without dimensions, that returns the score to use. It may not branch on tensors.
        block_mask: the keys that queries see, from create_block_mask, with blocks of any size; or None.
        scale: the factor of scores; 1 / sqrt(E) by default.
        enable_gqa: let query have a multiple of the heads of key and value.
        return_lse: return the logarithms of softmax's sums, too.
        kernel_options: ignored; kernels have their own plans.
        return_aux: an AuxRequest for logarithms and largest scores.

    Returns:
        (batch, heads, L, Ev) of query's dtype; 0 where a query sees no key. With return_lse also (batch, heads, L) in
        float32. With return_aux an AuxOutput. The first two have gradients, also for tensors that score_mod captures.

    Raises:
        RuntimeError: a function does what no kernel can, and the message has its line; or it captures a tensor on
            another device.
        ValueError: shapes do not go together, or the mask is for other lengths, batch items or heads.

    Example:
        >>> query, key, value = torch.randn(3, 1, 2, 16, 64, device="mps")
        >>> metalcore.flex_attention(query, key, value, lambda score, b, h, q, k: score - (q - k).abs()).shape
        torch.Size([1, 2, 16, 64])
    """
    require_tensors("metalcore.flex_attention", query=query, key=key, value=value)
    if device_type(query) in DEVICES:
        compute: Any = _load()
        query, key, value = autocast_operands(query, key, value)
    else:
        from torch.nn.attention.flex_attention import flex_attention as compute
    return compute(
        query,
        key,
        value,
        score_mod=score_mod,
        block_mask=block_mask,
        scale=scale,
        enable_gqa=enable_gqa,
        return_lse=return_lse,
        kernel_options=kernel_options,
        return_aux=return_aux,
    )


def _in_autocast(query: Tensor, key: Tensor, value: Tensor, *more: Any) -> Any:
    """Computes PyTorch's operator in the dtype of torch.autocast("mps"), as PyTorch does for `cuda`."""
    query, key, value = autocast_operands(query, key, value)
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(_AUTOCAST)):
        return flex_operator(query, key, value, *more)


if _AUTOCAST not in flex_operator.py_kernels:
    flex_operator.py_impl(_AUTOCAST)(_in_autocast)
    flex_backward_operator.fallthrough(_AUTOCAST)


# The registry ------------------------------------------------------------------------------------------------------


def _sloped(slopes):
    return lambda score, b, h, q, k: score + slopes[h] * (q - k)


def _window(b, h, q, k):
    return (q >= k) & (q - k < 40)


def _in_a_window(query, key, value):
    from torch.nn.attention.flex_attention import create_block_mask

    slopes = torch.exp2(-torch.arange(1, query.shape[1] + 1, device=query.device))
    lengths = query.shape[2], key.shape[2]
    mask = create_block_mask(_window, None, None, *lengths, device=query.device, BLOCK_SIZE=64)
    return query, key, value, _sloped(slopes), mask


def _reference(query, key, value, score_mod=None, block_mask=None):
    """Computes all scores. PyTorch's function has no gradients on CPUs."""
    scores = query @ key.mT / math.sqrt(query.shape[3])
    places = [torch.arange(n, device=query.device) for n in scores.shape]
    b, h, q, k = (place.view(*(-1 if i == d else 1 for i in range(4))) for d, place in enumerate(places))
    if score_mod is not None:
        scores = score_mod(scores, b, h, q, k)
    if block_mask is not None:
        scores = scores.masked_fill(~block_mask.mask_mod(b, h, q, k), -torch.inf)
    return scores.softmax(3) @ value


def _samples():
    tokens = ((1, 2, 70, 64),) * 3
    return (
        Sample("scores as they are", tokens, terms=70, roundings=4),
        Sample("slopes of heads in a window", tokens, arguments=_in_a_window, terms=70, roundings=4),
    )


register(
    Op(
        "flex_attention",
        flex_attention,
        reference=_reference,
        error="Metal refused flex_forward",  # a generated kernel, which no plan asks about
        samples=_samples,
        production=lambda batch_size=1, heads=4, sequence_length=128, head_size=128: Sample(
            "",
            ((batch_size, heads, sequence_length, head_size),) * 3,
            terms=max(sequence_length, head_size),
            roundings=4,
        ),
    )
)
