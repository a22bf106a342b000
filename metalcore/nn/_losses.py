"""Modules of losses."""

from __future__ import annotations

import torch

from ..loss import cross_entropy, fused_linear_cross_entropy

__all__ = ["CrossEntropyLoss", "LinearCrossEntropyLoss"]


class CrossEntropyLoss(torch.nn.CrossEntropyLoss):
    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return cross_entropy(
            input,
            target,
            self.weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
        )


class LinearCrossEntropyLoss(torch.nn.Module):
    """The cross entropy of a linear layer's outputs, which are never in memory as a whole
    (metalcore.fused_linear_cross_entropy). Its parameters are `linear.weight` and `linear.bias`, as those of
    torch.nn.LinearCrossEntropyLoss, which is in PyTorch since 2.13.

    Args:
        in_features: of the inputs (N, in_features).
        num_classes: of the targets (N).
        bias, device, dtype: of the linear layer.
        weight, reduction, ignore_index, label_smoothing: as of CrossEntropyLoss.
        softcap, z_loss, chunk: as of metalcore.fused_linear_cross_entropy.
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        weight: torch.Tensor | None = None,
        reduction: str = "mean",
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        softcap: float | None = None,
        z_loss: float = 0.0,
        chunk: int | None = None,
    ):
        super().__init__()
        self.linear = torch.nn.Linear(in_features, num_classes, bias=bias, device=device, dtype=dtype)
        self.register_buffer("weight", weight)
        self.options = {
            "reduction": reduction,
            "ignore_index": ignore_index,
            "label_smoothing": label_smoothing,
            "softcap": softcap,
            "z_loss": z_loss,
            "chunk": chunk,
        }

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        linear = self.linear
        return fused_linear_cross_entropy(
            input,
            linear.weight,
            target,
            linear.bias,
            class_weight=self.weight,  # pyright: ignore[reportArgumentType]
            **self.options,  # pyright: ignore[reportArgumentType]
        )
