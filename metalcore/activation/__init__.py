"""Activations: elementwise ones, and softmaxes."""

# The registry, and the tables that are made of it, have the order in which ops are imported.
# isort: off
from ._relu import relu
from ._silu import silu
from ._gelu import gelu
from ._softmax import log_softmax, softmax

__all__ = ["gelu", "log_softmax", "relu", "silu", "softmax"]
