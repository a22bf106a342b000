"""The kernels of a graph, and their launches."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from ..._core import generated
from ..._core.operators import ops
from .accumulators import accumulator, reduced_dimensions, results_of
from .layout import geometry, layout
from .lowering import fake, is_leaf
from .numbers import Unsupported
from .reduction import merging, reduction
from .source import elementwise
from .walk import walk

MOST_BUFFERS = 31  # one of them has the sizes and strides
_KEPT = 64  # launches of a kernel that are kept, by strides and alignment
_SCRATCH = {torch.bool: torch.uint8}

Place = tuple[Node, int]  # a node, and which of its results
Memory = dict[Place, Tensor]


def place_of(leaf: Node) -> Place:
    """Where a leaf's tensor is found."""
    return (leaf.args[0], leaf.args[1]) if leaf.target is operator.getitem else (leaf, 0)  # type: ignore[return-value]


def leaves(nodes: Sequence[Node]) -> list[Node]:
    """The leaves that nodes are computed from, each once, in the graph's order."""
    seen: set[Node] = set()
    left = list(nodes)
    while left:
        node = left.pop()
        if node not in seen:
            seen.add(node)
            left += [] if is_leaf(node) else node.all_input_nodes
    return sorted(node for node in seen if is_leaf(node))


def memory_of(places: Sequence[Place], device: torch.device) -> Memory:
    """Memory for results that nothing has been computed into."""
    found = {}
    for node, k in places:
        like = results_of(node)[k]
        found[node, k] = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)
    return found


class Launch(NamedTuple):
    kernel: str
    numbers: list[int]
    wide: bool
    threads: tuple[int, int, int]
    threadgroup: tuple[int, int, int]
    op: str
    variant: str
    why: str

    def run(self, outputs: list[Tensor], inputs: list[Tensor]) -> None:
        kernel, *rest = self
        ops._run_generated(kernel, outputs, inputs, *rest)


class Part:
    """What one kernel computes, or two: some nodes' results from those of others."""

    outputs: list[Place]
    inputs: list[Node]

    def __init__(self, outputs: list[Place], nodes: Sequence[Node]):
        self.outputs, self.inputs = outputs, leaves(nodes)
        self._launches: dict[tuple, list[Launch]] = {}

    def run(self, memory: Memory) -> None:
        outs, ins = self._tensors(memory)
        if outs[0].numel():
            self._submit(self._launches_for(outs, ins), outs, ins)  # pyright: ignore[reportAttributeAccessIssue]

    def kernels(self, memory: Memory) -> list[str]:
        """The kernels' names."""
        outs, ins = self._tensors(memory)
        return [launch.kernel for launch in self._launches_for(outs, ins)]

    def _tensors(self, memory):
        return [memory[place] for place in self.outputs], [memory[place_of(leaf)] for leaf in self.inputs]

    def _launches_for(self, outs, ins):
        key = self._key(outs, ins)  # pyright: ignore[reportAttributeAccessIssue]
        if key not in self._launches:
            if len(self._launches) >= _KEPT:
                self._launches.clear()
            self._launches[key] = self._make(*key)  # pyright: ignore[reportAttributeAccessIssue]
        return self._launches[key]


class Elementwise(Part):
    """Outputs of one shape."""

    def __init__(self, nodes, keep_float32):
        super().__init__([(node, -1 if node.op == "placeholder" else 0) for node in nodes], nodes)
        self._nodes, self._keep_float32 = nodes, keep_float32
        self._shape = tuple(fake(nodes[0]).shape)

    def _key(self, outs, ins):
        return tuple(geometry(tensor, self._shape) for tensor in outs), tuple(
            geometry(tensor, self._shape) for tensor in ins
        )

    def _make(self, outs, ins):
        found = layout(self._shape, [*outs, *ins])
        text = elementwise(self._nodes, self.inputs, found, keep_float32=self._keep_float32)
        kernel = generated.add("pointwise", text)
        variant = "vector" if found.vector > 1 else "strided"
        sizes = "×".join(map(str, reversed(found.sizes)))
        why = f"{sizes} elements, {found.vector} a thread; {len(self.outputs)} outputs of {len(self.inputs)} inputs"
        grid = found.threads, found.threadgroup
        return [Launch(kernel, found.numbers, found.wide, *grid, "pointwise", variant, why)]

    def _submit(self, launches, outs, ins):
        launches[0].run(outs, ins)


class Reduction(Part):
    """A reduction, and the operations before it."""

    def __init__(self, node, keep_float32):
        super().__init__([(node, k) for k in range(len(results_of(node)))], [node.args[0]])
        if len(self.inputs) + 4 > MOST_BUFFERS:
            raise Unsupported(f"{node} needs {len(self.inputs)} inputs; a kernel has {MOST_BUFFERS} buffers")
        self._node, self._keep_float32 = node, keep_float32
        self._shape, self._dims = tuple(fake(node.args[0]).shape), reduced_dimensions(node)
        self._fields = accumulator(node).fields

    def _key(self, outs, ins):
        kept = [size for d, size in enumerate(self._shape) if d not in self._dims]
        results = (tensor.reshape(kept) if tensor.dim() != len(kept) else tensor for tensor in outs)
        return tuple(tuple(tensor.stride()) for tensor in results), tuple(
            geometry(tensor, self._shape) for tensor in ins
        )

    def _make(self, results, ins):
        name = self._node.target.overloadpacket.__name__
        state = accumulator(self._node)
        found = walk(self._shape, self._dims, ins, results, is_ordered=state.is_ordered)
        kernel = generated.add(name, reduction(self._node, self.inputs, found, keep_float32=self._keep_float32))
        variant = "rows" if found.threads > 1 else "columns"
        count = found.numbers[0]
        why = f"{found.results} results of {count} elements, {found.threads} threads each, {found.chunks} chunks"
        launches = [Launch(kernel, found.numbers, False, found.grid, found.threadgroup, name, variant, why)]
        if found.chunks > 1:
            count, _, *rest = found.numbers
            merge = generated.add(f"{name}_chunks", merging(self._node, found))
            alone = found._replace(threads=1)
            grid = (found.results, 1, 1), alone.threadgroup
            launches.append(Launch(merge, [count, found.chunks, *rest], False, *grid, name, variant, why))
        return launches

    def _submit(self, launches, outs, ins):
        if len(launches) == 1:
            launches[0].run(outs, ins)
            return
        _, chunks, _ = launches[0].threads
        size = chunks * outs[0].numel()
        scratch = [
            torch.empty(size, dtype=_SCRATCH.get(dtype, dtype), device=outs[0].device) for dtype, _, _ in self._fields
        ]
        launches[0].run(scratch, ins)
        launches[1].run(outs, scratch)


def parts_of(outputs: Sequence[Node], keep_float32: bool) -> list[Part]:
    """The parts that compute some nodes, in an order in which they can run."""
    reductions: dict[Node, Part] = {}

    def add_reductions(nodes):
        for leaf in leaves(nodes):
            node, _ = place_of(leaf)
            if node.op != "placeholder" and node not in reductions:
                add_reductions([node.args[0]])
                reductions[node] = Reduction(node, keep_float32)

    add_reductions(outputs)
    groups: dict[tuple[int, ...], list[Node]] = {}
    for node in dict.fromkeys(outputs):
        if node.op == "placeholder" or not is_leaf(node):
            groups.setdefault(tuple(fake(node).shape), []).append(node)
    return [*reductions.values(), *(part for nodes in groups.values() for part in _elementwise(nodes, keep_float32))]


def _elementwise(nodes, keep_float32):
    """The outputs of one shape in as few kernels as their buffers allow."""
    inputs = leaves(nodes)
    if len(nodes) + len(inputs) < MOST_BUFFERS:
        return [Elementwise(nodes, keep_float32)]
    if len(nodes) == 1:
        raise Unsupported(f"{nodes[0]} needs {len(inputs)} inputs; a kernel has {MOST_BUFFERS} buffers")
    half = len(nodes) // 2
    return [*_elementwise(nodes[:half], keep_float32), *_elementwise(nodes[half:], keep_float32)]
