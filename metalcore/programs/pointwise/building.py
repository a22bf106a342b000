"""build(): kernels from a graph of pointwise operations, and the function that runs them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, GraphModule, Interpreter, Node

from ..._core import generated_kernels
from .nodes import fake, result_dtype
from .numbers import Unsupported
from .parts import Elementwise, Memory, memory_of, parts_of, place_of
from .support import check

__all__ = ["Generated", "build"]


def build(graph: Graph | GraphModule, examples: Sequence[Tensor], *, keep_float32: bool = False) -> Generated:
    """Makes one kernel for all outputs of a graph that have the same shape, and one or two for each reduction.

    Args:
        graph: of functional operations of aten that `supports` takes, with one tensor or a sequence of tensors as its
            output. Where its nodes have fake tensors (meta["val"]), these give dtypes, shapes and
            strides.
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
    return Generated(placeholders, outputs, keep_float32)


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


class Generated:
    """A function of tensors that runs generated kernels.

    Attributes:
        parts: what the kernels compute, in order.
    """

    def __init__(self, placeholders, outputs, keep_float32):
        self._placeholders, self._outputs = placeholders, outputs
        self._inputs = [(tuple(fake(node).shape), result_dtype(node)) for node in placeholders]
        self._device = fake(outputs[0]).device
        self.parts = parts_of(outputs, keep_float32)
        # An output that is an input is copied.
        self._written = [(node, -1) if node.op == "placeholder" else place_of(node) for node in outputs]

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        memory = self._memory(tensors)
        self._run(memory)
        return tuple(memory[place] for place in self._written)

    def into(self, outputs: Sequence[Tensor], *tensors: Tensor) -> None:
        """Computes into given memory.

        Args:
            outputs: tensors of the outputs' shapes and dtypes. An output may be one of the inputs, of the same shape
                and strides, where there is one kernel.

        Raises:
            RuntimeError: an output overlaps an input in another way, or another output.
        """
        output_of = {}
        part = self.parts[0] if len(self.parts) == 1 else None
        in_place = isinstance(part, Elementwise) and not part.needs_coordinates
        for k, (output, node) in enumerate(zip(outputs, self._outputs, strict=True)):
            like = fake(node)
            if output.shape != like.shape or output.dtype != like.dtype:
                raise RuntimeError(f"output {k} must be {_described(like)}, not {_described(output)}")
            for j, other in enumerate((*tensors, *outputs[:k])):
                same = in_place and j < len(tensors) and _same_memory(output, other)
                if not same and _overlap(output, other):
                    raise RuntimeError(f"output {k} overlaps an input, or another output")
            output_of[self._written[k]] = output
        self._run(self._memory(tensors, output_of))

    def sources(self, *tensors: Tensor) -> list[str]:
        """Returns the MSL of the kernels that a call of these tensors runs."""
        return [generated_kernels.source(kernel) for kernel in self.kernels(*tensors)]

    def kernels(self, *tensors: Tensor) -> list[str]:
        """Returns the names of the kernels that a call of these tensors runs. Meta tensors begin at an address of 16
        bytes."""
        memory = self._memory(tensors)
        return [kernel for part in self.parts for kernel in part.kernels(memory)]

    def _run(self, memory: Memory) -> None:
        for part in self.parts:
            part.run(memory)

    def _memory(self, tensors, output_of=None):
        """Returns the tensors by their places: the inputs, what is given, and new ones."""
        tensors = self._checked(tensors)
        device = tensors[0].device if tensors else self._device
        memory = dict(output_of or {})
        memory |= {(node, 0): tensor for node, tensor in zip(self._placeholders, tensors)}
        places = dict.fromkeys((*(place for part in self.parts for place in part.outputs), *self._written))
        return memory_of([place for place in places if place not in memory], device) | memory

    def _checked(self, tensors):
        if len(tensors) != len(self._inputs):
            raise TypeError(f"{len(self._inputs)} tensors are needed, {len(tensors)} were given")
        device = next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), self._device)
        checked = []
        for k, (tensor, (shape, dtype)) in enumerate(zip(tensors, self._inputs)):
            if tensor.shape != shape or tensor.dtype != dtype:
                wanted = f"{dtype} {list(shape)}".removeprefix("torch.")
                raise RuntimeError(f"input {k} must be {wanted}, as the kernel was made for, not {_described(tensor)}")
            tensor = tensor.to(device) if tensor.device != device and tensor.dim() == 0 else tensor
            checked.append(tensor.resolve_neg())  # its strides decide the kernel, and a later copy has others
        return checked


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
