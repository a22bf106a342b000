"""Recordings of programs in files: the dispatches of one run, by the kind of device, for libmetalcore (docs/c.md).

A recording names kernels, and says what is bound to each of their arguments: a part of an input, of an output, of a
constant (a tensor of the file or of the weights) or of the scratch memory, or bytes. Built-in kernels have a digest of
their source; generated ones have the source, and for NVIDIA GPUs its translation.
"""

from __future__ import annotations

import functools
import os
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..._core import generated_kernels
from ..._core.arena import ALIGNMENT
from ...replay import Capture, CaptureError
from ..ir import mutated_storages, storage_of, value
from .container import Container, ProgramFileError, strict_json
from .encoding import is_dense, name_of_dtype

if TYPE_CHECKING:
    from ..program import Program

__all__ = ["RECORDINGS", "prepare", "read_recordings", "record", "told"]

RECORDINGS = "recordings"  # the name of the text in the file's metadata

_LIBRARY = Path(__file__).resolve().parents[2] / "lib"


def record(program: Program, constant: Callable[[torch.UntypedStorage], dict[str, Any]]) -> dict[str, Any]:
    """Runs a program, with static values as they are, and returns what a run submits, as JSON takes it.

    Args:
        constant: describes memory that was there before, for a program that is loaded: a tensor of the file or of the
            weights.

    Raises:
        ValueError: a part of the program is not metalcore's, or its inputs and results are no arrays of their own.
    """
    _refuse_written_inputs(program)
    args, kwargs = program.arguments()
    try:
        with program.static_values_kept():
            captured = program.capture(*args, warmup=1, bind=True, **kwargs)
    except CaptureError as error:
        raise ValueError(
            f"a recording has metalcore's kernels alone: {error}. metalcore.compile(…, fusions=[…]) with the names of "
            "all patterns, also of linear, conv and attention, makes more of a program metalcore's"
        ) from None
    return _Recorded(program, captured, constant).described()


_KINDS = {
    "metalcore": str,
    "weights": (str, type(None)),
    "inputs": list,
    "outputs": list,
    "constants": list,
    "scratch": int,
    "kernels": dict,
    "generated": dict,
    "dispatches": list,
}


def read_recordings(file: Container) -> dict[str, dict[str, Any]]:
    """Returns the recordings of an open file by kind of device, to be read by people: libmetalcore checks what it runs.

    Raises:
        ProgramFileError: they are not such recordings.
    """
    try:
        recordings = strict_json(file.metadata.get(RECORDINGS, "{}"))
    except ValueError as error:
        raise ProgramFileError(f"the recordings cannot be read: {error}") from None
    if not isinstance(recordings, dict):
        raise ProgramFileError("the recordings are no object")
    for recording in recordings.values():
        if not isinstance(recording, dict) or set(recording) != set(_KINDS):
            raise ProgramFileError("a recording has other entries than recordings have")
        if not all(isinstance(recording[name], kind) for name, kind in _KINDS.items()):
            raise ProgramFileError("an entry of a recording is of another kind")
        if not all(isinstance(dispatch, dict) and "kernel" in dispatch for dispatch in recording["dispatches"]):
            raise ProgramFileError("a dispatch names no kernel")
    return recordings


def prepare(program: Program, path: str | os.PathLike, folder: str | os.PathLike) -> list[str]:
    """Compiles the generated kernels of a file's recording for this machine's CPU, where libmetalcore has no compiler.

    Args:
        program: the file's, loaded on the simulated device. Its kernels are generated again: no source of the file is
            compiled.
        path: of the file.
        folder: gets the kernels, in normal/ and checking/.

    Returns:
        The names of the kernels.

    Raises:
        ProgramFileError: the file has another kernel than this metalcore generates.
    """
    with Container(path) as file:
        wanted = list(read_recordings(file).get("mps", {"generated": {}})["generated"])
    generated = set(program.generated_kernels())
    for name in wanted:
        if name not in generated:
            raise ProgramFileError(f"{path}: another version generated kernel {name[:80]!r}: save the program again")
        for kind, checking in (("normal", False), ("checking", True)):
            target = Path(folder) / kind / f"{name}.so"
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(generated_kernels.shared_object(name, None, checking, False), target)
    return wanted


def told(kind: str, recording: dict[str, Any]) -> list[str]:
    """Returns a recording in text: how much it is, and how often each kernel runs."""
    times = Counter(str(dispatch["kernel"]) for dispatch in recording["dispatches"])
    counts = [f"{len(recording[name])} {name}" for name in ("dispatches", "constants")]
    lines = [f"recording for {kind}: {', '.join(counts)}, {recording['scratch']} bytes of scratch memory"]
    generated = recording["generated"]
    return lines + [f"  {n} {name}{' (generated)' if name in generated else ''}" for name, n in times.most_common()]


def _refuse_written_inputs(program):
    graph = program.graph
    written = mutated_storages(graph)
    for node in graph.nodes:
        if node.op == "placeholder" and isinstance(value(node), Tensor) and storage_of(value(node)) in written:
            raise ValueError(f"a recording leaves its inputs as they are, and the program writes into {node.target}")


class _Recorded:
    def __init__(self, program, captured: Capture, constant):
        self._capture, self._constant, self._is_cuda = captured, constant, program.device.type == "cuda"
        self._inputs = {name: example for name, example in program.inputs.items() if isinstance(example, Tensor)}
        self._constants: dict[int, tuple[int, dict]] = {}
        arena = captured.replay.arena_bytes
        self._scratch = -(-arena // ALIGNMENT) * ALIGNMENT
        places = {tensor.untyped_storage()._cdata: ("input", i) for i, tensor in enumerate(captured.examples)}
        if program.arena is not None:
            places[program.arena.untyped_storage()._cdata] = ("scratch", self._scratch)
            self._scratch += program.arena.nbytes
        self._outputs = list(self._results(places))
        self._buffers = [
            ("scratch", memory) if isinstance(memory, int) else places.get(memory._cdata) or self._kept(memory)
            for memory in captured.replay.memory
        ]

    def described(self) -> dict[str, Any]:
        dispatches = self._capture.replay.recording.dispatches
        kernels = dict.fromkeys(dispatch.kernel for dispatch in dispatches)
        return {
            "inputs": [{"name": name, **_form(tensor)} for name, tensor in self._inputs.items()],
            "outputs": self._outputs,
            "constants": [described for _, described in self._constants.values()],
            "scratch": self._scratch,
            "kernels": {name: _digest(name) for name in kernels if not generated_kernels.is_known(name)},
            "generated": {name: self._generated(name) for name in kernels if generated_kernels.is_known(name)},
            "dispatches": [self._dispatch(dispatch) for dispatch in dispatches],
        }

    def _results(self, places):
        written = {m._cdata for m in self._capture.replay.memory if not isinstance(m, int)}
        leaves = enumerate(tree_leaves(self._capture.result))
        results = [(f"result_{number}", leaf) for number, leaf in leaves if isinstance(leaf, Tensor)]
        for number, (name, result) in enumerate(results):
            key = result.untyped_storage()._cdata
            if key in places or key not in written and result.numel():
                raise ValueError(f"{name} is memory that it shares with an argument, a constant or another result")
            if result.storage_offset() or not is_dense(result.shape, result.stride()):
                raise ValueError(f"{name} is a part of larger memory; a recording has results of their own memory")
            places[key] = ("output", number)
            yield {"name": name, **_form(result)}

    def _kept(self, storage):
        key = storage._cdata
        if key not in self._constants:
            self._constants[key] = len(self._constants), self._constant(storage)
        return "constant", self._constants[key][0]

    def _generated(self, name):
        sources: dict[str, Any] = {"msl": generated_kernels.source(name)}
        if self._is_cuda:
            sources["cuda"] = generated_kernels.translated(name)
        return sources

    def _dispatch(self, dispatch):
        return {
            **({"together": dispatch.together} if dispatch.together > 1 else {}),
            "kernel": dispatch.kernel,
            "threads" if dispatch.threads else "threadgroups": list(dispatch.grid),
            "threadgroup": list(dispatch.threadgroup),
            "arguments": [[index, kind, *self._bound(kind, bound)] for index, kind, bound in dispatch.arguments],
        }

    def _bound(self, kind, bound):
        if kind == "bytes":
            return [bound.hex()]
        if kind == "threadgroup":
            return [bound]
        return self._place(bound) if kind == "buffer" else [[self._place(place) for place in bound]]

    def _place(self, place):
        """Returns [what of, its number, the first byte, bytes]; [] for nothing."""
        if place is None:
            return []
        number, first, nbytes = place
        what, base = self._buffers[number]
        return ["scratch", 0, base + first, nbytes] if what == "scratch" else [what, base, first, nbytes]


def _form(tensor):
    entry = {"dtype": name_of_dtype(tensor.dtype), "shape": list(tensor.shape)}
    return entry if tensor.is_contiguous() else {**entry, "strides": list(tensor.stride())}


def _digest(kernel):
    """Returns the digest of a built-in kernel's source."""
    return _digests()[_families()[kernel]]


@functools.cache
def _families():
    lines = [line.split() for line in (_LIBRARY / "index").read_text().splitlines()]
    return {kernel: family for family, *kernels in lines for kernel in kernels}


@functools.cache
def _digests():
    return dict(line.split() for line in (_LIBRARY / "digests").read_text().splitlines())
