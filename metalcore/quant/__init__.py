"""Weights that stay packed: in GGML's types, as GGUF files have them, in bitsandbytes' of 4 and 8 bits, and in
groups with offsets, as GPTQ, AWQ and MLX have them."""

from ._affine import affine_embedding, affine_linear, dequantize_affine
from ._four_bits import (
    FourBits,
    dequantize_4bit,
    dequantize_8bit,
    linear_4bit,
    quantize_4bit,
    quantize_8bit,
)
from ._linear import quantized_linear, quantized_linear_experts
from ._model import quantize_model
from ._pack import quantize
from ._plan import Report
from ._rows import dequantize, quantized_embedding
from ._types import Type, type_of

__all__ = [
    "FourBits",
    "Report",
    "Type",
    "affine_embedding",
    "affine_linear",
    "dequantize",
    "dequantize_4bit",
    "dequantize_8bit",
    "dequantize_affine",
    "linear_4bit",
    "quantize",
    "quantize_4bit",
    "quantize_8bit",
    "quantize_model",
    "quantized_embedding",
    "quantized_linear",
    "quantized_linear_experts",
    "type_of",
]
