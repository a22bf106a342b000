"""The kernel of a group of pointwise operations, as a step of a program."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.fx import Graph, Node

from . import pointwise
from .ir import value

__all__ = ["build", "kernels", "writing_to"]


def build(graph: Graph, fakes: Sequence[Tensor]) -> Callable[..., tuple] | None:
    """Returns a function of tensors like `fakes` that returns the tuple of what the graph computes, or None where the
    generator does not take the graph."""
    try:
        kernel = pointwise.build(graph, fakes)
    except pointwise.Unsupported:
        return None

    def run(*tensors):
        return kernel(*tensors)

    run.kernel = kernel  # pyright: ignore[reportFunctionMemberAccess]
    return run


def writing_to(run: Callable, memory: Sequence[Tensor | None], likes: Sequence[Tensor]) -> Callable[..., tuple]:
    """Returns the same function with its results in given memory. Where that is None, they are new tensors like
    `likes`."""
    kernel = run.kernel  # pyright: ignore[reportFunctionMemberAccess]
    forms = [(tuple(like.shape), like.stride(), like.dtype, like.device) for like in likes]

    def run_into(*tensors):
        made = [
            torch.empty_strided(shape, strides, dtype=dtype, device=device) if given is None else given
            for given, (shape, strides, dtype, device) in zip(memory, forms)
        ]
        kernel.into(made, *tensors)
        return tuple(made)

    run_into.__name__, run_into.pure, run_into.kernel = run.__name__, True, kernel  # pyright: ignore[reportFunctionMemberAccess]
    return run_into


def kernels(node: Node) -> list[str]:
    """Returns the names of the kernels of a step, for arguments like its fake tensors that begin where vectors may."""
    likes = [value(source) for source in node.args]
    metas = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in likes]
    return node.target.kernel.kernels(*metas)  # pyright: ignore[reportFunctionMemberAccess, reportAttributeAccessIssue]
