"""The attention of transformers' models by metalcore.scaled_dot_product_attention and varlen_attn."""

from __future__ import annotations

import functools
import inspect
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ..._core.environment import after_import
from ...attention import scaled_dot_product_attention
from ...attention._varlen import varlen_attention
from .. import _report
from .masks import Mask, mask
from .patches import reads_nothing, run_counted

__all__ = ["attention_forward", "register"]


def register() -> None:
    """Makes the name "metalcore" known to transformers, whose modules are imported by now."""
    models, masks = (import_module(f"transformers.{name}_utils") for name in ("modeling", "masking"))
    models.AttentionInterface.register("metalcore", _counted_forward)
    masks.AttentionMaskInterface.register("metalcore", mask)
    _batch_continuously()


@functools.cache
def _batch_continuously():
    """Lets continuous batching take the name, when somebody imports it. It asks whether attention is flash's, which
    reads sequences of different lengths without a mask, as metalcore's does."""
    for name in ("continuous_api", "cache"):
        module = f"transformers.generation.continuous_batching.{name}"
        after_import(module, functools.partial(_take_for_flash, module))


def _take_for_flash(name):
    module = import_module(name)
    by_transformers: Any = getattr(module, "is_flash_attention_requested", None)
    if by_transformers is None:  # an older release
        return

    @functools.wraps(by_transformers)
    def is_flash_attention_requested(config=None, requested_attention_implementation=None, version=None):
        asked = requested_attention_implementation if config is None else config._attn_implementation
        if asked == "metalcore" and version is None:
            return True
        return by_transformers(config, requested_attention_implementation, version)

    vars(module)["is_flash_attention_requested"] = is_flash_attention_requested


def _counted_forward(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    count = _report.count_of("scaled_dot_product_attention", 'transformers\' attn_implementation="metalcore"')
    result: Any = run_counted(count, lambda: attention_forward(*args, **kwargs), lambda: None)
    return result


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    position_bias: Tensor | None = None,
    indices: Tensor | None = None,
    block_indices: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    cache=None,
    **kwargs,
) -> tuple[Tensor, None]:
    """Returns an attention function of transformers' AttentionInterface.

    Args:
        module: the layer. Its `is_causal` counts where the argument is None.
        query, key, value: (batch, heads, length, head size). Key and value may have fewer heads.
        attention_mask: of `masks.mask`, bool (True where a query sees a key) or additive, or None.
        sliding_window: of causal attention without a mask: a query sees so many keys, its own included.
        softcap, s_aux: softcap and sinks of scaled_dot_product_attention.
        sinks: logits of sinks for each query, (batch, heads, length, 1), beside s_aux, which has one for each head.
        position_bias: is added to the scores, (batch or 1, heads, length, length of key).
        indices: the keys that a query sees of those that the mask shows, (batch, length, count).
        cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k: of packed sequences, which a data collator gives.
        cache: the cache of continuous batching, which takes the new keys and values, and gives those of all tokens
            that packed sequences read.

    Returns:
        (batch, length, heads, head size), and None.

    Raises:
        ValueError: block_indices, the keys that a query sees by blocks; or a cache of a release of transformers before
            5.23.
    """
    if cache is not None:
        key, value, cu_seq_lens_k, max_length_k = _through_pages(
            cache, module, key, value, {"cu_seq_lens_k": cu_seq_lens_k, "max_length_k": max_length_k, **kwargs}
        )
    if block_indices is not None:
        raise ValueError('attn_implementation="metalcore" takes no block_indices; use "sdpa" or "eager" for this model')
    causal = module.is_causal if is_causal is None and hasattr(module, "is_causal") else is_causal is not False
    options = {"dropout_p": dropout, "scale": scaling, "softcap": softcap or 0.0, "sinks": s_aux}
    left = -1 if sliding_window is None else sliding_window - 1
    queries = query.shape[2]
    plain = position_bias is None and indices is None and sinks is None
    if cu_seq_lens_q is not None and max_length_q is not None and plain:
        window = (left, 0 if causal else left)
        ends = (cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
        return _packed(query, key, value, ends, window, options), None
    if isinstance(attention_mask, Mask):
        band, shift, padding = attention_mask.band, attention_mask.shift, attention_mask.padding
        window = (band.left, band.right)
        if band.sequences is not None:
            if plain and padding is None and not reads_nothing():  # where they begin is read on the host
                ends = attention_mask.packed * 2
                return _packed(query, key, value, (ends[0], ends[2], ends[1], ends[3]), window, options), None
            attention_mask, window, shift = attention_mask.written(), (-1, -1), 0
        else:
            attention_mask = None if padding is None else padding[:, None, None, :]
    else:
        shift = 0
        # A mask that is written out contains the band. A single query sees what is there.
        window = (left, 0) if attention_mask is None and causal and queries > 1 else (-1, -1)
    if indices is not None:
        seen = torch.zeros(*indices.shape[:2], key.shape[2], dtype=torch.bool, device=key.device)
        seen = seen.scatter(-1, indices.long(), True).unsqueeze(1)
        attention_mask = seen if attention_mask is None else _with_bias(seen, attention_mask)
    if window[1] == 0 and key.shape[2] > shift + queries:  # the rest of a static cache, which no query sees
        end = shift + queries
        key, value = key[:, :, :end], value[:, :, :end]
        position_bias = None if position_bias is None else position_bias[..., :end]
        attention_mask = None if attention_mask is None else attention_mask[..., :end]
    result: Any = scaled_dot_product_attention(
        query,
        key,
        value,
        _with_bias(attention_mask, position_bias),
        enable_gqa=query.shape[1] != key.shape[1],
        window=window,
        lower_right=shift != 0,
        return_lse=sinks is not None,
        **options,
    )
    if sinks is not None:  # they divide the weights by exp(lse) + exp(sink) instead of exp(lse)
        out, lse = result
        result = out * torch.sigmoid(lse.unsqueeze(-1) - sinks.float()).to(out.dtype)
    return result.transpose(1, 2).contiguous(), None


def _through_pages(cache, module, key, value, read):
    """Puts new keys and values into the cache of continuous batching. Returns those that all sequences read, where
    they begin, and the length of the longest one."""
    if "kwargs" not in inspect.signature(cache.update).parameters:
        raise ValueError('attn_implementation="metalcore" batches continuously with transformers 5.23 and newer')
    key, value = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=read)
    return key, value, read["cu_seq_lens_k"], read["max_length_k"]


def _with_bias(mask, bias):
    if bias is None or mask is None:
        return mask if bias is None else bias
    if mask.dtype == bias.dtype == torch.bool:
        return mask & bias
    return bias.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else bias + mask


def _packed(query, key, value, ends, window, options):
    """Computes attention of sequences that follow each other in all rows of the batch."""
    batch, _, length, _ = query.shape
    flat = [tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value)]
    result: Any = varlen_attention(*flat, *ends, window=window, **options)
    return result.unflatten(0, (batch, length))
