"""The kernel of a group of pointwise operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.fx import Graph, GraphModule

__all__ = ["build"]


def build(graph: Graph, fakes: Sequence[torch.Tensor]) -> Callable[..., tuple]:
    """A function of tensors like `fakes` that returns the tuple of what the graph computes, one operation at a time."""
    module = GraphModule(torch.nn.Module(), graph)

    def run(*tensors):
        return module.forward(*tensors)

    return run
