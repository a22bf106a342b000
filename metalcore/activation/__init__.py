"""Activations: elementwise ones, and softmaxes."""

# The registry, and the tables that are made of it, have the order in which ops are imported.
# isort: off
from ._elementwise import relu, silu, gelu, relu2, quick_gelu
from ._gated import geglu, gelu_and_mul, silu_and_mul, swiglu
from ._biased import bias_gelu, bias_silu
from ._softmax import log_softmax, softmax

__all__ = [
    "bias_gelu",
    "bias_silu",
    "geglu",
    "gelu",
    "gelu_and_mul",
    "log_softmax",
    "quick_gelu",
    "relu",
    "relu2",
    "silu",
    "silu_and_mul",
    "softmax",
    "swiglu",
]
