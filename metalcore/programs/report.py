"""What a program consists of, and what it costs."""

from __future__ import annotations

import operator
from collections import Counter
from typing import NamedTuple

from torch.fx import GraphModule, Node

from .ir import name_of, storage_of, tensors_of, written
from .planning import Plan
from .rewriting import Rewritten

__all__ = ["PLACES", "Report", "Step", "steps_of"]

# Where operations run, with what the report calls them.
PLACES = {
    "metalcore": "metalcore's kernels",
    "generated": "generated kernels",
    "torch": "PyTorch's operators on the device",
    "cpu": "operators on the CPU",
    "transfer": "transfers between CPU and device",
    "view": "views, which cost nothing",
}


class Step(NamedTuple):
    """An operation of a program.

    Attributes:
        place: one of PLACES.
        nbytes: how many bytes it reads and writes at least: its arguments and its results.

    Example:
        >>> x = torch.ones(2, 4, device="mps")
        >>> [step] = metalcore.compile(metalcore.nn.RMSNorm(4, device="mps").eval(), (x,)).report().steps
        >>> step.place
        'metalcore'
    """

    name: str
    operator: str
    place: str
    nbytes: int


class Report(NamedTuple):
    """The report of what a program consists of.

    Attributes:
        steps: its operations, in order.
        fused: where patterns were applied.
        plan: its values and their memory.
        notes: what was not done, and why.

    Example:
        >>> x = torch.ones(2, 4, device="mps")
        >>> report = metalcore.compile(metalcore.nn.RMSNorm(4, device="mps").eval(), (x,)).report()
        >>> [step.operator for step in report.steps]
        ['metalcore.rms_norm']
    """

    steps: tuple[Step, ...]
    fused: tuple[Rewritten, ...]
    plan: Plan
    notes: tuple[str, ...]

    def count(self, place: str) -> int:
        return sum(step.place == place for step in self.steps)

    def nbytes(self, place: str) -> int:
        return sum(step.nbytes for step in self.steps if step.place == place)

    def __str__(self):
        lines = []
        for place, words in PLACES.items():
            names = Counter(step.operator for step in self.steps if step.place == place)
            if not names:
                continue
            total = f", {_size(self.nbytes(place))}" if place != "view" else ""
            lines.append(f"{sum(names.values())} {words}{total}")
            if place != "view":
                lines += [f"  {count} {name}" for name, count in names.most_common()]
        fused = Counter(rewritten.pattern for rewritten in self.fused)
        if fused:
            lines.append("fused: " + ", ".join(f"{name} {count}" for name, count in fused.items()))
        memory = f"memory: {_size(self.plan.parameter_bytes)} of parameters, at most {_size(self.plan.peak_bytes)} more"
        arena = f", of which an arena of {_size(self.plan.arena_bytes)}" if self.plan.arena_bytes else ""
        return "\n".join([*lines, memory + arena, *(f"note: {note}" for note in self.notes)])


def _size(nbytes):
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.3g} {unit}" if unit != "B" else f"{nbytes} B"
        nbytes /= 1024
    return f"{nbytes:.3g} GiB"


def steps_of(module: GraphModule) -> tuple[Step, ...]:
    """Returns the operations of a graph."""
    return tuple(
        Step(node.name, _operator(node), _place(node), _traffic(node))
        for node in module.graph.nodes
        if node.op in ("call_function", "call_module") and node.target is not operator.getitem
    )


def _operator(node: Node) -> str:
    if "operations" in node.meta:
        return "+".join(node.meta["operations"])
    return name_of(node) or getattr(node.target, "__name__", str(node.target))


def _place(node):
    if "place" in node.meta:
        return node.meta["place"]
    name = name_of(node) or ""
    if name.startswith("metalcore."):
        return "metalcore"
    sources = {storage_of(t) for source in node.all_input_nodes for t in tensors_of(source)}
    results = {storage_of(t) for target in (node, *written(node)) for t in tensors_of(target)}
    if results <= sources and not written(node):
        return "view"
    devices = {t.device.type for target in (node, *written(node)) for t in tensors_of(target)}
    return "cpu" if devices == {"cpu"} else "torch"


def _traffic(node):
    tensors = [t for source in node.all_input_nodes for t in tensors_of(source)] + tensors_of(node)
    return sum(t.numel() * t.element_size() for t in tensors)
