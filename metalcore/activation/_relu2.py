"""The square of relu."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .._core.registry import Op, register
from .._core.routing import accelerated
from .._core.samples import elementwise
from ._elementwise import activation

__all__ = ["relu2"]


def relu2(x: torch.Tensor) -> torch.Tensor:
    """Computes max(x, 0) squared. NaN stays NaN. The activation is Primer's (So et al., 2021).

    Args:
        x: float32, float16 or bfloat16, any shape and strides. It is computed in float32. Other input goes to PyTorch's
            ops.

    Returns:
        A tensor of x's shape and dtype, with gradients of any order.

    Example:
        >>> metalcore.relu2(torch.tensor([-1.0, 2.0], device="mps")).tolist()
        [0.0, 4.0]
    """
    return _relu2(x) if accelerated(x) else _composite(x)


def _composite(x):
    return F.relu(x).square()


def _derivatives(x):
    """Returns the first and the second derivative."""
    y = F.relu(x)
    return 2 * y, 2 * (y > 0).to(x.dtype)


_relu2 = activation("relu2", _composite, _derivatives)


register(Op("relu2", relu2, reference=_composite, operators=("relu2", "relu2_backward"), samples=elementwise))
