"""Modules of losses."""

from __future__ import annotations

from typing import Any

import torch

from ..loss import cross_entropy, fused_linear_cross_entropy

__all__ = ["CrossEntropyLoss", "LinearCrossEntropyLoss"]


class CrossEntropyLoss(torch.nn.CrossEntropyLoss):
    """torch.nn.CrossEntropyLoss, with the further options of `metalcore.cross_entropy`: softcap, z_loss, token_scaling,
    return_z_loss, return_token_accuracy, return_predicted_tokens. With one of the last three it returns a
    `CrossEntropyOutput`.

    Example:
        >>> loss = metalcore.nn.CrossEntropyLoss(z_loss=1e-4)
        >>> loss(torch.zeros(2, 4, device="mps"), torch.tensor([0, 3], device="mps")).shape
        torch.Size([])
    """

    def __init__(
        self,
        weight: torch.Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        *,
        softcap: float | None = None,
        z_loss: float = 0.0,
        token_scaling: bool = False,
        return_z_loss: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
    ):
        super().__init__(weight, size_average, ignore_index, reduce, reduction, label_smoothing)
        self.options = {
            "softcap": softcap,
            "z_loss": z_loss,
            "token_scaling": token_scaling,
            "return_z_loss": return_z_loss,
            "return_token_accuracy": return_token_accuracy,
            "return_predicted_tokens": return_predicted_tokens,
        }

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> Any:  # Tensor | CrossEntropyOutput
        return cross_entropy(
            input,
            target,
            self.weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
            **self.options,  # pyright: ignore[reportArgumentType]
        )


class LinearCrossEntropyLoss(torch.nn.Module):
    """A module that computes the cross entropy of a linear layer's outputs, which are never in memory as a whole

    Args:
        in_features: of the inputs (N, in_features).
        num_classes: of the targets (N).
        bias, device, dtype: of the linear layer.
        weight, reduction, ignore_index, label_smoothing: as of CrossEntropyLoss.
        softcap, z_loss, chunk, token_scaling, accum_dtype: as of metalcore.fused_linear_cross_entropy. A call takes its
            token_weight.
        return_z_loss, return_token_accuracy, return_predicted_tokens: the same.

    Example:
        >>> loss = metalcore.nn.LinearCrossEntropyLoss(8, 4, device="mps")
        >>> loss(torch.randn(2, 8, device="mps"), torch.tensor([0, 3], device="mps")).shape
        torch.Size([])
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
        token_scaling: bool = False,
        accum_dtype: torch.dtype | None = None,
        return_z_loss: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
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
            "token_scaling": token_scaling,
            "accum_dtype": accum_dtype,
            "return_z_loss": return_z_loss,
            "return_token_accuracy": return_token_accuracy,
            "return_predicted_tokens": return_predicted_tokens,
        }

    def forward(
        self, input: torch.Tensor, target: torch.Tensor, token_weight: torch.Tensor | None = None
    ) -> Any:  # Tensor | CrossEntropyOutput
        linear = self.linear
        return fused_linear_cross_entropy(
            input,
            linear.weight,
            target,
            linear.bias,
            token_weight=token_weight,
            class_weight=self.weight,  # pyright: ignore[reportArgumentType]
            **self.options,  # pyright: ignore[reportArgumentType]
        )
