"""Kernels generated from graphs of pointwise operations and reductions.

run = build(graph, examples)      # a torch.fx.Graph of aten's operations
y, z = run(*tensors)
"""

from .building import Generated, build
from .numbers import Unsupported
from .support import OPERATIONS, supports

__all__ = ["OPERATIONS", "Generated", "Unsupported", "build", "supports"]
