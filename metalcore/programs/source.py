"""What a program is made again from: its graph before it was divided among devices and planned."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule
from torch.utils._pytree import TreeSpec

from .ir import tensors_of
from .options import Options
from .passes.folding import Recipe
from .rewriting import Rewritten

__all__ = ["Source", "program_device"]


class Source(NamedTuple):
    """A graph, and what belongs to it.

    Attributes:
        graph: the fused graph, with flat inputs and results.
        owner: what has the tensors of its get_attr nodes.
        recipe: how its constants were made of parameters, if some were.
        state: the parameters and buffers of the module that was compiled, as its state_dict names them; None after it
            was loaded.
        specs: the structure of arguments and of results.
        target: the name of the target that it was compiled for.
    """

    graph: Graph
    owner: torch.nn.Module
    recipe: Recipe | None
    state: dict[str, Tensor] | None
    options: Options
    fused: tuple[Rewritten, ...]
    specs: tuple[TreeSpec, TreeSpec]
    target: str

    @classmethod
    def of(cls, module: GraphModule, *rest: Any) -> Source:
        """Returns a source with a copy of the module's graph and the same tensors, which outlive the module's use."""
        owner, graph = torch.nn.Module(), copy.deepcopy(module.graph)
        for node in graph.nodes:
            if node.op == "get_attr":
                setattr(owner, str(node.target), getattr(module, str(node.target)))
        return cls(graph, owner, *rest)

    def module(self) -> GraphModule:
        """Returns a graph of its own with the same tensors, which may be changed."""
        return GraphModule(self.owner, copy.deepcopy(self.graph))


def program_device(graph: Graph) -> torch.device | None:
    """Returns the device that has kernels, if a graph's values are on one, or else that of its first value."""
    from .._core.routing import DEVICES

    devices = [tensor.device for node in graph.nodes for tensor in tensors_of(node)]
    return next((device for device in devices if device.type in DEVICES), devices[0] if devices else None)
