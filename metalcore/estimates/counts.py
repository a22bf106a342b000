"""What kernels do, counted by the executor: instructions by kind, memory by place, each with its line of code."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from .. import _C
from .._core.generated_kernels import program_of
from ..msl.language.translate import translate
from ..msl.runtime import host
from ..msl.runtime.library import ShaderLibrary, ShaderProgram
from ..msl.runtime.resources import registers_of
from ..msl.runtime.targets import SimulatorTarget
from ..recording import planned_for_another
from . import instrument

# After so many blocks and accesses of a dispatch no further threadgroup is counted, and a dispatch of more than WHOLE
# does not also run as a whole, so that what it writes is not there.
EVENTS = 4_000_000
WHOLE = 2_000_000_000
TOGETHER = 16  # A program of so many kernels is compiled once; of a larger one each kernel is.
_translations: dict[str, Any] = {}  # by the path of a library that counts: what returns the translation it came from
_with_registers = False
_KINDS = ("load", "store", "atomic", "load", "store")  # by msl_abi::AccessKind


class Memory(NamedTuple):
    """Accesses to one address space. All figures but `lanes` and `bytes` are of simdgroups.

    Attributes:
        times: accesses; those to neighbouring addresses, as to a vector's components, count as one.
        lanes: accesses of single threads.
        bytes: what these ask for.
        lines: lines of 128 bytes that each touches, summed.
        sectors: parts of 32 bytes that each touches, summed.
        passes: of threadgroup memory, how often the bank is used that each uses most, summed.
        missed: lines that caches of 8 KiB and 64 KiB did not hold, each of one threadgroup.

    Example:
        >>> with metalcore.estimates.counting() as counts:
        ...     y = metalcore.relu(torch.ones(64, device="mps"))
        >>> counts[0].memory["device", "load"].lines
        2.0
    """

    times: float = 0
    lanes: float = 0
    bytes: float = 0
    lines: float = 0
    sectors: float = 0
    passes: float = 0
    missed: tuple[float, float] = (0, 0)


class Buffer(NamedTuple):
    """What threadgroups touch of an argument.

    Attributes:
        argument: its index.
        bytes: that are bound.
        read, written: lines of 128 bytes, summed over threadgroups.
        distinct: lines that the sample touched.
        shared: the part of a threadgroup's lines that its neighbours along x, y and z touch too; -1 without one.
    """

    argument: int
    bytes: int
    read: float
    written: float
    distinct: int
    shared: tuple[float, float, float]


class Counted(NamedTuple):
    """A dispatch. Figures stand for all of its threadgroups; `sampled` of `groups` were counted.

    Attributes:
        instructions: of simdgroups, by kind, such as "float32.fma", "special.exp", "simd.reduce" or "device.load".
        lines: the same for each line of the program, by (file, line).
        lanes: the part of the lanes that work, over all instructions.
        parted: branches at which lanes of a simdgroup went different ways.
        memory: by address space ("device", "constant", "threadgroup", "thread") and "load", "store" or "atomic".
        ran: whether the kernel also ran as a whole.
        registers: of a thread, by another compiler than Apple's; None where nobody asked, or there is no NVRTC.

    Example:
        >>> with metalcore.estimates.counting() as counts:
        ...     y = metalcore.relu(torch.ones(4096, device="mps"))
        >>> counts[0].parted, counts[0].lanes
        (0.0, 1.0)
    """

    kernel: str
    threads: tuple[int, int, int]
    group: tuple[int, int, int]
    groups: int
    sampled: int
    threadgroup_memory: int
    instructions: Counter
    lines: dict[tuple[str, int], Counter]
    lanes: float
    parted: float
    memory: dict[tuple[str, str], Memory]
    buffers: tuple[Buffer, ...]
    ran: bool
    registers: int | None = None


@functools.lru_cache(maxsize=64)
def _table(path):
    """Returns what instrument.py wrote of a library's blocks and accesses."""
    text = ctypes.string_at(ctypes.addressof(ctypes.c_char.in_dll(ctypes.CDLL(path), "msl_table")))
    return json.loads(text)


def _counted(entry) -> Counted:
    table = _table(entry["path"])
    entry["ran"] |= entry["path"] in _ran
    scale = entry["groups"] / entry["sampled"]
    places = [(file.removeprefix(f"{host._KERNELS}/"), line) for file, line in table["places"]]
    instructions: Any = Counter()
    lines: dict[tuple[str, int], Any] = {}
    working = possible = parted = 0
    for number, simdgroups, lanes, apart in entry["blocks"]:
        parted += apart * scale
        for place, kinds in table["blocks"][number][1].items():
            of_line = lines.setdefault(places[int(place)], Counter())
            for kind, times in kinds.items():
                instructions[kind] += times * simdgroups * scale
                of_line[kind] += times * simdgroups * scale
                working, possible = working + times * lanes, possible + times * simdgroups * 32
    memory = {}
    for site in entry["sites"]:
        access, place = table["sites"][site["site"]]
        key = site["space"], _KINDS[access]
        values = [site["simdgroups"], *(site[name] for name in Memory._fields[1:-1])]
        added = Memory(*(value * scale for value in values), missed=tuple(m * scale for m in site["missed"]))
        before = memory.get(key, Memory())
        memory[key] = Memory(
            *(a + b for a, b in zip(before[:-1], added[:-1], strict=True)),
            missed=tuple(a + b for a, b in zip(before.missed, added.missed, strict=True)),
        )
        instructions[".".join(key)] += added.times
        lines.setdefault(places[place], Counter())[".".join(key)] += added.times
    buffers = tuple(
        Buffer(b["index"], b["bytes"], b["read"] * scale, b["written"] * scale, b["distinct"], b["shared"])
        for b in entry["buffers"]
    )
    return Counted(
        instructions=instructions,
        lines=lines,
        lanes=working / possible if possible else 1.0,
        parted=parted,
        memory=memory,
        buffers=buffers,
        registers=registers_of(_translations[entry["path"]](), entry["kernel"]) if _with_registers else None,
        **{
            name: entry[name]
            for name in ("kernel", "threads", "group", "groups", "sampled", "threadgroup_memory", "ran")
        },
    )


@functools.lru_cache(maxsize=16)
def _translated(family):
    source = host._KERNELS / f"{family}.metal"
    text = source.read_text(encoding="utf-8")
    return text, translate(text, include_dirs=[source.parent, host._KERNELS], filename=f"{family}.metal")


def _compiled(kernel, family):
    """Returns the path of a library that counts, for the executor."""
    if family is None:
        program = program_of(kernel)
        path = os.fspath(instrument.compiled(program.translation.source(), msl=program.source))
        _translations[path] = lambda: program.translation
        return path
    text, translation = _translated(family)
    path = os.fspath(instrument.compiled(translation.source([kernel]), msl=text, filename=f"{family}.metal"))
    _translations[path] = lambda: _translated(family)[1]
    return path


def taken() -> list[Counted]:
    """Returns what was counted since the last call, inside of counting(), whose list then has the rest."""
    return [*map(_counted, _C.simulator_take_counts())]


@contextlib.contextmanager
def counting(
    *, family: str = "", cores: int = 0, events: int = EVENTS, whole: int = WHOLE, registers: bool = False
) -> Iterator[list[Counted]]:
    """Counts what metalcore's ops and programs on simulated `mps` tensors dispatch inside the block, on all threads.
    The list has a Counted for each dispatch after the block. What was captured before runs as the function that it
    was, since its plans were those of another GPU.

    Args:
        family: the family of GPUs whose tuning rows plans take, such as "apple9".
        cores: how many cores the GPU has that plans are for; 0 is the family's usual number.
        events: after so many blocks and accesses no further threadgroup of a dispatch is counted.
        whole: a dispatch of more of these does not run as a whole, so that what it writes is not there. Kernels of
            compile_shader() always do.
        registers: compile each kernel once more, by NVRTC, which tells how many registers it takes.

    Raises:
        RuntimeError: this is no simulated device, or kernels are counted already.

    Example:
        >>> with metalcore.estimates.counting() as counts:
        ...     y = metalcore.relu(torch.ones(64, device="mps"))
        >>> counts[0].memory["device", "store"].bytes
        256.0
    """
    if not hasattr(_C, "simulator_set_counting"):
        raise RuntimeError("counting(): kernels are counted on the simulated device, on Linux")
    if planned_for_another.is_set():
        raise RuntimeError("counting(): kernels are counted already, by another block or by METALCORE_COUNT")
    global _with_registers
    counts: list[Counted] = []
    _with_registers = registers
    _C.simulator_take_counts()
    _C.simulator_set_counting(_compiled, events, whole, family, cores)
    planned_for_another.set()
    SimulatorTarget.run = _run_and_count
    try:
        yield counts
    finally:
        SimulatorTarget.run = _run
        planned_for_another.clear()
        _C.simulator_set_counting(None, 0, 0, "", 0)
        counts.extend(taken())
        _with_registers = False
        _translations.clear()


def _run_counting(program, kernel, *launch):
    """Runs a kernel of compile_shader() in a library that counts, which leaves no results. Returns its path."""
    names = None if len(program.names) <= TOGETHER else [kernel]
    path = os.fspath(instrument.compiled(program.translation.source(names), msl=program.source))
    _translations[path] = lambda: program.translation
    _C.simulator_dispatch(_C.simulator_load(path), kernel, *launch)
    return path


_run = SimulatorTarget.run
_ran = set()  # the libraries that count the programs whose kernels also ran as wholes


def _run_and_count(self, kernel, buffers, lengths, threads, group):
    """Takes the place of SimulatorTarget.run while kernels are counted."""
    _ran.add(_run_counting(self._program, kernel, buffers, lengths, threads, group))
    _run(self, kernel, buffers, lengths, threads, group)


class _CountingTarget(SimulatorTarget):
    """Runs the kernels of a program in a library that counts."""

    def prepare(self):
        """Leaves errors to the first call."""

    def run(self, kernel, buffers, lengths, threads, group):
        _run_counting(self._program, kernel, buffers, lengths, threads, group)


class CountedLibrary(ShaderLibrary):
    """A program of MSL whose kernels are counted when they are called inside counting(). They leave no results.

    It is made as by compile_shader().

    Example:
        >>> source = "kernel void twice(device float* x, uint i [[thread_position_in_grid]]) { x[i] *= 2; }"
        >>> program = metalcore.estimates.CountedLibrary(source)
        >>> with metalcore.estimates.counting() as counts:
        ...     program.twice(torch.ones(64, device="mps"), group_size=64)
        >>> counts[0].instructions["float32.add"] + counts[0].instructions["float32.mul"]
        2.0
    """

    def __init__(self, source: str, *, include_dirs=(), constants=None, aligned=False):
        self._counting = None
        super().__init__(ShaderProgram(source, [os.fspath(path) for path in include_dirs], constants or {}, aligned))

    def _target(self, device=None) -> Any:
        if self._counting is None:
            self._counting = _CountingTarget(self._program)
        return self._counting
