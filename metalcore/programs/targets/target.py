"""Descriptions of devices, and the check that a program is such as its target asks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node

from ..ir import argument, name_of, tensors_of, value
from ..report import Step
from ..source import program_device

__all__ = [
    "APPLE",
    "CPU",
    "EXAMPLE_NPU",
    "NVIDIA",
    "PRODUCTS",
    "TARGETS",
    "Target",
    "TargetError",
    "Violation",
    "check",
    "check_static",
    "target_of",
]

_WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
_SHORT_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Target:
    """A description of what a device asks of programs.

    Attributes:
        name: in files and messages.
        device: the type of PyTorch's device that stands for it; "" for any, where programs for it are tried out.
        dtypes: those that its values may have, the best one first.
        most_dimensions: of a value.
        most_bytes: of a value, or None where the device's memory is the limit.
        static_shapes: whether all sizes are known before a program runs. Programs are always so.
        channel_bytes: channels of what products read and write (dimension 1 of a convolution, the last one of others)
            fill multiples of so many bytes. `metalcore.compile` pads them where it can.
        on_cpu: whether the CPU may do what the device cannot.
        fusions: the patterns that are applied where nobody names others; None means all.

    Example:
        >>> metalcore.programs.targets.NVIDIA.device
        'cuda'
    """

    name: str
    device: str
    dtypes: tuple[torch.dtype, ...]
    most_dimensions: int = 64
    most_bytes: int | None = None
    static_shapes: bool = True
    channel_bytes: int = 1
    on_cpu: bool = True
    fusions: Sequence[str] | None = None

    def channels(self, dtype: torch.dtype) -> int:
        """Returns the number whose multiples a number of channels has to be."""
        return max(1, self.channel_bytes // dtype.itemsize)


APPLE = Target("apple", "mps", (*_SHORT_FLOATS, *_WHOLE, torch.complex64), most_dimensions=16)
NVIDIA = Target("nvidia", "cuda", (*_SHORT_FLOATS, torch.float64, *_WHOLE, torch.complex64, torch.complex128))
CPU = Target("cpu", "cpu", (*_SHORT_FLOATS, torch.float64, *_WHOLE, torch.complex64, torch.complex128))
# No product: what is common among accelerators of phones and cameras.
EXAMPLE_NPU = Target(
    "example-npu",
    "",
    (torch.float16, torch.int8, torch.uint8, torch.int32, torch.bool),
    most_dimensions=5,
    most_bytes=1 << 28,
    channel_bytes=64,
    on_cpu=False,
    fusions=("conv_batch_norm",),  # metalcore's kernels are none of it
)
TARGETS = {target.name: target for target in (APPLE, NVIDIA, CPU, EXAMPLE_NPU)}


def target_of(device: torch.device | None) -> Target:
    """Returns the target of a kind of device."""
    return next((target for target in TARGETS.values() if device is not None and target.device == device.type), CPU)


_SHOWN = 20
# Products, with the names of the arguments that have channels.
PRODUCTS = {
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), ("input",)),
    "linear": ("input",),
    "matmul": ("self", "other"),
    "mm": ("self", "mat2"),
    "bmm": ("self", "mat2"),
    "addmm": ("mat1", "mat2"),
    "baddbmm": ("batch1", "batch2"),
}


class Violation(NamedTuple):
    """Something that a target does not allow.

    Attributes:
        operation: its name in the program.
        value: the value that is wrong.
        rule: what the target asks for.
        found: what there is.
        remedy: what would satisfy the rule.
    """

    operation: str
    value: str
    rule: str
    found: str
    remedy: str

    def __str__(self):
        of = f", {self.value}" if self.value != self.operation else ""
        return f"{self.operation}{of}: {self.rule}; here: {self.found}. {self.remedy}"


class TargetError(ValueError):
    """The error of a program that does not keep what its target asks for.

    Attributes:
        violations: all of them.

    Example:
        >>> model, target = metalcore.nn.RMSNorm(4).eval(), metalcore.programs.targets.EXAMPLE_NPU
        >>> try:
        ...     metalcore.compile(model, (torch.ones(2, 4),), target=target)
        ... except metalcore.programs.TargetError as error:
        ...     print(error.violations[0].rule)
        values are float16, int8, uint8, int32, bool
    """

    def __init__(self, target: Target, violations: list[Violation]):
        self.violations = tuple(violations)
        lines = [f"  {violation}" for violation in violations[:_SHOWN]]
        if len(violations) > _SHOWN:
            lines.append(f"  and {len(violations) - _SHOWN} more")
        super().__init__("\n".join([f"the program does not fit the target {target.name}:", *lines]))


def check_static(program: torch.export.ExportedProgram, target: Target) -> list[Violation]:
    """Returns the inputs of an exported program whose sizes are not known, if the target wants them known."""
    violations = []
    for node in program.graph.nodes if target.static_shapes else ():
        if node.op == "placeholder" and isinstance(value(node), Tensor):
            shape = value(node).shape
            if any(not isinstance(size, int) for size in shape):
                rule, remedy = "all sizes are known in advance", "Export it without Dim, once for each set of sizes."
                violations.append(
                    Violation(node.name, node.name, rule, f"sizes {[str(size) for size in shape]}", remedy)
                )
    return violations


def check(graph: Graph, steps: tuple[Step, ...], target: Target) -> list[Violation]:
    """Returns what of a graph, and of the operations that it became, a target does not allow."""
    violations: list[Violation] = []
    device = program_device(graph)
    for node in graph.nodes:
        if node.op == "output":
            continue
        for tensor in tensors_of(node):
            if tensor.device == device:
                violations += _of_value(node, tensor, target)
        if name_of(node) in PRODUCTS and target.channel_bytes > 1:
            violations += _of_channels(node, target)
    if not target.on_cpu:
        for step in steps:
            if step.place in ("cpu", "transfer"):
                rule, remedy = "all runs on the device", "Write it with operators that the device has."
                violations.append(Violation(step.name, step.name, rule, f"{step.operator} on the CPU", remedy))
    return violations


def _of_value(node: Node, tensor: Tensor, target: Target) -> Iterator[Violation]:
    def wrong(rule, found, remedy):
        return Violation(node.name, node.name, rule, found, remedy)

    if tensor.dtype not in target.dtypes:
        names = ", ".join(_text(dtype) for dtype in target.dtypes)
        yield wrong(f"values are {names}", _text(tensor.dtype), _other_dtype(tensor.dtype, target))
    if tensor.dim() > target.most_dimensions:
        remedy = "Reshape it, so that dimensions become one."
        yield wrong(f"values have at most {target.most_dimensions} dimensions", str(tensor.dim()), remedy)
    nbytes = tensor.numel() * tensor.element_size()
    if target.most_bytes is not None and nbytes > target.most_bytes:
        remedy = "Split it, or take a smaller batch."
        yield wrong(f"a value has at most {target.most_bytes} bytes", str(nbytes), remedy)


def _other_dtype(dtype, target):
    alike = [other for other in target.dtypes if other.is_floating_point == dtype.is_floating_point]
    alike = [other for other in alike if other.is_complex == dtype.is_complex and other != torch.bool]
    if not alike:
        return "The device has nothing like it."
    best = max(alike, key=lambda other: other.itemsize)
    if dtype.is_floating_point:
        return f"Compile it with dtype=torch.{_text(best)}."
    return f"Convert it to {_text(best)}."


def _of_channels(node, target):
    name = str(name_of(node))
    dim = 1 if name.startswith("conv") else -1
    operands = [(argument(node, argument_name), argument_name) for argument_name in PRODUCTS[name]]
    values = [(value(operand), f"its argument {words}") for operand, words in operands if isinstance(operand, Node)]
    for tensor, words in [*values, (value(node), "its result")]:
        dim_of = dim if tensor.dim() > 1 or dim == -1 else 0
        multiple = target.channels(tensor.dtype)
        if tensor.dim() and tensor.shape[dim_of] % multiple:
            count = tensor.shape[dim_of]
            rule = f"channels fill multiples of {target.channel_bytes} bytes ({multiple} of {_text(tensor.dtype)})"
            padded = -(-count // multiple) * multiple
            yield Violation(
                node.name, words, rule, f"{count} channels", f"Pad them to {padded}: {_padding(node, name)}"
            )


def _padding(node, name):
    if name.startswith("conv") and argument(node, "groups") != 1:
        return "zeros between the groups would change them, so each group needs so many itself."
    if name == "linear" or name.startswith("conv"):
        return "its weight is no parameter, so this cannot be done here."
    return "write it as linear with a parameter, which is padded here, or pad its operands."


def _text(dtype):
    return str(dtype).removeprefix("torch.")
