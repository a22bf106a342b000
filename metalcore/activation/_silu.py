"""x * sigmoid(x)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .._core.registry import Op, Override, register
from .._core.routing import accelerated
from .._core.samples import elementwise, hidden_states
from ._elementwise import activation

__all__ = ["silu"]


def silu(x: torch.Tensor) -> torch.Tensor:
    """Computes x * sigmoid(x), as torch.nn.functional.silu.

    Args:
        x: float32, float16 or bfloat16, any shape and strides. It is computed in float32. Other input goes to PyTorch's
            op.

    Returns:
        A tensor of x's shape and dtype, with gradients of any order.

    Example:
        >>> metalcore.silu(torch.zeros(3, device="mps")).tolist()
        [0.0, 0.0, 0.0]
    """
    return _silu(x) if accelerated(x) else F.silu(x)


def _derivatives(x):
    s = torch.sigmoid(x)
    return s * (1 + x * (1 - s)), s * (1 - s) * (2 + x * (1 - 2 * s))


_silu = activation("silu", F.silu, _derivatives)


register(
    Op(
        "silu",
        silu,
        namesake="torch.nn.functional.silu",
        operators=("silu", "silu_backward"),
        override=(Override("silu"), Override("silu_"), Override("silu_backward")),
        samples=elementwise,
        production=hidden_states(),
    )
)
