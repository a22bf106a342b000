"""What a function submits while it runs once, metalcore's dispatches and PyTorch's operators in between, and what
replays of it tell about themselves."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from .. import _C
from ..recording import Observer, Recording, did_work, observed, operator_name, storage_keys

__all__ = ["CaptureError", "Replay", "Step", "Tape", "key_of", "refuse_host_work", "tensors_in"]

_MASKS = torch.bool, torch.uint8


class CaptureError(RuntimeError):
    """The error of a function that does something which a replay could not repeat. The message names it.

    Example:
        >>> try:
        ...     metalcore.capture(lambda x: x * x.sum().item(), torch.ones(4, device="mps"))
        ... except metalcore.replay.CaptureError:
        ...     print("item() reads from the device")
        item() reads from the device
    """


class Step(NamedTuple):
    """A call of one of PyTorch's operators."""

    func: Any
    args: tuple
    kwargs: dict
    result: Any


def tensors_in(*values) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def key_of(tensor: Tensor) -> int:
    """Returns what tells a tensor's storage from others, while it lives."""
    return tensor.untyped_storage()._cdata


class Tape(Observer):
    """The mode under which a function is recorded.

    Attributes:
        number: of the kept recording.
        steps: PyTorch's operators that did work, as many as the recording's `torch_steps`.
        names: the names of these.
        host_steps: what ops did on the host that no dispatch repeats.
        host_reads: the names of operators whose result the host reads, or whose shape depends on data.
        host_copies: the names of operators that copy values to the CPU.
        host_operators: the names of operators that ran on the CPU after that.
        made: the keys of storages that came into being meanwhile.
    """

    device: str
    number: int
    host_steps: list[str]

    def __init__(self):
        super().__init__()
        self.steps: list[Step] = []
        self.host_reads: list[str] = []
        self.host_copies: list[str] = []
        self.host_operators: list[str] = []
        self.old: set[int] = set()  # storages that were there before
        self.new: set[int] = set()
        self._alive: dict[int, Any] = {}  # so that no storage takes the place, and the key, of another one

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Runs what torch.compile made as it is, in place of the Python code that it was made of."""
        return True

    def record(self, device: str, function: Callable[[], Any]) -> Any:
        """Runs the function. Autograd runs backward on this thread."""
        self.device = device
        _C.begin_recording(device)
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(torch.autograd.set_multithreading_enabled(False))
                stack.enter_context(observed(self))
                return function()
        finally:
            self.number = _C.end_recording()
            self.host_steps = _C.describe_recording(self.number)["host_steps"]

    @property
    def names(self) -> list[str]:
        return [operator_name(step.func) for step in self.steps]

    def storages(self):
        """Returns the storages that came into being meanwhile, with their keys."""
        return [(key, self._alive[key]) for key in self.new]

    def forget(self) -> None:
        """Lets go of all memory."""
        self.steps.clear()
        self._alive.clear()
        _C.forget_recording(self.number)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for tensor in tensors_in(args, kwargs):
            self._note(tensor, self.old)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        for tensor in tensors_in(result):
            self._note(tensor, self.new)
        return result

    def by_torch(self, func, args, kwargs):
        storages = storage_keys(args, kwargs)
        self.note_host(func, args, kwargs)
        own_args, own_kwargs = _as_they_are(args, kwargs)
        result = func(*args, **kwargs)
        if did_work(func, storages, result):
            _C.note_torch_step(operator_name(func))
            self.steps.append(Step(func, own_args, own_kwargs, _as_they_are(result)[0]))
        return result

    def note_host(self, func: Any, args: tuple, kwargs: dict) -> None:
        """Notes after which operators the host may depend on values on the device."""
        devices = [tensor.device.type for tensor in tensors_in(args, kwargs)]
        wanted = kwargs.get("device")
        to_cpu = wanted is not None and torch.device(wanted).type == "cpu"
        if _depends_on_data(func, args):
            self.host_reads.append(operator_name(func))
        elif any(kind != "cpu" for kind in devices):
            if devices[0] == "cpu" if func._schema.is_mutable else to_cpu:
                self.host_copies.append(operator_name(func))
        elif devices and self.host_copies and not func.is_view and (wanted is None or to_cpu):
            self.host_operators.append(operator_name(func))

    def _note(self, tensor, kind):
        if tensor.layout is not torch.strided:
            raise CaptureError(
                f"capture: tensors of the layout {tensor.layout} have no memory of their own to replay in"
            )
        key = key_of(tensor)
        if key not in self._alive:
            self._alive[key] = tensor.untyped_storage()
            kind.add(key)


def _as_they_are(*values):
    """Returns the values with other tensors of the same memory: the function may give its own another shape in
    place."""
    return tree_map_only(Tensor, Tensor.detach, values)


def _depends_on_data(func, args):
    """Returns whether an operator gives the host a number, or results whose shapes depend on numbers."""
    if torch.Tag.data_dependent_output in func.tags:
        return True
    if torch.Tag.dynamic_output_shape not in func.tags:
        return False
    # index selects by bool tensors or by numbers
    return func is not torch.ops.aten.index.Tensor or any(t.dtype in _MASKS for t in tensors_in(args[1]))


def refuse_host_work(what: str, tape: Tape) -> None:
    """Raises CaptureError where the host did what no replay repeats."""
    waits = f"{what}: the host waits for values on the device, which are others at every replay"
    if tape.host_reads:
        raise CaptureError(
            f"{waits} ({_listed(tape.host_reads)}: .item(), .tolist(), bool(tensor), or shapes that depend on data)"
        )
    if tape.host_operators:
        raise CaptureError(
            f"{waits}: {_listed(tape.host_copies)} copies them to the CPU, where {_listed(tape.host_operators)} runs. "
            "The function calls .cpu() or .to('cpu'), or it is compiled, and PyTorch has no kernel of such an operator "
            f"for {tape.device}"
        )
    if tape.host_copies:
        raise CaptureError(
            f"{waits}: {_listed(tape.host_copies)} copies them to the CPU (.cpu(), .to('cpu'), .tolist())"
        )
    if tape.host_steps:
        raise CaptureError(f"{what}: a replay would not repeat what happens on the host: {'; '.join(tape.host_steps)}")


def _listed(names):
    return ", ".join(dict.fromkeys(names))


class Replay:
    """A recorded run of a function, which run() repeats.

    Attributes:
        recording: metalcore's dispatches, to read.
        names: PyTorch's operators that run between recorded parts, in their order.
        segments: how many recorded parts there are.
        arena_bytes, peak_bytes: the size of the memory that intermediate results and scratch memory share, and the most
            of it that is in use at once.
        own_bytes: the size that they would have without sharing.
        owned: the keys of the storages that a run writes and that are the replay's.
        memory: for each of the recording's buffers its first byte in the arena, or the storage that it is. A CUDA graph
            has none.
    """

    recording: Recording
    names: Sequence[str] = ()
    segments = 1
    arena_bytes = peak_bytes = own_bytes = 0
    owned: Collection[int] = ()
    memory: Sequence[int | torch.UntypedStorage] = ()

    def run(self) -> None:
        raise NotImplementedError

    def bind(self, inputs: Sequence[Tensor]) -> None:
        """Has the next runs use these tensors in the inputs' places."""
        raise NotImplementedError

    def lines(self) -> list[str]:
        """Returns what runs, and where intermediate results live."""
        parts = f"{len(self.recording.dispatches)} dispatches of metalcore in {self.segments} recorded parts"
        arena = f"arena: {self.arena_bytes} bytes for intermediate results of {self.own_bytes} bytes"
        return [
            f"{parts}; {len(self.names)} calls of PyTorch's operators between them",
            f"{arena}, of which at most {self.peak_bytes} are in use at once",
            *self.recording.lines(),
        ]
