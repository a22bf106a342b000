"""Losses."""

# The registry, and the tables that are made of it, have the order in which ops are imported.
# isort: off
from ._cross_entropy import cross_entropy, selective_log_softmax
from ._cross_entropy_output import CrossEntropyOutput
from ._fused_linear import fused_linear_cross_entropy
from ._divergence import jsd, kl_div
from ._fused_divergence import fused_linear_jsd, fused_linear_kl_div

__all__ = [
    "CrossEntropyOutput",
    "cross_entropy",
    "fused_linear_cross_entropy",
    "fused_linear_jsd",
    "fused_linear_kl_div",
    "jsd",
    "kl_div",
    "selective_log_softmax",
]
