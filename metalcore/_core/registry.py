"""The registry of metalcore's ops: one `Op` for every public function, registered in the module that defines it.

    register(
        Op(
            "silu",
            silu,
            namesake="torch.nn.functional.silu",
            operators=("silu", "silu_backward"),
            override=(Override("silu"), Override("silu_backward")),
            samples=lambda: (Sample("rows", ((64, 1000),)), Sample("few", ((7,),))),
            production=lambda batch_size=8, hidden_size=4096: Sample("", ((batch_size, hidden_size),)),
        )
    )

All code that handles every op reads the registry: overrides, explain, selftest, tests, benchmarks and the docs' tables.

    op = OPS["silu"]
    for sample in op.samples():
        tensors = sample.make("mps", torch.float16)
        ours = op.compute(sample, tensors)
        theirs = op.compute(sample, [tensor.cpu().double() for tensor in tensors], op.reference)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from .routing import DEVICES, FLOAT_DTYPES

__all__ = ["OPS", "FunctionOverride", "Op", "OptimizerOverride", "Override", "Sample", "register"]

Shape = tuple[int, ...]


def _unchanged(*tensors: Tensor) -> tuple:
    return tensors


def _floats(returned: Any) -> list[Tensor]:
    values = [returned] if isinstance(returned, Tensor) else returned
    return [
        value for value in values if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
    ]


def _plain_call(function: Callable, *arguments: Any, **options: Any) -> Any:
    return function(*arguments, **options)


@dataclass(frozen=True, eq=False)
class Sample:
    """The arguments of a call, small enough for any device, the simulated one included.

    Attributes:
        name: what the sample shows, or which plan it reaches: "short rows", "60x40". It is unique among the op's
            samples.
        shapes: the shapes of the tensors from which the arguments are made. An op that has a derivative has one with
            respect to each of them.
        options: keyword arguments.
        arguments: a function from tensors of these shapes to the positional arguments. It runs on the tensors' device
            and is differentiable. By default the tensors are the arguments.
        prepare: functions for the first tensors, where an op does not take all values. Each turns random normal float32
            numbers on the CPU into a tensor's values.
        terms: the number of terms of the longest sum in a result, on which the bound of the error depends.
        roundings: how often a result is rounded to its own dtype.
        backward: whether the derivative of this call exists, if the op has one.
    """

    name: str
    shapes: tuple[Shape, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    arguments: Callable[..., tuple] = _unchanged
    prepare: tuple[Callable[[Tensor], Tensor], ...] = ()
    terms: int = 1
    roundings: int = 1
    backward: bool = True

    @property
    def elements(self) -> int:
        """The number of elements of all tensors, or 0 if one of them has none."""
        sizes = [math.prod(shape) for shape in self.shapes]
        return sum(sizes) if all(sizes) else 0

    def make(self, device: torch.device | str, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
        """Returns the tensors, rounded to `dtype`. The same seed gives the same values."""
        values = [random(shape, 100 * seed + index) for index, shape in enumerate(self.shapes)]
        values[: len(self.prepare)] = [prepare(value) for prepare, value in zip(self.prepare, values)]
        return [value.to(dtype).to(device) for value in values]


def random(shape: Shape, seed: int) -> Tensor:
    """Returns random normal float32 numbers on the CPU."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), device="cpu", dtype=torch.float32)


@dataclass(frozen=True, eq=False)
class Override:
    """A kernel that enable_pytorch_overrides() puts into PyTorch's dispatcher.

    Attributes:
        operator: the operator of aten whose kernel it replaces: "_softmax".
        kernel: None if the kernel is in C++, beside the op (csrc/ops/common/replacement.h). Otherwise it makes the
            kernel: `kernel(previous, count, decline)` returns a function of the dispatcher's keyset and the operator's
            arguments. `previous` is the replaced kernel. The function returns `count.run(operator, …)` for a call that
            our operator takes, and `decline(keyset, …)`, which counts and runs the call, for all others. It calls
            the operators torch.ops.metalcore.…, and never metalcore's public functions. These would send calls that
            they do not take to the overridden function of PyTorch.
        at_autograd: whether it is registered at the autograd key of the device, and not at the device's own key.
        dtypes: the dtypes that it takes.
        composite: an operator of aten that reaches `operator` by its composite kernel, except where PyTorch has another
            kernel for it (linalg_svd: on a Mac before PyTorch 2.14, which computes it on the CPU, without derivative).
            There the composite kernel takes its place.
        devices: the types of devices on which it replaces PyTorch's kernel.
        elsewhere: why it does not on others.
        own_calls: of an operator without a kernel on a Mac, `own_calls(release, *arguments)` says for which calls
            PyTorch has one all the same. metalcore/mac_kernels.py has the facts for all other operators.
        alone: makes the kernel instead of `kernel` where these calls, and with them the override's other operators, are
            left to PyTorch.
    """

    operator: str
    kernel: Callable[[Any, Any, Callable], Callable] | None = None
    at_autograd: bool = False
    dtypes: frozenset[torch.dtype] = FLOAT_DTYPES
    composite: str | None = None
    devices: frozenset[str] = DEVICES
    elsewhere: str = "PyTorch's kernels are faster there"
    own_calls: Callable[..., bool] | None = None
    alone: Callable[[Any, Any, Callable], Callable] | None = None

    @property
    def is_backward(self) -> bool:
        return "backward" in self.operator


@dataclass(frozen=True, eq=False)
class OptimizerOverride:
    """A class of optimizers whose step enable_pytorch_overrides() replaces. Each step chooses the kernel if it takes
    one of the parameters: they may have come to the device since the optimizer was made.

    Attributes:
        original: PyTorch's class.
        replacement: the class whose `step_of(optimizer, count, closure)` steps its instances. These stay what
            they are.
        fused: the operator of aten in which PyTorch's step ends where its groups have fused=True, if there is one. On
            a Mac that has a Metal kernel, which keeps these steps by default.
    """

    original: type
    replacement: type
    fused: str | None = None


@dataclass(frozen=True, eq=False)
class FunctionOverride:
    """Functions of PyTorch, written in Python, that enable_pytorch_overrides() replaces in their modules.

    Attributes:
        functions: by its place ("torch.nn.utils.clip_grad_value_"), what makes the function that replaces one:
            `make(previous, count, decline)`. `previous` is the replaced function. Ours returns `count.run(…)` of what
            the kernels take, and `decline(*arguments)`, which counts and calls `previous`, of all others.
    """

    functions: Mapping[str, Callable[[Callable, Any, Callable], Callable]]


@dataclass(frozen=True, eq=False)
class Op:
    """A public function, or a class of optimizers, and what other code needs to know about it.

    Attributes:
        name: the name of the function, as in metalcore.<name>, and in explain and enable_pytorch_overrides.
        function: the function that the user calls.
        samples: returns the sample inputs, which together reach the plans of the op's kernels.
        namesake: PyTorch's function with the same arguments and results ("torch.linalg.qr"), or None.
        reference: computes the same as the function from the same arguments with PyTorch's ops. By default it is the
            namesake.
        call: `call(function, *arguments, **options)` runs the function, or the reference, on a sample. By default it is
            a plain call.
        results: a function from the returned value to the tensors that tests compare. Instead of tensors that are not
            unique, such as singular vectors, it returns something that is. By default it returns all floating-point
            tensors.
        operators: the names, as in torch.ops.metalcore.<name>, of the operators that the function and its derivative
            use.
        override: what enable_pytorch_overrides(name) replaces.
        dtypes: the dtypes that the kernels take.
        integers: the dtypes of the tensor arguments that are integers.
        backward: whether it has a derivative.
        waits: whether the host waits for a result to raise an error, or counts something itself. Such a call cannot be
            part of a CUDA graph.
        production: returns a sample of the size that models use, for keyword arguments that have defaults:
            `production(batch_size=4, vocab_size=32000)`. The simulated device computes the default in a second. By
            default it is the first sample with another first dimension.
        error: a part of the message of the RuntimeError that the function raises where the device takes none of its
            kernels. By default there is no error: PyTorch's ops compute the result.
        edge: returns samples of values at the edges of what the op takes. The default is the smallest sample with large
            and tiny values, and if it has no `prepare`, with zeros and a NaN (metalcore/golden/selection.py).
    """

    name: str
    function: Callable
    samples: Callable[[], tuple[Sample, ...]]
    namesake: str | None = None
    reference: Callable = field(default=None)  # pyright: ignore[reportAssignmentType]  (__post_init__ sets it)
    call: Callable[..., Any] = _plain_call
    results: Callable[[Any], Sequence[Tensor]] = _floats
    operators: tuple[str, ...] = ()
    override: tuple[Override, ...] | OptimizerOverride | FunctionOverride | None = None
    dtypes: frozenset[torch.dtype] = FLOAT_DTYPES
    integers: Mapping[str, torch.dtype] = field(default_factory=dict)
    backward: bool = True
    waits: bool = False
    production: Callable[..., Sample] = field(default=None)  # pyright: ignore[reportAssignmentType]
    error: str | None = None
    edge: Callable[[], tuple[Sample, ...]] | None = None

    def __post_init__(self):
        if self.reference is None:
            if self.namesake is None:
                raise TypeError(f"{self.name}: an op without a namesake needs a reference")
            object.__setattr__(self, "reference", self.pytorch)
        if self.production is None:
            object.__setattr__(self, "production", self._repeated)

    @property
    def family(self) -> str:
        """The package that defines the function: "linalg"."""
        return self.function.__module__.removeprefix("metalcore.").partition(".")[0]

    @property
    def pytorch(self) -> Callable | None:
        """PyTorch's function of the same name, which takes the same arguments."""
        return None if self.namesake is None else attrgetter(self.namesake.removeprefix("torch."))(torch)

    def _repeated(self, batch_size: int = 64) -> Sample:
        sample = next(sample for sample in self.samples() if sample.elements)
        first = sample.shapes[0][0]
        shapes = tuple((batch_size, *shape[1:]) if shape[0] == first else shape for shape in sample.shapes)
        return replace(sample, name="", shapes=shapes)

    def smallest_sample(self) -> Sample:
        """Returns the sample with the fewest elements, except those without any."""
        return min((sample for sample in self.samples() if sample.elements), key=lambda sample: sample.elements)

    def compute(self, sample: Sample, tensors: Sequence[Tensor], function: Callable | None = None) -> list[Tensor]:
        """Returns the results of the function, or of another one such as the reference, for a sample's tensors. Complex
        ones are given as their real and imaginary parts."""
        returned = self.call(function or self.function, *sample.arguments(*tensors), **sample.options)
        return [torch.view_as_real(x.resolve_conj()) if x.is_complex() else x for x in self.results(returned)]


OPS: dict[str, Op] = {}


def register(op: Op) -> None:
    """Adds an op to the registry."""
    if op.name in OPS:
        raise ValueError(f"there is an op {op.name!r} already")
    OPS[op.name] = op
