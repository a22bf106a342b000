"""Weights that stay packed in GGML's types, as GGUF files have them."""

from ._linear import quantized_linear, quantized_linear_experts
from ._model import quantize_model
from ._pack import quantize
from ._plan import Report
from ._rows import dequantize, quantized_embedding
from ._types import Type, type_of

__all__ = [
    "Report",
    "Type",
    "dequantize",
    "quantize",
    "quantize_model",
    "quantized_embedding",
    "quantized_linear",
    "quantized_linear_experts",
    "type_of",
]
