"""FlexAttention: kernels of attention that have a caller's functions of scores and places in them."""

from .attention import flex_attention
from .operators import use_kernels

__all__ = ["flex_attention", "use_kernels"]
