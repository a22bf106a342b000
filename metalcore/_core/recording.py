"""Recordings: the lists of dispatches that ops submit, kept to be read, compared and submitted again.

y, recording = record(metalcore.softmax, x, -1)
print(recording)
recording.submit([(x, other)])        # softmax of `other`, into y

with on_meta("cuda") as recorder:     # ops on meta tensors, which have no memory, are recorded and not run
    metalcore.qr(torch.empty(8, 4, device="meta"))
print(recorder.recording)
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .. import _C
from .operators import ops
from .routing import explained

__all__ = ["Buffer", "Dispatch", "Plan", "Recorder", "Recording", "on_meta", "record"]


class Plan(NamedTuple):
    """A choice that an op made among its variants, and why.

    It is `inner` where an operator made it that is a part of another one.
    """

    op: str
    variant: str
    why: str
    inner: bool


class Buffer(NamedTuple):
    """Memory that dispatches read or write.

    Attributes:
        role: "input" (what the call was given, also where it writes there), "output" (what it returned) or "scratch".
        nbytes: the size of the storage.
    """

    role: str
    nbytes: int


class Dispatch(NamedTuple):
    """A kernel, its grid (in threadgroups, or in threads where `threads`), and what is bound to its arguments.

    An argument is (index, "bytes", bytes), (index, "threadgroup", number of bytes), (index, "buffer", place) or
    (index, "pointers", tuple of places). A place is (number of the buffer, first byte, number of bytes), or None.
    """

    kernel: str
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]
    threads: bool
    arguments: tuple

    def __str__(self):
        grid, group = ("×".join(map(str, sizes)) for sizes in (self.grid, self.threadgroup))
        return f"{self.kernel}: {grid} {'threads' if self.threads else 'threadgroups'}, {group} threads a threadgroup"


class Recording:
    """What the ops of a call submitted, in order. Recordings are equal where the same is done to buffers of the same
    roles and sizes.

    Attributes:
        plans: the choices of the ops.
        dispatches: the kernels that metalcore ran.
        torch_steps: (index of the dispatch that comes after it, name of the operator) for what PyTorch did in between.
        buffers: the memory that the dispatches use; the places of their arguments count in it.
    """

    def __init__(self, number: int, inputs: Sequence[Tensor] = (), outputs: Sequence[Tensor] = ()):
        self._number = number
        weakref.finalize(self, _C.forget_recording, number)
        found = _C.describe_recording(number)
        self.plans = tuple(Plan(*plan) for plan in found["plans"])
        self.torch_steps = tuple(found["torch_steps"])
        numbers, self.buffers = _buffers(ops._recorded_tensors(number), inputs, outputs)
        self.dispatches = tuple(_dispatch(entry, numbers) for entry in found["dispatches"])

    @property
    def kernels(self) -> tuple[str, ...]:
        return tuple(dispatch.kernel for dispatch in self.dispatches)

    def submit(self, replacements: Sequence[tuple[Tensor, Tensor]] = ()) -> None:
        """Submits the dispatches again. In place of the first tensor of each pair, and of the views of it, they then
        use the second, which must have its shape, strides, dtype and device. Everything else stays: results are
        written where they were.

        Raises:
            RuntimeError: tensors that do not match, or steps of PyTorch's in between, which a recording cannot repeat.
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
        """One for each kernel, with its first grid and how often it runs, and for each of PyTorch's steps."""
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
    """The number of each tensor's buffer, and the buffers in the order in which they are met."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    given, returned = ({tensor.untyped_storage()._cdata for tensor in group} for group in (inputs, outputs))
    numbers: dict[int, int] = {}
    buffers = []
    for storage in storages:
        if storage._cdata not in numbers:
            numbers[storage._cdata] = len(buffers)
            role = "input" if storage._cdata in given else "output" if storage._cdata in returned else "scratch"
            buffers.append(Buffer(role, storage.nbytes()))
    return [numbers[storage._cdata] for storage in storages], tuple(buffers)


def _dispatch(entry, numbers):
    def place(found):
        tensor, offset, span = found
        return None if tensor is None else (numbers[tensor], offset, span)

    def value(kind, found):
        if kind == "buffer":
            return place(found)
        return tuple(map(place, found)) if kind == "pointers" else found

    arguments = tuple((index, kind, value(kind, found)) for index, kind, found in entry["arguments"])
    return Dispatch(entry["kernel"], entry["grid"], entry["threadgroup"], entry["threads"], arguments)


def record(function: Callable, *arguments: Any, **options: Any) -> tuple[Any, Recording]:
    """Runs a function, and gives its result and what this thread submitted for it. PyTorch's own work is not part of
    it. The backward of autograd runs on a thread of its own, unless torch.autograd.set_multithreading_enabled(False).
    """
    inputs = [value for value in tree_leaves((arguments, options)) if isinstance(value, Tensor)]
    device = next((tensor.device.type for tensor in inputs if tensor.device.type != "cpu"), "mps")
    _C.begin_recording(device)
    try:
        result = function(*arguments, **options)
    finally:
        number = _C.end_recording()
    outputs = [value for value in tree_leaves(result) if isinstance(value, Tensor)]
    return result, Recording(number, inputs, outputs)


class Recorder:
    """What on_meta() gives: after its block, `recording` is there."""

    recording: Recording


@contextlib.contextmanager
def on_meta(device: str) -> Iterator[Recorder]:
    """Inside the block this thread's meta tensors count as tensors of a type of device ("mps", "cuda"), and metalcore's
    ops on them, which run their own code, are recorded."""
    recorder = Recorder()
    outer = explained.device
    _C.begin_recording(device)
    explained.device = device
    try:
        with _OpsOnMeta():
            yield recorder
    finally:
        explained.device = outer
        recorder.recording = Recording(_C.end_recording())


class _OpsOnMeta(TorchDispatchMode):
    """Runs the kernels of metalcore's operators for meta tensors, and notes PyTorch's operators."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.namespace == "metalcore":
            _C.note_operator()
            with self:  # what the kernel asks PyTorch for is noted as well
                return _kernel(func).call_boxed(_KEYS, *args, **kwargs)
        if _works(func):
            _C.note_torch_step(f"aten::{func.overloadpacket.__name__}")
        return (_NOT_ON_META.get(func) or func)(*args, **kwargs)


def _geqrf(A):
    return A.new_empty(A.shape), A.new_empty((*A.shape[:-2], min(A.shape[-2:])))


_NOT_ON_META: dict[Any, Any] = {torch.ops.aten.geqrf.default: _geqrf}  # what PyTorch itself cannot do without memory


_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.MPS)


@functools.cache
def _kernel(func):
    return torch.library.get_kernel(func, "MPS")  # the same for every device


@functools.cache
def _works(func):
    """Whether an operator of PyTorch's does something: makes no mere view, and no memory that nobody has written."""
    name = func.overloadpacket.__name__
    return not (func.is_view or name.startswith(("empty", "new_empty", "detach", "sym_")))
