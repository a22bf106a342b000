"""The order of rows of q and k in llama's layout.

transformers rotates the number i of a head with i + half, llama.cpp's llama rotates neighbours. Rows are whole in
packed weights, so these permute bytes as well as numbers.
"""

from __future__ import annotations

from torch import Tensor

__all__ = ["from_interleaved", "to_interleaved"]


def from_interleaved(rows: Tensor, heads: int) -> Tensor:
    """Returns (rows, *) in llama.cpp's order as transformers has them, contiguous."""
    return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2).contiguous()


def to_interleaved(rows: Tensor, heads: int) -> Tensor:
    """Returns (rows, *) in transformers' order as llama.cpp has them, contiguous."""
    return rows.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2).contiguous()
