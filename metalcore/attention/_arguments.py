"""The arguments of attention: what is wrong with them, which ones the kernels take, and in which form.

ALiBi is Press et al., "Train Short, Test Long", 2022: a bias of scores that grows with the distance of the keys.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .._core.routing import alike, autocast_dtype, converted, on_cuda, require_tensors
from .._core.tensors import broadcast_shapes

__all__ = [
    "MOST_HEAD_SIZE",
    "are_typed",
    "are_usual",
    "as_autocast",
    "as_dimensions",
    "bias_of",
    "causal_bias",
    "check_options",
    "check_slopes",
    "four_dimensions",
    "new_seed",
    "takes",
    "window_of",
    "wrong_dtypes",
]

MOST_HEAD_SIZE = 256
MOST_DECODED = 576, 512  # sizes of keys and values (MLA), where there is no derivative and no dropout
MOST_LENGTH = 2**30 - 1
_AUTOCAST = frozenset(
    device
    for device in ("mps", "cuda")
    if torch._C._dispatch_has_kernel_for_dispatch_key("aten::scaled_dot_product_attention", f"Autocast{device.upper()}")
)


def are_typed(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa):
    """Returns whether arguments that PyTorch's function has are of its types. Where they are not, it raises an
    error."""
    return (
        isinstance(query, Tensor)
        and isinstance(key, Tensor)
        and isinstance(value, Tensor)
        and (attn_mask is None or isinstance(attn_mask, Tensor))
        and isinstance(dropout_p, (int, float))
        and (scale is None or isinstance(scale, (int, float)))
        and type(is_causal) is bool
        and type(enable_gqa) is bool
    )


def are_usual(query, key, value, enable_gqa):
    """Returns whether the kernels take these tensors as they are, as in most calls."""
    if not alike(query, key, value) or autocast_dtype(query) is not None:
        return False
    q, k, v = query.shape, key.shape, value.shape
    return (
        _go_together(q, k, v, enable_gqa)
        and q[3] == k[3]
        and k[2] == v[2]
        and 0 < q[3] <= MOST_HEAD_SIZE
        and 0 < v[3] <= MOST_HEAD_SIZE
        and q[2] <= MOST_LENGTH
        and k[2] <= MOST_LENGTH
    )


def _go_together(query, key, value, enable_gqa):
    """Returns whether these are shapes of one batch and of heads that need no expansion, as in most calls."""
    if not len(query) == len(key) == len(value) == 4 or not query[0] == key[0] == value[0] or key[1] != value[1]:
        return False
    return query[1] == key[1] or enable_gqa and key[1] > 0 and query[1] % key[1] == 0


def four_dimensions(query, key, value, mask, enable_gqa, is_causal):
    """Returns what is wrong with the shapes and dtypes, or None, and the tensors with the dimensions (batch, heads,
    length, size). A mask has 1 in places that are for all."""
    if min(query.dim(), key.dim(), value.dim()) < 2 or query.shape[-1] == 0:
        return "query, key and value must have at least 2 dimensions, and the last one must not be 0", None
    if query.shape[-1] != key.shape[-1] or key.shape[-2] != value.shape[-2]:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in (query, key, value))
        return f"query, key and value of the shapes {shapes} do not go together", None
    if mask is not None and is_causal:
        return "there must be no attn_mask where is_causal is set", None
    wrong = wrong_dtypes(query, key, value, mask)
    if wrong:
        return wrong, None
    if mask is None and _go_together(query.shape, key.shape, value.shape, enable_gqa):
        return None, (query, key, value, None)
    tensors = [tensor[(None,) * (4 - tensor.dim())] if tensor.dim() < 4 else tensor for tensor in (query, key, value)]
    try:
        leading = broadcast_shapes(*(tensor.shape[:-3] for tensor in tensors))
        heads, of_key, of_value = (tensor.shape[-3] for tensor in tensors)
        grouped = of_key == of_value and (heads % of_key == 0 if of_key else heads == 0)
        if not grouped or not (enable_gqa or of_key in (1, heads)):
            if enable_gqa:
                return f"{heads} heads of query are no multiple of {of_key} of key and {of_value} of value", None
            of_key = of_value = heads = broadcast_shapes((heads,), (of_key,), (of_value,))[0]
        tensors = [
            tensor
            if tensor.shape[:-2] == (*leading, count) and len(leading) == 1
            else tensor.expand(*leading, count, -1, -1).flatten(0, -4)
            for tensor, count in zip(tensors, (heads, of_key, of_value))
        ]
        if mask is not None:
            scores = (*leading, heads, query.shape[-2], key.shape[-2])
            if broadcast_shapes(mask.shape, scores) != scores:
                return f"attn_mask of the shape {tuple(mask.shape)} does not broadcast to {scores}", None
            mask = mask[(None,) * (4 - mask.dim())]
            if mask.dim() > 4 or len(leading) > 1:
                mask = mask.expand(*leading, -1, -1, -1).flatten(0, -4)
    except RuntimeError as error:
        return str(error), None
    return None, (*tensors, mask)


def wrong_dtypes(query, key, value, mask):
    """Returns what is wrong with the dtypes, or None. PyTorch's rules are the same."""
    if not query.dtype == key.dtype == value.dtype:
        return f"query, key and value must have one dtype, not {query.dtype}, {key.dtype} and {value.dtype}"
    if mask is not None and mask.dtype not in (torch.bool, query.dtype, torch.float32):
        return f"attn_mask must be bool, float32 or of query's dtype, not {mask.dtype}"
    return None


def as_dimensions(x, query, key, value):
    """Returns the result of tensors of four dimensions, with the leading dimensions of those that the user gave."""
    if query.dim() == 4:
        return x
    leading = broadcast_shapes(*(tensor.shape[:-3] for tensor in (query, key, value)))
    heads = x.shape[1:2] if max(query.dim(), key.dim(), value.dim()) > 2 else ()
    return x.reshape(*leading, *heads, *x.shape[2:])


def causal_bias(attn_mask, is_causal, lower_right):
    """Returns (attn_mask, is_causal, lower_right) for a mask of torch.nn.attention.bias, whose tensors stand for
    masks; others as they are."""
    from torch.nn.attention.bias import CausalBias, CausalVariant

    if not isinstance(attn_mask, CausalBias):
        return attn_mask, is_causal, lower_right
    if is_causal:
        raise ValueError("metalcore.scaled_dot_product_attention: a causal bias and is_causal=True cannot be combined")
    return None, True, attn_mask.variant == CausalVariant.LOWER_RIGHT


def as_autocast(*tensors):
    """Converts the tensors as autocast does: with autocast on, PyTorch computes this op in autocast's dtype."""
    device = "cuda" if on_cuda(tensors[0]) else "mps"
    if device not in _AUTOCAST or not torch.is_autocast_enabled(device):
        return tensors
    return converted(torch.get_autocast_dtype(device), tensors)


def window_of(op, window):
    if window == (-1, -1):
        return window
    if not (isinstance(window, (tuple, list)) and len(window) == 2 and all(type(n) is int and n >= -1 for n in window)):
        raise ValueError(f"{op}: window must be two integers of -1 and more, not {window!r}")
    return tuple(min(n, MOST_LENGTH) for n in window)


def check_options(op, q, dropout_p, softcap, sinks):
    if not 0 <= dropout_p <= 1:
        raise ValueError(f"{op}: dropout_p must be in [0, 1], not {dropout_p}")
    if not isinstance(softcap, (int, float)) or not 0 <= softcap < math.inf:
        raise ValueError(f"{op}: softcap must be a finite number that is not negative, not {softcap!r}")
    if sinks is None:
        return
    require_tensors(op, sinks=sinks)
    if sinks.shape != q.shape[1:2]:
        raise ValueError(f"{op}: sinks must have the shape ({q.shape[1]},), not {tuple(sinks.shape)}")
    if sinks.device != q.device:
        raise RuntimeError(f"{op}: sinks must be on query's device, {q.device}, not on {sinks.device}")


def takes(q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0) -> bool:
    """Returns whether there are kernels for accelerated() tensors of these dtypes and sizes."""
    size, value_size = q.shape[-1], v.shape[-1]
    return (
        min(size, value_size) > 0
        and max(q.shape[2], k.shape[2]) <= MOST_LENGTH
        and (max(size, value_size) <= MOST_HEAD_SIZE or _only_decoded(q, k, v, dropout))
    )


def _only_decoded(q, k, v, dropout):
    fits = q.shape[-1] <= MOST_DECODED[0] and v.shape[-1] <= MOST_DECODED[1]
    return fits and dropout == 0 and not (torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)))


def new_seed(device: torch.device) -> Tensor:
    """Returns random numbers for one call's dropout, from the device's generator. They stay on the device, so that a
    CUDA graph draws new ones for each replay."""
    return torch.randint(-(2**31), 2**31 - 1, (2,), dtype=torch.int32, device=device)


def check_slopes(op: str, slopes: Tensor, batch: int, heads: int, on: Tensor) -> Tensor:
    """Returns the slopes as (batch or 1, heads), in the dtype that scores have."""
    require_tensors(op, alibi_slopes=slopes)
    if tuple(slopes.shape) not in ((heads,), (batch, heads)):
        raise ValueError(
            f"{op}: alibi_slopes must have the shape ({heads},) or ({batch}, {heads}), not {tuple(slopes.shape)}"
        )
    if not slopes.is_floating_point():
        raise ValueError(f"{op}: alibi_slopes must be floating-point numbers, not {slopes.dtype}")
    if slopes.device != on.device:
        raise RuntimeError(f"{op}: alibi_slopes must be on query's device, {on.device}, not on {slopes.device}")
    return slopes.reshape(-1, heads).to(torch.float64 if on.dtype == torch.float64 else torch.float32)


def bias_of(slopes: Tensor, shift: int | Tensor, queries: int, keys: int) -> Tensor:
    """Returns what is added to scores, as a mask with a number for each distance of a key and a query: (batch or 1,
    heads, 1, queries + keys - 1).

    Args:
        slopes: (batch or 1, heads).
        shift: query i is at the place of key i + shift; a number, or one for each batch item.
        queries, keys: the largest numbers of them.
    """
    distance = torch.arange(1 - max(queries, 1), keys, device=slopes.device)
    distance = distance - (shift.unsqueeze(-1) if isinstance(shift, Tensor) else shift)
    return -(slopes.unsqueeze(-1) * distance.abs().unsqueeze(-2)).unsqueeze(2)
