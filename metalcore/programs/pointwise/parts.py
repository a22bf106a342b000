"""The kernels of a graph, and their launches."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from ..._core import generated_kernels
from ..._core.operators import ops
from .accumulators import accumulator, reduced_dimensions, results_of
from .blocks import blocked
from .elementwise import elementwise
from .layout import geometry, layout
from .nodes import SCANS, STORED, WRITES, fake, is_leaf, name_of, split
from .numbers import Unsupported
from .reduction import merging, reduction, walk
from .scan import launch_of, scan
from .source import indexed
from .storing import geometry_of, needs_coordinates, operands_of, store
from .writes import leaves_of, writing, written

MOST_BUFFERS = 31  # one of them has the sizes and strides
_KEPT = 64  # launches of a kernel that are kept, by strides and alignment
_SCRATCH = {torch.bool: torch.uint8}

Place = tuple[Node, int]  # a node, and which of its results
Memory = dict[Place, Tensor]


def place_of(leaf: Node) -> Place:
    """Returns where a leaf's tensor is found."""
    of_several = leaf.target is operator.getitem and is_leaf(leaf.args[0])  # type: ignore[arg-type]
    return (leaf.args[0], leaf.args[1]) if of_several else (leaf, 0)  # type: ignore[return-value]


def memory_of(places: Sequence[Place], device: torch.device) -> Memory:
    """Returns memory for results that nothing has been computed into."""
    tensors = {}
    for node, k in places:
        like = results_of(node)[k]
        tensors[node, k] = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)
    return tensors


def of_elements(count: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Returns the grid and the threadgroup of a kernel with one thread for an element."""
    return (count, 1, 1), (min(256, count), 1, 1)


def check_reach(tensor: Tensor) -> Tensor:
    """Returns a tensor whose elements are found by numbers of 31 bits. Raises Unsupported for others."""
    if 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()) if size) >= 1 << 31:
        raise Unsupported(f"a tensor of {list(tensor.shape)} elements needs indices of 64 bits")
    return tensor


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

    def __init__(self, outputs: list[Place], nodes: Sequence[Node], kernel_nodes: Sequence[Node] = ()):
        self.outputs, (self.inputs, _) = outputs, split(nodes, kernel_nodes)
        self._launches: dict[tuple, list[Launch]] = {}

    def run(self, memory: Memory) -> None:
        outs, ins = self._tensors(memory)
        if outs[0].numel():
            self._submit(self._launches_for(outs, ins), outs, ins)

    def kernels(self, memory: Memory) -> list[str]:
        """Returns the kernels' names."""
        outs, ins = self._tensors(memory)
        return [launch.kernel for launch in self._launches_for(outs, ins)]

    def _tensors(self, memory):
        return [memory[place] for place in self.outputs], [memory[place_of(leaf)] for leaf in self.inputs]

    def _submit(self, launches, outs, ins):
        launches[0].run(outs, ins)

    def _launches_for(self, outs, ins):
        key = self._key(outs, ins)  # pyright: ignore[reportAttributeAccessIssue]
        if key not in self._launches:
            if len(self._launches) >= _KEPT:
                self._launches.clear()
            self._launches[key] = self._make(*key)  # pyright: ignore[reportAttributeAccessIssue]
        return self._launches[key]


class Elementwise(Part):
    """Outputs of one shape.

    Args:
        nodes: what is computed. One that is stored is computed here.
        places: where it is stored; as the nodes' results by default.
    """

    def __init__(self, nodes, keep_float32, places=None):
        self._kernel_nodes = [node for node in nodes if STORED in node.meta and places is None]
        super().__init__(
            places or [(node, -1 if node.op == "placeholder" else 0) for node in nodes], nodes, self._kernel_nodes
        )
        self._nodes, self._keep_float32 = nodes, keep_float32
        self._shape = tuple(fake(nodes[0]).shape)
        self.needs_coordinates = needs_coordinates(nodes, self._kernel_nodes)
        self._operands = operands_of(nodes, self.inputs, self._kernel_nodes)
        self._buffers = [self.inputs.index(leaf) for leaf, _ in self._operands or ()]

    def _key(self, outs, ins):
        if self._operands is None:
            return tuple(tuple(check_reach(tensor).stride()) for tensor in (*outs, *ins)), None
        return tuple(geometry(tensor, self._shape) for tensor in outs), tuple(
            geometry_of(ins[k], at, self._shape) for k, (_, at) in zip(self._buffers, self._operands)
        )

    def _make(self, outs, ins):
        counts = f"{len(self.outputs)} outputs of {len(self.inputs)} inputs"
        if self._operands is None:
            text = indexed(
                self._nodes, self.inputs, outs, kernel_nodes=self._kernel_nodes, keep_float32=self._keep_float32
            )
            count = math.prod(self._shape)
            kernel, why = generated_kernels.add("indexed", text), f"{count} elements, one a thread; {counts}"
            return [Launch(kernel, [count], False, *of_elements(count), "pointwise", "indexed", why)]
        tensors = [*outs, *ins]
        thread_layout = blocked(layout(self._shape, tensors), tensors, len(outs))
        text = elementwise(
            self._nodes,
            self.inputs,
            self._operands,
            thread_layout,
            kernel_nodes=self._kernel_nodes,
            keep_float32=self._keep_float32,
        )
        kernel = generated_kernels.add("pointwise", text)
        variant = "tiles" if thread_layout.tile else "vector" if thread_layout.vector > 1 else "strided"
        sizes = "×".join(map(str, reversed(thread_layout.sizes)))
        rows = f" in {thread_layout.rows} rows" if thread_layout.rows > 1 else ""
        why = f"{sizes} elements, {thread_layout.vector}{rows} a thread; {counts}"
        grid = thread_layout.threads, thread_layout.threadgroup
        return [Launch(kernel, thread_layout.numbers, thread_layout.wide, *grid, "pointwise", variant, why)]


class Reduction(Part):
    """A reduction, and the operations before it."""

    def __init__(self, node, keep_float32):
        super().__init__([(node, k) for k in range(len(results_of(node)))], [node.args[0]])
        if not self.inputs:
            raise Unsupported(f"{node} reduces numbers that depend on no input")
        if len(self.inputs) + 4 > MOST_BUFFERS:
            raise Unsupported(f"{node} needs {len(self.inputs)} inputs; a kernel has {MOST_BUFFERS} buffers")
        self._node, self._keep_float32 = node, keep_float32
        self._shape, self._dims = tuple(fake(node.args[0]).shape), reduced_dimensions(node)
        self._fields = accumulator(node).fields

    def _key(self, outs, ins):
        result_shape = [size for d, size in enumerate(self._shape) if d not in self._dims]
        results = (tensor.reshape(result_shape) if tensor.dim() != len(result_shape) else tensor for tensor in outs)
        return tuple(tuple(tensor.stride()) for tensor in results), tuple(
            geometry(tensor, self._shape) for tensor in ins
        )

    def _make(self, results, ins):
        name = self._node.target.overloadpacket.__name__
        state = accumulator(self._node)
        steps = walk(self._shape, self._dims, ins, results, is_ordered=state.is_ordered)
        kernel = generated_kernels.add(name, reduction(self._node, self.inputs, steps, keep_float32=self._keep_float32))
        variant = "rows" if steps.threads > 1 else "columns"
        count = steps.numbers[0]
        why = f"{steps.results} results of {count} elements, {steps.threads} threads each, {steps.chunks} chunks"
        launches = [Launch(kernel, steps.numbers, False, steps.grid, steps.threadgroup, name, variant, why)]
        if steps.chunks > 1:
            count, _, *rest = steps.numbers
            merge = generated_kernels.add(f"{name}_chunks", merging(self._node, steps))
            alone = steps._replace(threads=1)
            grid = (steps.results, 1, 1), alone.threadgroup
            launches.append(Launch(merge, [count, steps.chunks, *rest], False, *grid, name, variant, why))
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


class Whole(Part):
    """An operation that has a kernel of its own, for the strides at hand."""

    def __init__(self, node, operands, keep_float32):
        super().__init__([(node, 0)], operands)
        self._node, self._keep_float32 = node, keep_float32

    def _key(self, outs, ins):
        return tuple(tuple(check_reach(tensor).stride()) for tensor in (*outs, *ins)), None


class Scan(Whole):
    """A sum of all elements up to each one, and the operations before it."""

    def __init__(self, node, keep_float32):
        super().__init__(node, node.all_input_nodes, keep_float32)

    def _make(self, strides, _):
        name = self._node.target.overloadpacket.__name__
        text = scan(self._node, self.inputs, strides, keep_float32=self._keep_float32)
        grid, group = launch_of(self._node)
        why = f"{grid[0] // group[0]} rows, {group[0]} threads each"
        return [Launch(generated_kernels.add(name, text), [0], False, grid, group, name, "rows", why)]


class Writing(Whole):
    """A copy of a tensor, and what is written into it by indices."""

    def __init__(self, node, keep_float32):
        super().__init__(node, leaves_of(node), keep_float32)
        self._copy = Elementwise([node.args[0]], keep_float32, [(node, 0)])

    def run(self, memory):
        self._copy.run(memory)
        if math.prod(written(self._node).shape):
            super().run(memory)

    def kernels(self, memory):
        return [*self._copy.kernels(memory), *super().kernels(memory)]

    def _make(self, strides, _):
        name, count = self._node.target.overloadpacket.__name__, math.prod(written(self._node).shape)
        text = writing(self._node, self.inputs, strides, keep_float32=self._keep_float32)
        kernel, why = generated_kernels.add(name, text), f"{count} elements, one a thread"
        return [Launch(kernel, [count], False, *of_elements(count), name, "indexed", why)]


def _with_kernels(node, keep_float32):
    """Returns the part of a node that is stored."""
    if STORED in node.meta:
        return Elementwise([node], keep_float32)
    name = name_of(node)
    part_class = Scan if name in SCANS else Writing if name in WRITES else Reduction
    return part_class(node, keep_float32)


def parts_of(outputs: Sequence[Node], keep_float32: bool) -> list[Part]:
    """Returns the parts that compute some nodes, in an order in which they can run."""
    store(outputs)
    part_of: dict[Node, Part] = {}

    def add(nodes):
        for leaf in split(nodes)[0]:
            node, _ = place_of(leaf)
            if node.op != "placeholder" and node not in part_of:
                add(node.all_input_nodes)
                part_of[node] = _with_kernels(node, keep_float32)

    add(outputs)
    groups: dict[tuple[int, ...], list[Node]] = {}
    for node in dict.fromkeys(outputs):
        if node.op == "placeholder" or not is_leaf(node):
            groups.setdefault(tuple(fake(node).shape), []).append(node)
    return [*part_of.values(), *(part for nodes in groups.values() for part in _elementwise(nodes, keep_float32))]


def _elementwise(nodes, keep_float32):
    """Returns the outputs of one shape in as few kernels as their buffers allow."""
    inputs, _ = split(nodes)
    if len(nodes) + len(inputs) < MOST_BUFFERS:
        return [Elementwise(nodes, keep_float32)]
    if len(nodes) == 1:
        raise Unsupported(f"{nodes[0]} needs {len(inputs)} inputs; a kernel has {MOST_BUFFERS} buffers")
    half = len(nodes) // 2
    return [*_elementwise(nodes[:half], keep_float32), *_elementwise(nodes[half:], keep_float32)]
