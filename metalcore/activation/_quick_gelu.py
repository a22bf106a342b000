"""The approximation of gelu by a sigmoid."""

from __future__ import annotations

import torch

from .._core.registry import Op, register
from .._core.routing import accelerated
from .._core.samples import elementwise
from ._elementwise import activation

__all__ = ["quick_gelu"]


def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    """Computes x * sigmoid(1.702 x), the approximation of gelu that CLIP uses (Hendrycks and Gimpel, 2016).

    Args:
        x: float32, float16 or bfloat16, any shape and strides. It is computed in float32. Other input goes to PyTorch's
            ops.

    Returns:
        A tensor of x's shape and dtype, with gradients of any order.

    Example:
        >>> metalcore.quick_gelu(torch.zeros(3, device="mps")).tolist()
        [0.0, 0.0, 0.0]
    """
    return _quick_gelu(x) if accelerated(x) else _composite(x)


def _composite(x):
    return x * torch.sigmoid(1.702 * x)


def _derivatives(x):
    """Returns the first and the second derivative."""
    s = torch.sigmoid(1.702 * x)
    slope = 1.702 * s * (1 - s)
    return s + x * slope, 2 * slope + 1.702 * (x * slope) * (1 - 2 * s)


_quick_gelu = activation("quick_gelu", _composite, _derivatives)


register(
    Op(
        "quick_gelu",
        quick_gelu,
        reference=_composite,
        operators=("quick_gelu", "quick_gelu_backward"),
        samples=elementwise,
    )
)
