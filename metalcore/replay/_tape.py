"""What a function submits while it runs once: metalcore's dispatches, and PyTorch's operators in between."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from .. import _C
from .._core.recording import Observer, did_work, observed, operator_name, storage_keys

__all__ = ["CaptureError", "Step", "Tape", "key_of", "reads_on_host", "refuse_host_work", "tensors_in"]


_MASKS = torch.bool, torch.uint8


class CaptureError(RuntimeError):
    """A function does something that a replay could not repeat. The message names it."""


class Step(NamedTuple):
    """A call of one of PyTorch's operators."""

    func: Any
    args: tuple
    kwargs: dict
    result: Any


def tensors_in(*values) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def key_of(tensor: Tensor) -> int:
    """What tells a tensor's storage from others, while it lives."""
    return tensor.untyped_storage()._cdata


class Tape(Observer):
    """The mode under which a function is recorded.

    Attributes:
        number: of the kept recording.
        steps: PyTorch's operators that did work, as many as the recording's `torch_steps`.
        names: the names of these.
        host_steps: what ops did on the host that no dispatch repeats.
        host_reads: the names of operators whose result the host reads, or whose shape depends on data.
        made: the keys of storages that came into being meanwhile.
    """

    device: str
    number: int
    host_steps: list[str]

    def __init__(self):
        super().__init__()
        self.steps: list[Step] = []
        self.host_reads: list[str] = []
        self.found: set[int] = set()  # storages that were there before
        self.made: set[int] = set()
        self._alive: dict[int, Any] = {}  # so that no storage takes the place, and the key, of another one

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """What torch.compile made runs as it is, in place of the Python code that it was made of."""
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
        """The storages that came into being meanwhile, with their keys."""
        return [(key, self._alive[key]) for key in self.made]

    def forget(self) -> None:
        """Lets go of all memory."""
        self.steps.clear()
        self._alive.clear()
        _C.forget_recording(self.number)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for tensor in tensors_in(args, kwargs):
            self._note(tensor, self.found)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        for tensor in tensors_in(result):
            self._note(tensor, self.made)
        return result

    def by_torch(self, func, args, kwargs):
        given = storage_keys(args, kwargs)
        if reads_on_host(func, args, kwargs):
            self.host_reads.append(operator_name(func))
        own_args, own_kwargs = _as_they_are(args, kwargs)
        result = func(*args, **kwargs)
        if did_work(func, given, result):
            _C.note_torch_step(operator_name(func))
            self.steps.append(Step(func, own_args, own_kwargs, _as_they_are(result)[0]))
        return result

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
    """The values with other tensors of the same memory: the function may give its own another shape in place."""
    return tree_map_only(Tensor, Tensor.detach, values)


def reads_on_host(func, args, kwargs) -> bool:
    """Whether what comes after the operator may depend on values on the device."""
    if torch.Tag.data_dependent_output in func.tags:
        return True
    if torch.Tag.dynamic_output_shape in func.tags:  # of index, which selects by bool tensors or by numbers
        numbers = func is torch.ops.aten.index.Tensor and not any(t.dtype in _MASKS for t in tensors_in(args[1]))
        return not numbers
    devices = [tensor.device.type for tensor in tensors_in(args, kwargs)]
    if all(device == "cpu" for device in devices):
        return False
    if func._schema.is_mutable:
        return devices[0] == "cpu"
    device = kwargs.get("device")
    return device is not None and torch.device(device).type == "cpu"


def refuse_host_work(what: str, tape: Tape) -> None:
    """Raises CaptureError where the host did what no replay repeats."""
    reads = ", ".join(dict.fromkeys(tape.host_reads))
    if reads:
        raise CaptureError(
            f"{what}: the host waits for values on the device, which are others at every replay ({reads}: .item(), "
            ".tolist(), .cpu(), bool(tensor), or shapes that depend on data)"
        )
    if tape.host_steps:
        raise CaptureError(f"{what}: a replay would not repeat what happens on the host: {'; '.join(tape.host_steps)}")
