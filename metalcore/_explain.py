"""metalcore.explain: which kernels a call would run, and why."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from . import _C

__all__ = ["Explanation", "Step", "explain"]


@dataclass(frozen=True)
class Step:
    """One dispatch: a kernel, its grid (in threadgroups, or in threads where `threads`) and its threadgroup's size."""

    kernel: str
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]
    threads: bool

    def __str__(self):
        grid, group = ("×".join(map(str, sizes)) for sizes in (self.grid, self.threadgroup))
        return f"{self.kernel}: {grid} {'threads' if self.threads else 'threadgroups'}, {group} threads a threadgroup"


@dataclass(frozen=True)
class Explanation:
    op: str
    variant: str
    why: str
    steps: tuple[Step, ...]

    @property
    def kernels(self) -> tuple[str, ...]:
        return tuple(step.kernel for step in self.steps)

    def __str__(self):
        return "\n".join([f"{self.op}: {self.variant} ({self.why})", *(f"  {step}" for step in self.steps)])


def explain(op: str, *inputs, dtype: torch.dtype | None = None, **options) -> Explanation:
    """Tells how metalcore would run an op, without running it.

    Args:
        op: the op's name, as in metalcore.<op>.
        inputs: for each tensor argument a tensor or a shape.
        dtype: of the inputs; by default the first tensor's, float32 where only shapes are given.
        options: the op's other arguments.

    Raises:
        ValueError: an op that has no explanation, or arguments the op would not take.

    >>> print(metalcore.explain("softmax", (8, 4096)))
    """
    tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
    if dtype is None:
        dtype = tensors[0].dtype if tensors else torch.float32
    shapes = [tuple(value.shape if isinstance(value, torch.Tensor) else value) for value in inputs]
    found = _C.explain(op, shapes, str(dtype).removeprefix("torch."), options)
    return Explanation(op, found["variant"], found["why"], tuple(Step(**step) for step in found["steps"]))
