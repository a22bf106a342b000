"""Weights that stay packed: in GGML's types, as GGUF files have them, in bitsandbytes' of 4 and 8 bits, and in
groups with offsets, as GPTQ, AWQ and MLX have them; and floating-point numbers of 8 and 4 bits with scales."""

from ._affine import affine_embedding, affine_linear, dequantize_affine
from ._affine_experts import affine_linear_experts
from ._eight_bits import dequantize_8bit, quantize_8bit
from ._four_bits import FourBits, dequantize_4bit, linear_4bit, quantize_4bit
from ._linear import quantized_linear, quantized_linear_experts
from ._model import quantize_model
from ._pack import quantize
from ._plan import Report
from ._rows import dequantize, quantized_embedding
from ._scaled import dequantize_scaled, scaled_embedding, scaled_linear
from ._scaled_experts import scaled_linear_experts
from ._scaled_mm import scaled_mm
from ._scaled_quantize import quantize_scaled
from ._scaled_weight import ScaledWeight
from ._types import Type, type_of

__all__ = [
    "FourBits",
    "Report",
    "ScaledWeight",
    "Type",
    "affine_embedding",
    "affine_linear",
    "affine_linear_experts",
    "dequantize",
    "dequantize_4bit",
    "dequantize_8bit",
    "dequantize_affine",
    "dequantize_scaled",
    "linear_4bit",
    "quantize",
    "quantize_4bit",
    "quantize_8bit",
    "quantize_model",
    "quantize_scaled",
    "quantized_embedding",
    "quantized_linear",
    "quantized_linear_experts",
    "scaled_embedding",
    "scaled_linear",
    "scaled_linear_experts",
    "scaled_mm",
    "type_of",
]
