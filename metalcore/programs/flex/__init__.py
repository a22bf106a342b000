"""FlexAttention: kernels of attention that have a caller's functions of scores and places in them."""

from .attention import flex_attention
from .operators import allow_gradients, use_kernels

__all__ = ["allow_gradients", "flex_attention", "use_kernels"]
