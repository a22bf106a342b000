"""What cross entropy returns besides the loss, and losses that are scaled by row."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ._cross_entropy_operators import cap

__all__ = ["CrossEntropyOutput", "Wanted", "log_sum", "output", "target_probability", "target_weight"]


class CrossEntropyOutput(NamedTuple):
    """The results of `cross_entropy` and `fused_linear_cross_entropy` that return more than the loss. What was not
    asked for is None.

    Attributes:
        loss: with the z_loss in it.
        z_loss: that part of the loss alone, reduced as the loss is. It has no gradient of its own.
        token_accuracy: float32: the share of the targets that count whose class has the largest logit; for the
            reduction "none" 1 or 0 for each target, and 0 for an ignored one.
        predicted_tokens: int64, of the target's shape: the class with the largest logit, and -1 for ignored targets.

    Example:
        >>> logits, target = torch.zeros(2, 4, device="mps"), torch.tensor([0, 3], device="mps")
        >>> output = metalcore.cross_entropy(logits, target, return_token_accuracy=True)
        >>> output.token_accuracy.item(), output.z_loss
        (0.5, None)
    """

    loss: Tensor
    z_loss: Tensor | None = None
    token_accuracy: Tensor | None = None
    predicted_tokens: Tensor | None = None


class Wanted(NamedTuple):
    """Which of them are wanted."""

    z_loss: bool
    token_accuracy: bool
    predicted_tokens: bool

    @property
    def predictions(self):
        return self.token_accuracy or self.predicted_tokens


def target_weight(
    target: Tensor, weight: Tensor | None, ignore_index: int, mean: bool, token_weight: Tensor | None = None
) -> Tensor:
    """Returns what losses are divided by: the sum of the targets' weights, or 1; one float32 number on the device."""
    if not mean:
        return torch.ones(1, dtype=torch.float32, device=target.device)
    counted = target != ignore_index
    if weight is None and token_weight is None:
        return counted.sum(dtype=torch.float32)[None]
    weights = counted.float()
    if weight is not None:
        weights = weights * weight.float()[target.where(counted & (target >= 0) & (target < len(weight)), 0)]
    if token_weight is not None:
        weights = (weights * token_weight.float()).where(counted, 0.0)
    return weights.sum()[None]


def log_sum(saved: Tensor) -> Tensor:
    """Returns the logarithms of rows' sums of exponentials, from what the operator cross_entropy saves."""
    return saved[..., 0] + saved[..., 1].log()


def target_probability(
    logits: Tensor, target: Tensor, ignore_index: int, softcap: float, saved: Tensor | None = None
) -> Tensor:
    """Returns the probabilities of the targets' classes, which are the last dimension of the logits; 0 for ignored
    targets.

    saved: what the operator cross_entropy saves of the rows.
    """
    counted = target != ignore_index
    valid = counted & (target >= 0) & (target < logits.shape[-1])
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    chosen = cap(logits.gather(-1, target.where(valid, 0)[..., None])[..., 0].to(wide), softcap)
    if saved is None:
        probability = (chosen - cap(logits.to(wide), softcap).logsumexp(-1)).exp()
    else:
        probability = (chosen - saved[..., 0]).exp() / saved[..., 1]
    return probability.where(counted, 0.0)


def output(
    loss: Tensor,
    wanted: Wanted,
    target: Tensor,
    ignore_index: int,
    reduction: str,
    total: Tensor,
    squares: Tensor | None,
    predicted: Tensor | None,
) -> CrossEntropyOutput:
    """Returns the results, from rows.

    total: what a reduced loss was divided by.
    squares: the part of z_loss in the rows' losses, which is not yet 0 in ignored rows.
    predicted: the class with the largest logit of each row.
    """
    z_loss = accuracy = tokens = None
    counted = target != ignore_index
    if wanted.z_loss and squares is not None:
        z_loss = squares.where(counted, 0.0)
        z_loss = (z_loss if reduction == "none" else z_loss.sum() / total.squeeze()).to(loss.dtype)
    if wanted.predictions and predicted is not None:
        if wanted.predicted_tokens:
            tokens = predicted.where(counted, -1)
        if wanted.token_accuracy:
            accuracy = ((predicted == target) & counted).float()
            accuracy = accuracy if reduction == "none" else accuracy.sum() / counted.sum()
    return CrossEntropyOutput(loss, z_loss, accuracy, tokens)
