"""Where gradients of captured tensors come from: the nodes of a derivative's graph that add numbers to elements."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

from ..pointwise.nodes import fake, name_of
from ..pointwise.numbers import Unsupported
from .graphs import INDICES

__all__ = [
    "FIRST",
    "SCATTER",
    "SCORE",
    "B",
    "D",
    "H",
    "K",
    "Q",
    "Scatter",
    "captured_of",
    "dependence",
    "differences_of",
    "scatters_of",
]

SCATTER = torch.ops.flex_lib.zeros_and_scatter.default
B, H, Q, K, SCORE, D = 1, 2, 4, 8, 16, 32  # what a number depends on; D is a query's number less a key's
FIRST = INDICES + 2  # arguments of the derivative's graph before what is captured
_MOST_TOGETHER = 32  # elements of a tensor of indices that a score reads at once
_MOST_DENSE = 4096  # elements of a gradient that each score has as a whole


class Scatter(NamedTuple):
    """Numbers that each score adds to elements.

    Attributes:
        node: has the sum of all scores' tensors as its result.
        value: the numbers' node: one for each element of the dimensions that have no index.
        indices: the nodes of the indices of the first dimensions.
        sizes: of all dimensions.
        at: the coordinates in the indices, and in the first dimensions of the numbers, where indices are tensors.
    """

    node: Node
    value: Node
    indices: tuple[Node, ...]
    sizes: tuple[int, ...]
    at: tuple[int, ...] = ()

    @property
    def free(self) -> tuple[int, ...]:
        """The sizes of dimensions without an index."""
        return self.sizes[len(self.indices) :]

    @property
    def elements(self) -> int:
        return math.prod(self.free)

    def value_at(self, free: Sequence[str]) -> tuple[str, ...]:
        """Returns the coordinates of a number, from those in the dimensions without an index."""
        return _last((*map(str, self.at), *free), self.value)

    def index_at(self, index: Node) -> tuple[int, ...]:
        """Returns the coordinates in a tensor of indices, which broadcasts."""
        own = _last(self.at, index)
        return tuple(0 if size == 1 else c for size, c in zip(fake(index).shape, own, strict=True))


def _last(at, node):
    return at[len(at) - fake(node).dim() :]


def differences_of(joint: GraphModule) -> dict[Node, int]:
    """Returns the nodes of a query's number less a key's, 1, and of a key's less a query's, -1."""
    query, key = [node for node in joint.graph.nodes if node.op == "placeholder"][3:5]
    signs = {(query, key): 1, (key, query): -1}
    nodes = [node for node in joint.graph.nodes if name_of(node) == "sub.Tensor" and not node.kwargs]
    return {node: signs[node.args] for node in nodes if node.args in signs}


def dependence(joint: GraphModule, of_differences: bool = False) -> dict[Node, int]:
    """Returns for each node which numbers of a score it depends on.

    Args:
        of_differences: whether a difference of a query and a key is a number of its own.
    """
    bits: dict[Node, int] = {}
    own = iter((SCORE, B, H, Q, K, SCORE))
    differences = differences_of(joint) if of_differences else {}
    for node in joint.graph.nodes:
        bits[node] = next(own, 0) if node.op == "placeholder" else 0
        for other in node.all_input_nodes:
            bits[node] |= bits[other]
        if node in differences:
            bits[node] = D
    return bits


def captured_of(returned: Any, wanted: Sequence[bool]) -> list[Node | None]:
    """Returns the nodes of the gradients of what is captured."""
    return returned[FIRST - 1 :][: len(wanted)]


def scatters_of(joint: GraphModule, wanted: Sequence[bool]) -> tuple[Scatter, ...]:
    """Returns the scatters that gradients of captured tensors are linear functions of. A gradient, or a term of it,
    that no scatter is part of counts as one without an index.

    Raises:
        Unsupported: a gradient is no such function.
    """
    bits, found = dependence(joint), {}
    has_scatter: dict[Node, bool] = {}
    for node in joint.graph.nodes:
        has_scatter[node] = _is_scatter(node) or any(has_scatter[other] for other in node.all_input_nodes)
    returned = next(node for node in joint.graph.nodes if node.op == "output").args[0]
    waiting = [node for node, want in zip(captured_of(returned, wanted), wanted) if want and node is not None]
    while waiting:
        node = waiting.pop()
        if node in found or not bits[node]:
            continue
        inputs = [other for other in node.all_input_nodes if bits[other]]
        if _is_scatter(node):
            found[node] = _scatter(node)
        elif has_scatter[node] and (len(inputs) == 1 or name_of(node) in ("add.Tensor", "sub.Tensor")):
            waiting.extend(inputs)
        else:
            found[node] = [_checked(Scatter(node, node, (), tuple(fake(node).shape)))]
    return tuple(itertools.chain.from_iterable(found.values()))


def _is_scatter(node) -> bool:
    return isinstance(node, Node) and node.target is SCATTER


def _scatter(node) -> list[Scatter]:
    """Returns one scatter, or one for each element of tensors of indices."""
    sizes, indices, value = node.args
    sizes, indices = tuple(sizes), tuple(indices)
    while _is_scatter(value) and all(not fake(index).dim() for index in indices):  # table[b][q]
        inner_sizes, inner, value = value.args
        if tuple(inner_sizes) != sizes[len(indices) :]:
            raise Unsupported("a part of a captured tensor is read in another shape")
        indices = (*indices, *inner)
    together = torch.broadcast_shapes(*(fake(index).shape for index in indices))
    if math.prod(together) > _MOST_TOGETHER:
        raise Unsupported(f"a score reads a captured tensor at {math.prod(together)} numbers at once")
    every = itertools.product(*map(range, together))
    return [_checked(Scatter(node, value, indices, sizes, at)) for at in every]


def _checked(scatter):
    if not all(isinstance(size, int) for size in scatter.sizes):
        raise Unsupported("a captured tensor has a size that is a symbol")
    if any(fake(index).dtype not in (torch.int32, torch.int64) for index in scatter.indices):
        raise Unsupported("a captured tensor is read by a mask")
    if not scatter.indices and scatter.elements > _MOST_DENSE:
        raise Unsupported(f"each score has a gradient of {scatter.elements} elements of a captured tensor")
    return scatter
