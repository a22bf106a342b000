"""The patterns, in the order in which they are applied. The name of each is its switch."""

from __future__ import annotations

from collections.abc import Sequence

from ..rewriting import Pattern
from .attention import Attention, WrittenAttention
from .conv import Conv, ConvBatchNorm
from .kernels import CrossEntropy, Kernels
from .linear import Gated, GatedProducts, JoinedProducts, Linear, ProductsWithResidual
from .norms import AddNorm, LayerNorm, RmsNorm
from .rope import Rope

__all__ = ["PATTERNS", "choose"]

PATTERNS: tuple[Pattern, ...] = (
    ConvBatchNorm(),
    LayerNorm(),  # before RmsNorm, which it contains
    RmsNorm(),
    GatedProducts(),  # before AddNorm and Gated, which take sums and gates apart from products
    ProductsWithResidual(),
    JoinedProducts(),  # after the two, which take more
    AddNorm(),
    Rope(),
    WrittenAttention(),
    Attention(),
    Gated(),
    CrossEntropy(),
    Conv(),  # after ConvBatchNorm and AddNorm, which also takes sums
    Linear(),  # after AddNorm
    Kernels(),
)


def choose(names: Sequence[str] | None) -> tuple[Pattern, ...]:
    """Returns the patterns of these names; all by default.

    Raises:
        ValueError: there is no pattern of a name.
    """
    if names is None:
        return PATTERNS
    return tuple(pattern for pattern in PATTERNS if pattern.name in names)
