"""Attention of packed sequences, with the arguments of torch.nn.attention.varlen."""

from __future__ import annotations

from torch import Tensor

from .._core.routing import require_tensors
from ..attention._varlen import varlen_attention

__all__ = ["varlen_attn"]


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux=None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes attention of sequences that follow each other in one tensor, as torch.nn.attention.varlen.varlen_attn.

    Args:
        query: (tokens, heads, E), float32, float16 or bfloat16.
        key, value: (tokens of key, heads, E) and (…, Ev).
        cu_seq_q, cu_seq_k: where sequences begin, and where the last one ends: (sequences + 1,), integers. cu_seq_k is
            None where it is the same as cu_seq_q.
        max_q, max_k: the length of the longest sequence, of queries and of keys.
        return_aux: torch.nn.attention.varlen.AuxRequest(lse=True) asks for the logarithms of the sums, too.
        scale: 1 / sqrt(E) by default.
        window_size: (left, right): a query sees keys from `left` before its position to `right` behind it, where the
            last query of a sequence is at its last key. -1 stands for no limit, so that (-1, 0) is causal.
        enable_gqa: query may have a multiple of the heads of key and value.
        seqused_k: how many keys of each sequence are seen, (sequences,), integers.
        block_table: (sequences, most), integers: the pages of each sequence. Key and value are (pages, page_size,
            heads, E) and (…, Ev) then, and seqused_k says how many keys there are.
        num_splits: is accepted. The order of sums does not depend on the batch.

    Returns:
        (tokens, heads, Ev), with gradients of any order, and with `return_aux` also (heads, tokens) in float32.

    Raises:
        TypeError: an argument is no tensor, or max_q or max_k is no integer.
        ValueError: heads differ without enable_gqa, or window_size is wrong; or, where the host sees the numbers,
            offsets descend or lead out of the tokens, or a sequence is longer than max_q or max_k says.
        RuntimeError: shapes, dtypes or devices do not go together.

    Example:
        >>> query, key, value = torch.randn(3, 5, 2, 64, device="mps")
        >>> begins = torch.tensor([0, 2, 5], dtype=torch.int32, device="mps")  # of two sequences
        >>> metalcore.nn.attention.varlen_attn(query, key, value, begins, begins, 3, 3).shape
        torch.Size([5, 2, 64])
    """
    if block_table is not None and seqused_k is None:
        raise ValueError("metalcore.nn.attention.varlen_attn: block_table needs seqused_k")
    require_tensors("metalcore.nn.attention.varlen_attn", query=query, key=key)
    if not enable_gqa and query.dim() == 3 and key.dim() in (3, 4) and query.shape[1] != key.shape[-2]:
        raise ValueError(
            f"query has {query.shape[1]} heads, and key has {key.shape[-2]}: enable_gqa=True lets several heads of "
            "query share one"
        )
    want_lse = return_aux is not None and return_aux.lse
    return varlen_attention(
        query,
        key,
        value,
        cu_seq_q,
        cu_seq_q if cu_seq_k is None else cu_seq_k,
        max_q,
        max_k,
        scale=scale,
        window=window_size,
        seqused_k=seqused_k,
        block_table=block_table,
        return_lse=want_lse,
    )
