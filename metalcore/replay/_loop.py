"""A recording that is run again and again: one loop in C++ over its dispatches, and PyTorch's operators in between."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_map_only

from .. import _C
from .._core.arena import fixed_memory, peak, place
from .._core.operators import ops
from .._core.torch_operators import out_variant, reads_storage
from ..recording import Recording
from ._tape import Replay, Step, Tape, key_of, tensors_in

__all__ = ["Loop"]


class Loop(Replay):
    """What a tape has, to be run again. It lets go of the tape.

    Intermediate results and scratch memory move into one piece of memory, the arena, where they share places by their
    lifetimes. Everything else stays where it was when it was recorded, and is kept: parameters and other tensors that
    were there before, outputs, and what somebody else still holds.
    """

    def __init__(self, tape: Tape, inputs: Sequence[Tensor], outputs: Sequence[Tensor]):
        self.recording = Recording(tape.number, inputs, outputs)
        self.names = tape.names
        self._inputs = len(inputs)
        output_keys = {key_of(tensor) for tensor in outputs}
        keys = list(dict.fromkeys(map(key_of, ops._recorded_tensors(tape.number))))
        lives = _lives(tape, self.recording, keys)
        storages = {key: storage for key, storage in tape.storages() if key in lives and key not in output_keys}
        device = next((tensor.device for tensor in ops._recorded_tensors(tape.number)), None)
        by_begin = {
            key_of(tensor)
            for step in tape.steps
            if reads_storage(step.func, step.args, step.kwargs)
            for tensor in tensors_in(step.args)
        }
        moved = [
            key for key in storages if storages[key].device == device and storages[key].nbytes() and key not in by_begin
        ]

        stay = set(keys) - set(moved)
        kept = {key_of(t): t.untyped_storage() for t in ops._recorded_tensors(tape.number) if key_of(t) in stay}
        wholes = [_tensor(storages[key], torch.uint8) for key in moved]
        self._number = ops._make_replay([tape.number], [*inputs, *wholes])
        weakref.finalize(self, _C.forget_replay, self._number)
        steps = [_placed(step, set(moved)) for step in tape.steps]
        sizes = {key: storages[key].nbytes() for key in moved}
        weak = {key: StorageWeakRef(storages[key]) for key in moved}
        before = [before for before, _ in self.recording.torch_steps]
        del wholes, storages
        tape.forget()

        # What somebody still holds stays where it is.
        held = {key: torch.UntypedStorage._new_with_weak_ptr(weak[key].cdata) for key in moved}
        free = [key for key in moved if held[key] is None]
        values = [(*lives[key], sizes[key]) for key in free]
        offsets, self.arena_bytes = place(values)
        self.peak_bytes, self.own_bytes = peak(values), sum(sizes[key] for key in free)
        self._arena = fixed_memory(self.arena_bytes, device)
        arena = self._arena.untyped_storage()
        homes = {key: (arena, offset) for key, offset in zip(free, offsets)}
        homes |= {key: (storage, 0) for key, storage in held.items() if storage is not None}
        self.bind(inputs)
        ops._bind_replay(
            self._number,
            self._inputs,
            [_tensor(homes[key][0], torch.uint8, homes[key][1], (sizes[key],)) for key in moved],
        )
        self.owned = {arena._cdata, *output_keys}
        kept |= {key: storage for key, storage in held.items() if storage is not None}
        self.memory = tuple(kept[key] if key in kept else homes[key][1] for key in keys)
        self._parts = self._make_parts(before, [_call(step, homes) for step in steps])
        self.segments = len(self._parts) - len(steps)
        self._run = self._parts[0] if len(self._parts) == 1 and not steps else self._run_parts

    def bind(self, inputs: Sequence[Tensor]) -> None:
        ops._bind_replay(self._number, 0, inputs)

    def run(self) -> None:
        self._run()

    @torch.no_grad()
    def _run_parts(self):
        with torch._C._DisableAutocast():
            for part in self._parts:
                part()

    def _make_parts(self, before, calls):
        parts: list[Callable[[], Any]] = []
        first = 0
        for end, call in [*zip(before, calls), (len(self.recording.dispatches), None)]:
            if end > first:
                parts.append(functools.partial(_C.run_replay, self._number, first, end))
            first = end
            if call:
                parts.append(call)
        return parts


def _lives(tape, recording, keys):
    """Returns {key of a storage: the first and the last of the steps that use it}; `keys` are those of the buffers."""
    lives: dict[int, tuple[int, int]] = {}

    def use(used, time):
        for key in used:
            lives[key] = (lives.get(key, (time, time))[0], time)

    steps = list(zip((before for before, _ in recording.torch_steps), tape.steps))
    time = at = 0
    for i in range(len(recording.dispatches) + 1):
        while at < len(steps) and steps[at][0] == i:
            step = steps[at][1]
            use(map(key_of, tensors_in(step.args, step.kwargs, step.result)), time)
            at, time = at + 1, time + 1
        if i < len(recording.dispatches):
            use((keys[number] for number in _buffers(recording.dispatches[i])), time)
            time += 1
    return lives


def _buffers(dispatch):
    """Yields the numbers of the buffers of a dispatch."""
    for _, kind, value in dispatch.arguments:
        places = (value,) if kind == "buffer" else value if kind == "pointers" else ()
        yield from (place[0] for place in places if place is not None)


class _Place(NamedTuple):
    """A tensor in memory that moves."""

    key: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


def _placed(step: Step, moved: set[int]) -> Step:
    """Returns the step, with the places of tensors whose memory moves. Of its result remains what is new memory."""

    def place_of(tensor):
        tensor = tensor.detach()
        key = key_of(tensor)
        if key not in moved:
            return tensor
        return _Place(key, tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset())

    storages = {key_of(tensor) for tensor in tensors_in(step.args, step.kwargs)}
    results = step.result if isinstance(step.result, (tuple, list)) else [step.result]
    new = [value if isinstance(value, Tensor) and key_of(value) not in storages else None for value in results]
    args, kwargs, new = tree_map_only(Tensor, place_of, (step.args, step.kwargs, new))
    return Step(step.func, args, kwargs, new)


def _call(step: Step, homes) -> Callable[[], Any]:
    """Returns the operator's call, which leaves its results where it left them when it was recorded."""

    def tensor_of(place):
        storage, offset = homes[place.key]
        return _tensor(storage, place.dtype, offset + place.offset * place.dtype.itemsize, place.shape, place.stride)

    args, kwargs, new = tree_map_only(_Place, tensor_of, (step.args, step.kwargs, step.result), is_leaf=_is_place)
    func = step.func
    if all(value is None for value in new):
        return lambda: func(*args, **kwargs)
    writable = all(value is not None and value.is_contiguous() for value in new)  # some write no other strides
    variant = out_variant(func, new[0].device) if writable else None
    if variant:
        into, names = variant
        kwargs |= dict(zip(names, new))
        return lambda: into(*args, **kwargs)

    def call_and_copy():
        result = func(*args, **kwargs)
        for target, value in zip(new, result if isinstance(result, (tuple, list)) else [result]):
            if target is not None:
                target.copy_(value)

    return call_and_copy


def _is_place(value):
    return isinstance(value, _Place)


def _tensor(storage, dtype, begin=0, shape=None, stride=None):
    """Returns a tensor of a storage's memory from byte `begin` on, by default all of it."""
    shape = (storage.nbytes() // dtype.itemsize,) if shape is None else shape
    stride = (1,) if stride is None else stride
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, begin // dtype.itemsize, shape, stride)
