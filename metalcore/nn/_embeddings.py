"""Modules of tables."""

from __future__ import annotations

import torch

from ..embeddings import embedding, embedding_bag

__all__ = ["Embedding", "EmbeddingBag"]


class Embedding(torch.nn.Embedding):
    """torch.nn.Embedding on `metalcore.embedding`.

    Example:
        >>> table = metalcore.nn.Embedding(3, 2, device="mps")
        >>> table(torch.tensor([2, 0], device="mps")).shape
        torch.Size([2, 2])
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Computes what torch.nn.Embedding's does: (*, embedding_dim) of input's indices (*)."""
        return embedding(
            input,
            self.weight,
            self.padding_idx,
            self.max_norm,
            self.norm_type,
            self.scale_grad_by_freq,
            self.sparse,
        )


class EmbeddingBag(torch.nn.EmbeddingBag):
    """torch.nn.EmbeddingBag on `metalcore.embedding_bag`.

    Example:
        >>> table = metalcore.nn.EmbeddingBag(3, 2, mode="sum", device="mps")
        >>> table(torch.tensor([[0, 1], [2, 2]], device="mps")).shape
        torch.Size([2, 2])
    """

    def forward(
        self,
        input: torch.Tensor,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Computes what torch.nn.EmbeddingBag's does: (bags, embedding_dim) of indices, either (bags, n) or (N,) with
        offsets."""
        return embedding_bag(
            input,
            self.weight,
            offsets,
            self.max_norm,
            self.norm_type,
            self.scale_grad_by_freq,
            self.mode,
            self.sparse,
            per_sample_weights,
            self.include_last_offset,
            self.padding_idx,
        )
