"""Kernels generated from graphs of pointwise operations and reductions.

run = build(graph, examples)      # a torch.fx.Graph of aten's operations
y, z = run(*tensors)
"""

from .building import Generated, build
from .numbers import Unsupported
from .storing import repeats_of
from .support import OPERATIONS, REDUCTIONS, is_elementwise, supports, tables

__all__ = [
    "OPERATIONS",
    "REDUCTIONS",
    "Generated",
    "Unsupported",
    "build",
    "is_elementwise",
    "repeats_of",
    "supports",
    "tables",
]
