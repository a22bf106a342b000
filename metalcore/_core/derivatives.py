"""Derivatives of backward operators, from formulas in PyTorch's ops."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

__all__ = ["derive"]


def derive(
    function: Callable[..., Sequence[Tensor]], saved: Sequence[Tensor | None], cotangents: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """The gradients of a differentiable function's results, weighted by the cotangents, with respect to the tensors
    that autograd has saved. They have gradients themselves if autograd asks for them. Where a saved tensor needs none,
    there is None."""
    with torch.enable_grad():
        inputs = [None if tensor is None else tensor.view_as(tensor) for tensor in saved]
        outputs = function(*inputs)
    pairs = [(y, g) for y, g in zip(outputs, cotangents) if g is not None and y.requires_grad]
    wanted = [tensor for tensor in inputs if tensor is not None and tensor.requires_grad]
    if not pairs or not wanted:
        return [None] * len(inputs)
    found = iter(
        torch.autograd.grad(
            [y for y, _ in pairs],
            wanted,
            [g for _, g in pairs],
            create_graph=torch.is_grad_enabled(),
            allow_unused=True,
        )
    )
    return [next(found) if tensor is not None and tensor.requires_grad else None for tensor in inputs]
