"""scaled_dot_product_attention: PyTorch's, and with windows, softcap, sinks and the logarithms of the sums."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .._core.routing import FLOAT_DTYPES, accelerated, on_cuda
from ._composite import Options, attend
from ._operators import attention

__all__ = ["scaled_dot_product_attention"]

MOST_HEAD_SIZE = 256
MOST_DECODED = 576, 512  # sizes of keys and values (MLA), where there is no derivative and no dropout
_MOST_LENGTH = 2**30 - 1

_by_torch = F.scaled_dot_product_attention
_AUTOCAST = frozenset(
    device
    for device in ("mps", "cuda")
    if torch._C._dispatch_has_kernel_for_dispatch_key("aten::scaled_dot_product_attention", f"Autocast{device.upper()}")
)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    window: tuple[int, int] = (-1, -1),
    lower_right: bool = False,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(query keyᵀ scale + attn_mask) value, as torch.nn.functional.scaled_dot_product_attention.

    The kernels keep no scores in memory, in either direction (FlashAttention-2: Dao, 2023), except for the gradient of
    a floating-point attn_mask, which takes some float32 tensors of the scores' size. They sum in float32 and in a fixed
    order, so that the same input gives the same bits. A query that sees no key gives zeros, and zero gradients.

    Args:
        query: (…, heads, L, E), float32, float16 or bfloat16, with any strides. E and Ev are at most 256, or without
            dropout and gradients 576 and 512 (MLA); larger ones, other dtypes, and tensors on other devices than `mps`
            and `cuda` are computed by PyTorch's ops.
        key: (…, heads, S, E). Dimensions before the last two are broadcast.
        value: (…, heads, S, Ev).
        attn_mask: of a shape that broadcasts to (…, heads, L, S): bool (True where a query sees a key), or numbers of
            query's dtype or float32, which are added to the scores; or torch.nn.attention.bias.causal_lower_right()
            and causal_upper_left().
        dropout_p: the probability with which a weight is dropped, by random numbers (Philox) whose seed is drawn from
            the device's generator.
        is_causal: query i sees keys up to i. There must be no attn_mask then.
        scale: 1 / sqrt(E) by default.
        enable_gqa: query may have a multiple of the heads that key and value have.
        window: (left, right): query i sees keys from i - left to i + right. -1 stands for no limit.
        lower_right: is_causal and window count from the last query and the last key: query i is at i + S - L.
        softcap: a score s becomes softcap * tanh(s / softcap) before masks. 0 stands for none.
        sinks: a logit for each head of query, of any floating-point dtype, that takes its part of the softmax, and has
            no value (gpt-oss).
        return_lse: return the logarithms of the softmax's sums, too.

    Returns:
        (…, heads, L, Ev) of query's dtype, whose heads and rows lie in memory as query's do; with return_lse also
        (…, heads, L) in float32, which is -inf where a query sees no key. Both have gradients of any order.

    Raises:
        RuntimeError: shapes, dtypes or devices do not go together.
        ValueError: dropout_p is not in [0, 1], window has no two numbers of -1 and more, softcap is negative, or sinks
            has not one number for each head.
    """
    limits = _window(window)
    extended = limits != (-1, -1) or lower_right or bool(softcap) or sinks is not None or return_lse
    if attn_mask is not None and type(attn_mask) is not Tensor:
        attn_mask, is_causal, lower_right = _causal_bias(attn_mask, is_causal, lower_right)
    inputs = _autocast(query, key, value, attn_mask)
    taken = accelerated(*inputs[:3], sinks) and _same_device(query, attn_mask)
    if not extended and not taken:
        return _by_torch(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    problem, tensors = _four_dimensions(*inputs, enable_gqa, is_causal)
    if problem or query.shape[-1] == 0:
        if not extended:  # the errors and the odd cases are PyTorch's
            return _by_torch(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        raise RuntimeError(f"metalcore.scaled_dot_product_attention: {problem or 'head sizes must not be 0'}")
    q, k, v, mask = tensors
    _check(q, dropout_p, softcap, sinks)
    left, right = limits
    if is_causal:
        right = 0 if right < 0 else min(right, 0)
    dropout = float(dropout_p)
    options = Options(
        max_q=0,
        max_k=0,
        left=left,
        right=right,
        lower_right=lower_right,
        scale=q.shape[-1] ** -0.5 if scale is None else float(scale),
        softcap=float(softcap),
        dropout=dropout,
    )
    seed = new_seed(q.device) if dropout > 0 else None
    if taken and takes(q, k, v, dropout):
        out, lse = attention(q, k, v, mask, sinks, None, None, seed, *options)
    else:
        out, lse = attend(q, k, v, mask, sinks, None, None, seed, options)
    leading = torch.broadcast_shapes(*(tensor.shape[:-3] for tensor in inputs[:3]))
    if len(leading) != 1:
        heads = q.shape[1:2] if query.dim() > 2 else ()
        out, lse = (x.reshape(*leading, *heads, *x.shape[2:]) for x in (out, lse))
    return (out, lse) if return_lse else out


def takes(q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0) -> bool:
    """Whether there are kernels for accelerated() tensors of these dtypes and sizes."""
    size, value_size = q.shape[-1], v.shape[-1]
    return (
        q.dtype == k.dtype == v.dtype
        and max(q.shape[2], k.shape[2]) <= _MOST_LENGTH
        and (max(size, value_size) <= MOST_HEAD_SIZE or _only_decoded(q, k, v, dropout))
    )


def _only_decoded(q, k, v, dropout):
    fits = q.shape[-1] <= MOST_DECODED[0] and 0 < v.shape[-1] <= MOST_DECODED[1]
    return fits and dropout == 0 and not (torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)))


def new_seed(device: torch.device) -> Tensor:
    """Random numbers for one call's dropout, from the device's generator. They stay on the device, so that a CUDA graph
    draws new ones for each replay."""
    return torch.randint(-(2**31), 2**31 - 1, (2,), dtype=torch.int32, device=device)


def _window(window):
    if not (isinstance(window, (tuple, list)) and len(window) == 2 and all(type(n) is int and n >= -1 for n in window)):
        raise ValueError(f"window must be two integers of -1 and more, not {window!r}")
    return tuple(min(n, _MOST_LENGTH) for n in window)


def _check(q, dropout_p, softcap, sinks):
    if not 0 <= dropout_p <= 1:
        raise ValueError(f"dropout_p must be in [0, 1], not {dropout_p}")
    if not softcap >= 0:
        raise ValueError(f"softcap must not be negative, and is {softcap}")
    if sinks is not None and sinks.shape != q.shape[1:2]:
        raise ValueError(f"sinks must have the shape ({q.shape[1]},), not {tuple(sinks.shape)}")


def _causal_bias(attn_mask, is_causal, lower_right):
    """torch.nn.attention.bias has tensors that stand for masks."""
    from torch.nn.attention.bias import CausalBias, CausalVariant

    if not isinstance(attn_mask, CausalBias):
        return attn_mask, is_causal, lower_right
    if is_causal:
        raise ValueError("a causal bias and is_causal=True cannot be combined")
    return None, True, attn_mask.variant == CausalVariant.LOWER_RIGHT


def _autocast(*tensors):
    """PyTorch's rule for this op: with autocast on, it computes in autocast's dtype."""
    query = tensors[0]
    device = "cuda" if on_cuda(query) else "mps"
    if device not in _AUTOCAST or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(t.to(dtype) if t is not None and t.dtype in FLOAT_DTYPES else t for t in tensors)


def _same_device(query, mask):
    return mask is None or mask.device == query.device


def _four_dimensions(query, key, value, mask, enable_gqa, is_causal):
    """What is wrong with the shapes and dtypes, or None, and the tensors with the dimensions (batch, heads, length,
    size). The mask has one batch item or head for all where its strides are zero."""
    if min(query.dim(), key.dim(), value.dim()) < 2:
        return "query, key and value must have at least 2 dimensions", None
    if not query.dtype == key.dtype == value.dtype:
        return f"query, key and value must have one dtype, not {query.dtype}, {key.dtype} and {value.dtype}", None
    if query.shape[-1] != key.shape[-1] or key.shape[-2] != value.shape[-2]:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in (query, key, value))
        return f"query, key and value of the shapes {shapes} do not go together", None
    if mask is not None and is_causal:
        return "there must be no attn_mask where is_causal is set", None
    if mask is not None and mask.dtype not in (torch.bool, query.dtype, torch.float32):
        return f"attn_mask must be bool, float32 or of query's dtype, not {mask.dtype}", None
    tensors = [tensor[(None,) * (4 - tensor.dim())] if tensor.dim() < 4 else tensor for tensor in (query, key, value)]
    try:
        leading = torch.broadcast_shapes(*(tensor.shape[:-3] for tensor in tensors))
        heads, of_key, of_value = (tensor.shape[-3] for tensor in tensors)
        if of_key != of_value or of_key == 0 or heads % of_key or not (enable_gqa or of_key in (1, heads)):
            if enable_gqa:
                return f"{heads} heads of query are no multiple of {of_key} of key and {of_value} of value", None
            of_key = of_value = heads = torch.broadcast_shapes((heads,), (of_key,), (of_value,))[0]
        tensors = [
            tensor.expand(*leading, count, -1, -1).flatten(0, -4)
            for tensor, count in zip(tensors, (heads, of_key, of_value))
        ]
        if mask is not None:
            mask = mask.expand(*leading, heads, query.shape[-2], key.shape[-2]).flatten(0, -4)
    except RuntimeError as error:
        return str(error), None
    return None, (*tensors, mask)
