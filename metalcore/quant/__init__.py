"""Weights that stay packed in GGML's types, as GGUF files have them."""

from ._linear import quantized_linear, quantized_linear_experts
from ._rows import dequantize, quantized_embedding
from ._types import Type, type_of

__all__ = [
    "Type",
    "dequantize",
    "quantized_embedding",
    "quantized_linear",
    "quantized_linear_experts",
    "type_of",
]
