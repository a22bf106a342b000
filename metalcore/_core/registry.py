"""The registry of metalcore's ops: one `Op` for every public function, registered in the module that defines it.

    register(
        Op(
            "silu",
            silu,
            namesake="torch.nn.functional.silu",
            operators=("silu", "silu_backward"),
            override=(Override("silu"), Override("silu_backward")),
            samples=lambda: (Sample("rows", ((64, 1000),)), Sample("few", ((7,),))),
        )
    )

Whatever is done for every op reads it from here: overrides, explain, selftest, tests, benchmarks and the docs' tables.

    op = OPS["silu"]
    for sample in op.samples():
        tensors = sample.make("mps", torch.float16)
        ours = op.compute(sample, tensors)
        theirs = op.compute(sample, [tensor.cpu().double() for tensor in tensors], op.reference)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from .routing import FLOAT_DTYPES

__all__ = ["OPS", "Op", "OptimizerOverride", "Override", "Sample", "register"]

Shape = tuple[int, ...]


def _as_they_are(*tensors: Tensor) -> tuple:
    return tensors


def _floats(found: Any) -> list[Tensor]:
    found = [found] if isinstance(found, Tensor) else found
    return [value for value in found if isinstance(value, Tensor) and value.is_floating_point()]


def _plain_call(function: Callable, *arguments: Any, **options: Any) -> Any:
    return function(*arguments, **options)


@dataclass(frozen=True, eq=False)
class Sample:
    """The arguments of a call, small enough for any device, the simulated one included.

    Attributes:
        name: what the sample shows, or which plan it reaches: "short rows", "60x40". No two of an op are alike.
        shapes: those of the tensors that the arguments are made of. An op that has a derivative has one with respect
            to each of them.
        options: keyword arguments.
        arguments: tensors of these shapes -> the positional arguments, where they are not just the tensors. It runs on
            the tensors' device and is differentiable.
        prepare: for each of the first tensors a function of random normal float32 numbers on the CPU that gives its
            values, where not every value will do.
        terms: how many numbers the longest sum has that a result is made of, on which the bound of its error depends.
        roundings: how often a result is rounded to its own dtype on the way.
        backward: whether the derivative of this call exists, if the op has one.
    """

    name: str
    shapes: tuple[Shape, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    arguments: Callable[..., tuple] = _as_they_are
    prepare: tuple[Callable[[Tensor], Tensor], ...] = ()
    terms: int = 1
    roundings: int = 1
    backward: bool = True

    @property
    def elements(self) -> int:
        """How many there are in all tensors; 0 where one has none."""
        sizes = [math.prod(shape) for shape in self.shapes]
        return sum(sizes) if all(sizes) else 0

    def make(self, device: torch.device | str, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
        """The tensors, the same ones for the same seed, rounded to `dtype`."""
        values = [random(shape, 100 * seed + index) for index, shape in enumerate(self.shapes)]
        values[: len(self.prepare)] = [prepare(value) for prepare, value in zip(self.prepare, values)]
        return [value.to(dtype).to(device) for value in values]


def random(shape: Shape, seed: int) -> Tensor:
    """Random normal float32 numbers on the CPU."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), device="cpu", dtype=torch.float32)


@dataclass(frozen=True, eq=False)
class Override:
    """A kernel that enable_pytorch_overrides() puts into PyTorch's dispatcher.

    Attributes:
        operator: whose kernel is replaced, of aten: "_softmax".
        kernel: None, where the kernel is in C++, beside the op (csrc/ops/replacement.h). Else what makes one in Python:
            `kernel(previous, count, left)` gives a function of the dispatcher's keyset and the operator's arguments.
            `previous` is the kernel that was there, `count.ran` is to be increased for a call that our operator takes,
            and `left(keyset, …)` counts and runs what it does not take. It calls the operators torch.ops.metalcore.…,
            never metalcore's public functions, which would send what they do not take to the PyTorch function that is
            being overridden.
        at_autograd: at the autograd key of the device, not at the device's own.
        dtypes: what it takes.
    """

    operator: str
    kernel: Callable[[Any, Any, Callable], Callable] | None = None
    at_autograd: bool = False
    dtypes: frozenset[torch.dtype] = FLOAT_DTYPES


@dataclass(frozen=True, eq=False)
class OptimizerOverride:
    """A class of optimizers whose constructor enable_pytorch_overrides() makes choose a class of ours, where a
    parameter is one for the kernel.

    Attributes:
        original: PyTorch's class.
        replacement: gives the class that its instances become, which is a subclass of both the op's and PyTorch's.
    """

    original: type
    replacement: Callable[[], type]


@dataclass(frozen=True, eq=False)
class Op:
    """A public function, or class of optimizers, with all that is said of it elsewhere.

    Attributes:
        name: that of the function, as in metalcore.<name>, and in explain and enable_pytorch_overrides.
        function: what the user calls.
        samples: gives the sample inputs, which together reach the plans of the op's kernels.
        namesake: the function of PyTorch's with the same arguments and results: "torch.linalg.qr". None: it has none.
        reference: computes the same as the function from the same arguments, in PyTorch's ops. The namesake's function,
            where nothing else is given.
        call: `call(function, *arguments, **options)`, where it is not just that: how the function, or the reference, is
            run on a sample.
        results: what is found -> the tensors in it that are to be compared; those that are not unique, such as singular
            vectors, as something that is. All the floating-point ones, where nothing else is given.
        operators: the names, as in torch.ops.metalcore.<name>, of the operators that the function and its derivative
            are made of.
        override: what enable_pytorch_overrides(name) replaces.
        dtypes: what the kernels take.
        backward: whether it has a derivative.
        waits: whether the host waits for a result to raise an error, or keeps a count of its own; such a call cannot be
            part of a CUDA graph.
    """

    name: str
    function: Callable
    samples: Callable[[], tuple[Sample, ...]]
    namesake: str | None = None
    reference: Callable = field(default=None)  # pyright: ignore[reportAssignmentType]  (__post_init__ sees to it)
    call: Callable[..., Any] = _plain_call
    results: Callable[[Any], Sequence[Tensor]] = _floats
    operators: tuple[str, ...] = ()
    override: tuple[Override, ...] | OptimizerOverride | None = None
    dtypes: frozenset[torch.dtype] = FLOAT_DTYPES
    backward: bool = True
    waits: bool = False

    def __post_init__(self):
        if self.reference is None:
            if self.namesake is None:
                raise TypeError(f"{self.name}: an op without a namesake needs a reference")
            object.__setattr__(self, "reference", attrgetter(self.namesake.removeprefix("torch."))(torch))

    def smallest_sample(self) -> Sample:
        """The one with the fewest elements, less those without any."""
        return min((sample for sample in self.samples() if sample.elements), key=lambda sample: sample.elements)

    def compute(self, sample: Sample, tensors: Sequence[Tensor], function: Callable | None = None) -> list[Tensor]:
        """What the function, or another with its arguments such as the reference, makes of a sample's tensors."""
        found = self.call(function or self.function, *sample.arguments(*tensors), **sample.options)
        return list(self.results(found))


OPS: dict[str, Op] = {}


def register(op: Op) -> None:
    """Adds an op to the registry."""
    if op.name in OPS:
        raise ValueError(f"there is an op {op.name!r} already")
    OPS[op.name] = op
