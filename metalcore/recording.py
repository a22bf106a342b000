"""Recordings: lists of the dispatches that ops submit. They can be read, compared and submitted again."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from . import _C
from ._core import refused
from ._core.operators import ops
from ._core.routing import explained

__all__ = ["Buffer", "Dispatch", "Plan", "Recorder", "Recording", "on_meta", "planned_for_another", "record"]

# Set while metalcore.estimates counts: ops on all threads plan for another GPU then.
planned_for_another = threading.Event()


class Plan(NamedTuple):
    """The variant that an op chose, and why.

    It is `inner` if the op is a part of another operator.

    Example:
        >>> with metalcore.recording.on_meta("mps") as recorder:
        ...     factors = metalcore.qr(torch.empty(8, 4, device="meta"))
        >>> recorder.recording.plans[0].variant
        'simd'
    """

    op: str
    variant: str
    why: str
    inner: bool


class Buffer(NamedTuple):
    """Memory that dispatches read or write.

    Attributes:
        role: "input" (an argument of the call, also if the call writes to it), "output" (a result) or "scratch".
        nbytes: the size of the storage in bytes.

    Example:
        >>> _, recording = metalcore.recording.record(metalcore.silu, torch.ones(64, device="mps"))
        >>> [(buffer.role, buffer.nbytes) for buffer in recording.buffers]
        [('input', 256), ('output', 256)]
    """

    role: str
    nbytes: int


class Dispatch(NamedTuple):
    """A kernel, its grid (in threadgroups, or in threads if `threads`), and its arguments.

    An argument is (index, "bytes", bytes), (index, "threadgroup", number of bytes), (index, "buffer", place) or
    (index, "pointers", tuple of places). A place is (number of the buffer, first byte, number of bytes), or None.

    `seconds` estimates how long the dispatch takes on the slowest GPU that is supported, an M1 with 7 cores. `together`
    says how many threadgroups beside each other in y run at the same time and read each other's memory.

    Example:
        >>> _, recording = metalcore.recording.record(metalcore.silu, torch.ones(64, device="mps"))
        >>> len(recording.dispatches), recording.dispatches[0].seconds > 0
        (1, True)
    """

    kernel: str
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]
    threads: bool
    arguments: tuple
    seconds: float
    together: int

    def __str__(self):
        grid, group = ("×".join(map(str, sizes)) for sizes in (self.grid, self.threadgroup))
        what = "threads" if self.threads else "threadgroups"
        together = f", {self.together} together" if self.together > 1 else ""
        return f"{self.kernel}: {grid} {what}{together}, {group} threads a threadgroup"


class Recording:
    """The dispatches of a call's ops, in order. Recordings are equal if they do the same to buffers of the same roles
    and sizes.

    Attributes:
        plans: the choices of the ops.
        dispatches: the kernels that metalcore ran.
        torch_steps: (index of the dispatch after it, name of the operator) for each of PyTorch's operators in between.
        host_steps: what ops did on the host that no dispatch repeats.
        buffers: the memory that the dispatches use. The places of arguments are indices into it.

    Example:
        >>> x, other = torch.zeros(4, device="mps"), torch.ones(4, device="mps")
        >>> y, recording = metalcore.recording.record(metalcore.relu, x)
        >>> recording.submit([(x, other)])
        >>> y.tolist()
        [1.0, 1.0, 1.0, 1.0]
    """

    def __init__(self, number: int, inputs: Sequence[Tensor] = (), outputs: Sequence[Tensor] = ()):
        self._number = number
        weakref.finalize(self, _C.forget_recording, number)
        described = _C.describe_recording(number)
        self.plans = tuple(Plan(*plan) for plan in described["plans"])
        self.torch_steps = tuple(described["torch_steps"])
        self.host_steps = tuple(described["host_steps"])
        numbers, self.buffers = _buffers(ops._recorded_tensors(number), inputs, outputs)
        self.dispatches = tuple(_dispatch(entry, numbers) for entry in described["dispatches"])

    @property
    def kernels(self) -> tuple[str, ...]:
        return tuple(dispatch.kernel for dispatch in self.dispatches)

    def submit(self, replacements: Sequence[tuple[Tensor, Tensor]] = ()) -> None:
        """Submits the dispatches again. The second tensor of each pair replaces the first and all views of it. It must
        have the same shape, strides, dtype and device. Nothing else changes: results go to the same memory as before.

        Raises:
            RuntimeError: tensors do not match, or the recording has steps of PyTorch, which it cannot repeat.
        """
        if self.torch_steps:
            names = ", ".join(dict.fromkeys(name for _, name in self.torch_steps))
            raise RuntimeError(f"this recording cannot be submitted again: PyTorch did a part of it ({names})")
        ops._submit_recording(self._number, [old for old, _ in replacements], [new for _, new in replacements])

    def __eq__(self, other):
        if not isinstance(other, Recording):
            return NotImplemented
        return all(
            getattr(self, name) == getattr(other, name) for name in ("plans", "dispatches", "torch_steps", "buffers")
        )

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __str__(self):
        return "\n".join(self.lines())

    def lines(self) -> list[str]:
        """Returns one line for each kernel, with its first grid and how often it runs, and one for each of PyTorch's
        steps."""
        steps: list = [*self.dispatches]
        for before, name in reversed(self.torch_steps):
            steps.insert(before, name)
        times = Counter(step.kernel if isinstance(step, Dispatch) else step for step in steps)
        lines = {}
        for step in steps:
            name = step.kernel if isinstance(step, Dispatch) else step
            text = str(step) if isinstance(step, Dispatch) else f"{step}: PyTorch's"
            lines.setdefault(name, text + (f"; {times[name]} times" if times[name] > 1 else ""))
        return list(lines.values())


def _buffers(tensors, inputs, outputs):
    """Returns the number of each tensor's buffer, and the buffers in the order of their first use."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    input_storages, output_storages = (
        {tensor.untyped_storage()._cdata for tensor in tensors} for tensors in (inputs, outputs)
    )
    numbers: dict[int, int] = {}
    buffers = []
    for storage in storages:
        if storage._cdata not in numbers:
            numbers[storage._cdata] = len(buffers)
            role = (
                "input"
                if storage._cdata in input_storages
                else "output"
                if storage._cdata in output_storages
                else "scratch"
            )
            buffers.append(Buffer(role, storage.nbytes()))
    return [numbers[storage._cdata] for storage in storages], tuple(buffers)


def _dispatch(entry, numbers):
    def place(view):
        tensor, offset, span = view
        return None if tensor is None else (numbers[tensor], offset, span)

    def value(kind, bound):
        if kind == "buffer":
            return place(bound)
        return tuple(map(place, bound)) if kind == "pointers" else bound

    arguments = tuple((index, kind, value(kind, bound)) for index, kind, bound in entry["arguments"])
    return Dispatch(**{**entry, "arguments": arguments})


def record(function: Callable, *arguments: Any, **options: Any) -> tuple[Any, Recording]:
    """Runs a function, and returns its result and the recording of what this thread submitted. It has the names of
    PyTorch's operators in between, and not their work. Autograd runs backward on another thread, unless
    torch.autograd.set_multithreading_enabled(False).

    Example:
        >>> y, recording = metalcore.recording.record(metalcore.qr, torch.ones(8, 4, device="mps"))
        >>> recording.kernels
        ('qr_simd_8x8',)
    """
    inputs = [value for value in tree_leaves((arguments, options)) if isinstance(value, Tensor)]
    device = next((tensor.device.type for tensor in inputs if tensor.device.type != "cpu"), "mps")
    _C.begin_recording(device)
    try:
        with observed():
            result = function(*arguments, **options)
    finally:
        number = _C.end_recording()
    outputs = [value for value in tree_leaves(result) if isinstance(value, Tensor)]
    return result, Recording(number, inputs, outputs)


class Recorder:
    """The value of on_meta(). It has `recording` after the block.

    Example:
        >>> with metalcore.recording.on_meta("mps") as recorder:
        ...     factors = metalcore.qr(torch.empty(8, 4, device="meta"))
        >>> len(recorder.recording.dispatches)
        1
    """

    recording: Recording


@contextlib.contextmanager
def on_meta(device: str) -> Iterator[Recorder]:
    """Records metalcore's ops on meta tensors, which run their own code and no kernel. Inside the block this thread's
    meta tensors count as tensors on a type of device ("mps", "cuda").

    Example:
        >>> with metalcore.recording.on_meta("mps") as recorder:
        ...     factors = metalcore.qr(torch.empty(8, 4, device="meta"))
        >>> recorder.recording.kernels
        ('qr_simd_8x8',)
    """
    recorder = Recorder()
    outer = explained.device
    _C.begin_recording(device)
    explained.device = device
    try:
        with observed():
            yield recorder
    finally:
        explained.device = outer
        recorder.recording = Recording(_C.end_recording())


@contextlib.contextmanager
def observed(mode: TorchDispatchMode | None = None):
    """Runs metalcore's ops by their own code under this mode, by default an Observer, inside the block."""
    explained.observers += 1
    try:
        with mode or Observer():
            yield
    finally:
        explained.observers -= 1


class Observer(TorchDispatchMode):
    """Runs the kernels of metalcore's operators, also for meta tensors, and notes PyTorch's operators."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        if func.namespace == "metalcore" and not tensors:
            return func(*args, **kwargs)  # it reads a recording that was made inside of this one
        ours = func.namespace == "metalcore" and any(not tensor.is_cpu for tensor in tensors)
        if ours:
            _C.note_operator()
        if ours or func.namespace == refused.NAMESPACE:
            with self:  # it also notes the operators of PyTorch that the kernel calls
                return func.redispatch(_KEYS, *args, **kwargs)
        return self.by_torch(func, args, kwargs)

    def by_torch(self, func, args, kwargs):
        """Runs an operator of PyTorch's, and notes it if it did work."""
        run = _NOT_ON_META[func] if func in _NOT_ON_META and args[0].is_meta else func
        storages = storage_keys(args, kwargs)
        reads = torch.Tag.data_dependent_output in func.tags  # which fails on tensors without memory
        if reads:
            _C.note_torch_step(operator_name(func))
        result = run(*args, **kwargs)
        if not reads and did_work(func, storages, result):
            _C.note_torch_step(operator_name(func))
        return result


def _geqrf(A):
    return A.new_empty(A.shape), A.new_empty((*A.shape[:-2], min(A.shape[-2:])))


_NOT_ON_META: dict[Any, Any] = {torch.ops.aten.geqrf.default: _geqrf}  # PyTorch itself cannot run it without memory


# An operator's kernel is the same for every device, and so is a formula. (PyTorch redispatches without the GIL.)
_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.MPS)


def operator_name(func) -> str:
    return f"{func.namespace}::{func.overloadpacket.__name__}"


def storage_keys(*values) -> set[int]:
    """Returns what tells the storages of tensors from others, while they live."""
    return {
        value.untyped_storage()._cdata
        for value in tree_leaves(values)
        if isinstance(value, Tensor) and value.layout is torch.strided
    }


def did_work(func, storages: set[int], result) -> bool:
    """Returns whether an operator of PyTorch did more than make views of the storages that it was given, or
    uninitialized memory. The schemas of some, as contiguous and reshape, leave open whether they do."""
    if func.overloadpacket.__name__.startswith(("empty", "new_empty")) or torch.Tag.inplace_view in func.tags:
        return False
    if func._schema.is_mutable:
        return True
    tensors = [value for value in tree_leaves(result) if isinstance(value, Tensor)]
    return any(tensor.numel() and not storage_keys(tensor) <= storages for tensor in tensors)
