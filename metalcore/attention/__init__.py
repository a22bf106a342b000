"""Scaled dot product attention."""

from . import _flex_on_mps  # noqa: F401  (PyTorch's function of this name)
from ._flex import flex_attention
from ._sdpa import scaled_dot_product_attention

__all__ = ["flex_attention", "scaled_dot_product_attention"]
