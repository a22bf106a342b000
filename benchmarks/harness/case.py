"""What a family file is made of.

A family is a function of a module of benchmarks/families, marked with @family. Its name is the family's, and its
docstring, or else its module's, begins with the title. It returns the cases for "gpu", "simulator" or "quick" (tiny
inputs). Most cases are a `Comparison`: inputs, two functions of them, and the bytes and operations that both need at
least. A case that is no call on a device is `Sampled`, and measures itself. A map's `Cell` is a comparison that is
measured briefly.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FAMILIES: dict[str, Callable[[str], Iterable[Case]]] = {}

# A value meets a target where it is on this side of the target's bound.
TARGETS = {
    "speedup": ">=",  # PyTorch's time over ours
    "share": ">=",  # the physical limit's time over ours
    "seconds": "<=",  # our time
    "excess": "<=",  # seconds of our call beyond PyTorch's
    "overhead": "<=",  # seconds of our call beyond a bare launch; runs before December 2026 had it
}


def family(cases):
    """Registers a function of the scale as the family that is named as it is."""
    FAMILIES[cases.__name__] = cases
    return cases


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    shape: str = ""
    dtype: torch.dtype | None = None
    # Bounds by quantity; they hold on NVIDIA GPUs.
    targets: Mapping[str, float] = field(default_factory=dict)

    @property
    def label(self):
        return " ".join(filter(None, [self.name, self.shape, dtype_name(self.dtype)]))


@dataclass(frozen=True, kw_only=True)
class Comparison(Case):
    """Our function against PyTorch's on the same inputs, timed by the device."""

    # It makes a tuple of inputs on a device. It is called several times where inputs take turns.
    inputs: Callable[[torch.device], tuple]
    ours: Callable
    theirs: Callable
    # (function, *inputs) -> a call without arguments, of which only the call is timed.
    bind: Callable = functools.partial
    # Memory and arithmetic units have to do at least this: bytes read and written once, and float32 operations.
    bytes: int = 0
    flops: int = 0
    # The ceiling of operations (machine.py): the rate of matrix products in float32, or of those in bfloat16.
    peak: str = "matmul_float32"
    # Whether the calls can be captured in a CUDA graph, so that only the GPU's time counts and not the host's.
    graph: bool = True
    # (*inputs) -> the variant that metalcore takes.
    variant: Callable | None = None
    # (case, *inputs) raises where a side's result is wrong. Results of metalcore and PyTorch are the tests' matter.
    check: Callable | None = None


@dataclass(frozen=True, kw_only=True)
class Cell(Case):
    """One cell of a speed-up map: an op on a batch of n x n matrices. Both sides are called eagerly. Their inputs
    may lie in the cache."""

    n: int
    batch: int
    inputs: Callable[[torch.device], tuple]
    ours: Callable
    theirs: Callable
    # The cells of one op and n share it. Those with smaller batches are measured first.
    row: Row


@dataclass
class Row:
    """The last batches measured in a row of a map, with the seconds that a call took."""

    ours: tuple[int, float] | None = None
    theirs: tuple[int, float] | None = None


@dataclass(frozen=True, kw_only=True)
class Sampled(Case):
    """A case that no device's clock measures: `sample(run)` gives the Samples."""

    sample: Callable


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Seconds of a call, one number per round and side; `theirs` is None where PyTorch has no counterpart."""

    ours: list[float]
    theirs: list[float] | None = None
    method: str = "wall-clock time"
    # A sample has this many calls, and this many sets of inputs take turns in it.
    calls: int = 1
    sets: int = 1
    # Whether these sets fit into the last-level cache, so that no limit by memory applies.
    cached: bool = False
    # The smaller batch that PyTorch's time was measured with, where that time was multiplied.
    theirs_batch: int | None = None
    variant: str = ""


def backward(function, *inputs):
    """Binds a function's backward pass. Its graph is made once, and each call goes through it again."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    outputs = _tuple(function(*inputs))
    grads = [torch.randn_like(output) for output in outputs]
    return lambda: torch.autograd.grad(outputs, inputs, grads, retain_graph=True)


def forward_backward(function, *inputs):
    """Binds both passes of a function through autograd."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    grads = [torch.randn_like(output) for output in _tuple(function(*inputs))]
    return lambda: torch.autograd.grad(_tuple(function(*inputs)), inputs, grads)


def _tuple(outputs):
    return outputs if isinstance(outputs, tuple) else (outputs,)


def dtype_name(dtype):
    return "" if dtype is None else str(dtype).removeprefix("torch.")


def of_all(case: Callable, scale: str, *choices: Iterable) -> list:
    """Returns case(*one of each, scale) for all ways to choose one of each."""
    return [case(*chosen, scale) for chosen in itertools.product(*choices)]


def size_text(shape):
    return "x".join(map(str, shape))


# How a function is bound whose passes are timed. Benchmarks of both passes count the bytes of both.
KINDS = {"forward": functools.partial, "backward": backward, "forward+backward": forward_backward}


@dataclass(frozen=True, kw_only=True)
class RowsOp:
    """An op over the rows of arrays, whose limit is memory."""

    ours: Callable
    theirs: Callable
    # A letter for each tensor: x has the shape of the case, w is twice as wide, c has one number for each of its
    # columns, or channels, and l has logarithms of probabilities.
    tensors: str = "x"
    # Passes over an array of the shape of the case, forward and backward. The numbers of rows and columns do not count.
    passes: tuple[int, int] = (2, 3)
    # The name and the options by which explain() tells the variant of the forward pass from the tensors.
    explained: Callable | None = None


def over_rows(scale, ops: Mapping[str, RowsOp], shapes, targets, kinds=KINDS):
    """Returns the comparisons of ops for each pass, shape and dtype. `targets` is a function of the shape."""

    def case(name, kind, shape, dtype):
        op = ops[name]
        sizes = {"x": shape, "w": (*shape[:-1], 2 * shape[-1]), "c": shape[1:2], "l": shape}
        forward, backward = op.passes
        passes = ("forward" in kind) * forward + ("backward" in kind) * backward

        def inputs(device):
            numbers = [torch.randn(sizes[letter], device=device) for letter in op.tensors]
            return tuple(
                (x.log_softmax(-1) if letter == "l" else x).to(dtype) for x, letter in zip(numbers, op.tensors)
            )

        return Comparison(
            name=f"{name} {kind}",
            shape=size_text(shape),
            dtype=dtype,
            ours=op.ours,
            theirs=op.theirs,
            bind=kinds[kind],
            inputs=inputs,
            bytes=passes * math.prod(shape) * dtype.itemsize,
            variant=None if kind == "backward" else op.explained,
            targets=targets(shape) if scale == "gpu" else {},
        )

    return [case(*chosen) for chosen in itertools.product(ops, kinds, shapes[scale], DTYPES)]
