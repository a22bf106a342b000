"""What a program is made again from: its graph before it was divided among devices and planned."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.utils._pytree import TreeSpec

from .ir import tensors_of
from .options import Options
from .passes.folding import Recipe
from .rewriting import Rewritten

__all__ = ["Source", "program_device"]


class Source(NamedTuple):
    """Attributes:
    module: the fused graph, with flat inputs and results.
    recipe: how its constants were made of parameters, if some were.
    state: the parameters and buffers of the module that was compiled, as its state_dict names them.
    specs: the structure of arguments and of results.
    target: the name of the target that it was compiled for.
    """

    module: GraphModule
    recipe: Recipe | None
    state: dict[str, Tensor]
    options: Options
    fused: tuple[Rewritten, ...]
    specs: tuple[TreeSpec, TreeSpec]
    target: str

    @classmethod
    def of(cls, module: GraphModule, *rest: Any) -> Source:
        """With a copy of the graph, and the same tensors."""
        return cls(GraphModule(module, copy.deepcopy(module.graph)), *rest)


def program_device(module: GraphModule) -> torch.device | None:
    """The device that has kernels, if a graph's values are on one, or else that of its first value."""
    from .._core.routing import DEVICES

    devices = [tensor.device for node in module.graph.nodes for tensor in tensors_of(node)]
    return next((device for device in devices if device.type in DEVICES), devices[0] if devices else None)
