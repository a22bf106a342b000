"""Weights that stay packed in GGML's types, as GGUF files have them."""

from ._linear import quantized_linear, quantized_linear_experts
from ._pack import quantize
from ._rows import dequantize, quantized_embedding
from ._types import Type, type_of

__all__ = [
    "Type",
    "dequantize",
    "quantize",
    "quantized_embedding",
    "quantized_linear",
    "quantized_linear_experts",
    "type_of",
]
