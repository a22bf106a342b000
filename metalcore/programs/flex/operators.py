"""PyTorch's operators in graphs: programs call the kernels in their place."""

from __future__ import annotations

from torch import Tensor
from torch._higher_order_ops.flex_attention import flex_attention, flex_attention_backward
from torch.fx import GraphModule

from .running import flex_backward, flex_forward

__all__ = ["use_kernels"]


def use_kernels(module: GraphModule) -> None:
    """Replaces PyTorch's operators in a graph that AOTAutograd has traced."""
    for node in module.graph.nodes:
        if node.target is flex_attention:
            node.target = flex_forward
        elif node.target is flex_attention_backward:
            node.target = flex_backward
            of_captures = node.meta["val"][3]
            node.kwargs = {**node.kwargs, "wanted": tuple(isinstance(value, Tensor) for value in of_captures)}
    module.recompile()
