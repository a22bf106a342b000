"""The functions of the package flash_attn (2.x) by metalcore's attention, for code that calls them directly.

    from metalcore.integrations.flash_attn import flash_attn_func, flash_attn_varlen_func

They take float32 too. Arguments that metalcore's attention does not have raise a NotImplementedError.
"""

from __future__ import annotations

from torch import Tensor

from ..attention import scaled_dot_product_attention
from ..attention._varlen import varlen_attention

__all__ = ["flash_attn_func", "flash_attn_varlen_func"]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    s_aux: Tensor | None = None,
):
    """Attention of q, k and v of the shape (batch, length, heads, size).

    Args:
        causal, window_size: the last query is at the last key.
        deterministic: is accepted. Results always are.
        return_attn_probs: also returns the logarithms of the sums (batch, heads, length), and None.
        s_aux: a sink's logit for each head.

    Returns:
        (batch, length, heads, size of v).
    """
    _refuse(alibi_slopes=alibi_slopes)
    found = scaled_dot_product_attention(
        *(tensor.transpose(1, 2) for tensor in (q, k, v)),
        dropout_p=dropout_p,
        scale=softmax_scale,
        enable_gqa=q.shape[2] != k.shape[2],
        window=_window(causal, window_size),
        lower_right=True,
        softcap=softcap,
        sinks=s_aux,
        return_lse=return_attn_probs,
    )
    return (found[0].transpose(1, 2), found[1], None) if return_attn_probs else found.transpose(1, 2)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    s_aux: Tensor | None = None,
):
    """flash_attn_func for sequences that follow each other: q, k and v have the shape (tokens, heads, size).

    Args:
        cu_seqlens_q, cu_seqlens_k: where sequences begin, and where the last one ends.
        max_seqlen_q, max_seqlen_k: the length of the longest sequence.
        return_attn_probs: also returns the logarithms of the sums (heads, tokens), and None.
    """
    _refuse(alibi_slopes=alibi_slopes, block_table=block_table)
    found = varlen_attention(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p=dropout_p,
        scale=softmax_scale,
        window=_window(causal, window_size),
        softcap=softcap,
        sinks=s_aux,
        return_lse=return_attn_probs,
    )
    return (*found, None) if return_attn_probs else found


def _window(causal, window_size):
    left, right = (-1 if limit is None else limit for limit in window_size)
    return left, 0 if causal else right


def _refuse(**arguments):
    for name, value in arguments.items():
        if value is not None:
            raise NotImplementedError(f"metalcore's attention has no {name}")
