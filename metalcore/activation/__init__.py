"""Activations: elementwise ones, and softmaxes."""

# The registry, and the tables that are made of it, have the order in which ops are imported.
# isort: off
from ._relu import relu
from ._silu import silu
from ._gelu import gelu
from ._relu2 import relu2
from ._quick_gelu import quick_gelu
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
