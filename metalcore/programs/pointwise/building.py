"""build(): kernels from a graph of pointwise operations, and the function that runs them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, GraphModule, Interpreter, Node

from ..._core import generated
from ..._core.operators import ops
from .layout import Layout, geometry, layout
from .lowering import fake, result_dtype
from .numbers import Unsupported
from .source import elementwise
from .support import check

__all__ = ["Generated", "build"]

MOST_BUFFERS = 31  # one of them has the sizes and strides
_KEPT = 64  # launches of a kernel that are kept, by strides and alignment


def build(graph: Graph | GraphModule, examples: Sequence[Tensor], *, keep_float32: bool = False) -> Generated:
    """Makes one kernel for all outputs of a graph that have the same shape.

    Args:
        graph: of functional pointwise operations of aten (`OPERATIONS`), with one tensor or a sequence of tensors as
            its output. Where its nodes have fake tensors (meta["val"]), these give dtypes, shapes and strides.
        examples: a tensor for each placeholder; its shape, dtype and device count.
        keep_float32: results of 16 bits between the operations keep float32's precision, as Inductor's do. Otherwise
            each is rounded, as PyTorch's own operators do.

    Returns:
        A function of tensors like the examples, with any strides, that gives the tuple of outputs.

    Raises:
        Unsupported: a node is none that the generator takes, or needs more than 31 buffers; the message names it.
    """
    graph = graph.graph if isinstance(graph, GraphModule) else graph
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    if len(placeholders) != len(examples):
        raise ValueError(f"the graph has {len(placeholders)} inputs, and there are {len(examples)} examples")
    _propagate(graph, examples)
    returned = next(node for node in graph.nodes if node.op == "output").args[0]
    outputs = [returned] if isinstance(returned, Node) else list(returned)
    for node in graph.nodes:
        if node.op not in ("placeholder", "output"):
            _explained(node, check)
    for node in (*placeholders, *outputs):
        if not isinstance(node, Node):
            raise Unsupported(f"the graph returns {node!r}, which is no tensor")
        _explained(node, result_dtype)
    return Generated(placeholders, outputs, examples, keep_float32)


def _explained(node, function):
    try:
        function(node)
    except Unsupported as reason:
        raise Unsupported(f"{node.format_node() or node}: {reason}") from None


def _propagate(graph, examples):
    """Gives nodes their fake tensors, where they have none."""
    if all("val" in node.meta for node in graph.nodes if node.op != "output"):
        return
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:

        class Propagation(Interpreter):
            def run_node(self, n):
                result = super().run_node(n)
                if n.op != "output":
                    n.meta["val"] = result
                return result

        inputs = [mode.from_tensor(example) for example in examples]
        Propagation(GraphModule(torch.nn.Module(), graph)).run(*inputs)


class Launch(NamedTuple):
    kernel: str
    numbers: list[int]
    wide: bool
    threads: tuple[int, int, int]
    threadgroup: tuple[int, int, int]
    variant: str
    why: str


class Part:
    """The outputs that one kernel computes, and the inputs that they need, as places in the call's lists."""

    def __init__(self, outputs, inputs, nodes, leaves, keep_float32):
        self.outputs, self.inputs = outputs, inputs
        self._nodes, self._leaves, self._keep_float32 = nodes, leaves, keep_float32
        self.shape = tuple(fake(nodes[0]).shape)
        self._launches: dict[tuple, Launch] = {}

    def run(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        outs, ins = [outputs[k] for k in self.outputs], [inputs[k] for k in self.inputs]
        if outs[0].numel() == 0:
            return
        launch = self._launch(outs, ins)
        ops._run_generated(
            launch.kernel,
            outs,
            ins,
            launch.numbers,
            launch.wide,
            launch.threads,
            launch.threadgroup,
            "pointwise",
            launch.variant,
            launch.why,
        )

    def source(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> str:
        outs, ins = [outputs[k] for k in self.outputs], [inputs[k] for k in self.inputs]
        return generated.source(self._launch(outs, ins).kernel)

    def _launch(self, outs, ins):
        key = tuple(geometry(tensor, self.shape) for tensor in (*outs, *ins))
        if key not in self._launches:
            if len(self._launches) >= _KEPT:
                self._launches.clear()
            self._launches[key] = self._make(layout(self.shape, key))
        return self._launches[key]

    def _make(self, found: Layout):
        text = elementwise(self._nodes, self._leaves, found, keep_float32=self._keep_float32)
        kernel = generated.add("pointwise", text)
        variant = "vector" if found.vector > 1 else "strided"
        sizes = "×".join(map(str, reversed(found.sizes)))
        why = f"{sizes} elements, {found.vector} a thread; {len(self.outputs)} outputs of {len(self.inputs)} inputs"
        return Launch(kernel, found.numbers, found.wide, found.threads, found.threadgroup, variant, why)


class Generated:
    """A function of tensors that runs generated kernels.

    Attributes:
        parts: one for each kernel.
    """

    def __init__(self, placeholders, outputs, examples, keep_float32):
        self._inputs = [(tuple(fake(node).shape), result_dtype(node)) for node in placeholders]
        self._device = examples[0].device if examples else fake(outputs[0]).device
        self._outputs = [fake(node) for node in outputs]
        groups: dict[tuple[int, ...], list[int]] = {}
        for k, node in enumerate(outputs):
            groups.setdefault(tuple(fake(node).shape), []).append(k)
        self.parts = [
            part for places in groups.values() for part in _parts(places, outputs, placeholders, keep_float32)
        ]

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        tensors = self._checked(tensors)
        device = tensors[0].device if tensors else self._device
        made = [
            torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device) for like in self._outputs
        ]
        for part in self.parts:
            part.run(made, tensors)
        return tuple(made)

    def into(self, outputs: Sequence[Tensor], *tensors: Tensor) -> None:
        """Computes into given memory.

        Args:
            outputs: tensors of the outputs' shapes and dtypes. An output may be one of the inputs, of the same shape
                and strides, where there is one kernel.

        Raises:
            RuntimeError: an output overlaps an input in another way, or another output.
        """
        tensors = self._checked(tensors)
        for k, (output, like) in enumerate(zip(outputs, self._outputs, strict=True)):
            if output.shape != like.shape or output.dtype != like.dtype:
                raise RuntimeError(f"output {k} must be {_described(like)}, not {_described(output)}")
            others = [*tensors, *outputs[:k]]
            for j, other in enumerate(others):
                same = j < len(tensors) and len(self.parts) == 1 and _same_memory(output, other)
                if not same and _overlap(output, other):
                    raise RuntimeError(f"output {k} overlaps an input, or another output")
        for part in self.parts:
            part.run(outputs, tensors)

    def _checked(self, tensors):
        if len(tensors) != len(self._inputs):
            raise TypeError(f"{len(self._inputs)} tensors are needed, {len(tensors)} were given")
        device = next((tensor.device for tensor in tensors if not tensor.is_cpu), self._device)
        checked = []
        for k, (tensor, (shape, dtype)) in enumerate(zip(tensors, self._inputs)):
            if tensor.shape != shape or tensor.dtype != dtype:
                wanted = f"{dtype} {list(shape)}".removeprefix("torch.")
                raise RuntimeError(f"input {k} must be {wanted}, as the kernel was made for, not {_described(tensor)}")
            if tensor.device != device and tensor.dim() == 0:
                tensor = tensor.to(device)
            checked.append(tensor)
        return checked


def _parts(places, outputs, placeholders, keep_float32):
    """The outputs of one shape in as few kernels as their buffers allow."""
    nodes = [outputs[k] for k in places]
    needed = _leaves(nodes)
    inputs = [k for k, node in enumerate(placeholders) if node in needed]
    if len(places) + len(inputs) < MOST_BUFFERS:
        yield Part(places, inputs, nodes, [placeholders[k] for k in inputs], keep_float32)
        return
    if len(places) == 1:
        raise Unsupported(f"{nodes[0]} needs {len(inputs)} inputs; a kernel has {MOST_BUFFERS} buffers")
    half = len(places) // 2
    yield from _parts(places[:half], outputs, placeholders, keep_float32)
    yield from _parts(places[half:], outputs, placeholders, keep_float32)


def _leaves(nodes):
    seen, left = set(), list(nodes)
    while left:
        node = left.pop()
        if node not in seen:
            seen.add(node)
            left += node.all_input_nodes
    return {node for node in seen if node.op == "placeholder"}


def _described(tensor):
    return f"{tensor.dtype} {list(tensor.shape)}".removeprefix("torch.")


def _same_memory(a, b):
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype


def _overlap(a, b):
    if a.numel() == 0 or b.numel() == 0:
        return False
    (first, last), (other, end) = map(_extent, (a, b))
    return first < end and other < last


def _extent(tensor):
    elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return tensor.data_ptr(), tensor.data_ptr() + elements * tensor.element_size()
