"""How long a dispatch takes on a chip: what it asks of each resource, at what the resource gives.

A core has four schedulers, each of which begins an instruction of a simdgroup in a cycle or more. Its on-core memory,
the GPU's second-level cache, the last-level cache and memory each give so many bytes. The slowest of these bounds the
dispatch. Where two take about as long, they do not overlap wholly: times are joined as a norm.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from .chips import OCCUPANCY, Chip
from .counts import Buffer, Counted

SCHEDULERS = 4
LINE = 128
TAG = 16  # finding a line in the first-level cache takes as long as so many of its bytes

# Cycles of a scheduler for an instruction of a simdgroup. Those of exp2, recip, rsqrt, products of integers, shuffle
# and simd_sum are metal-benchmarks', of 8x8 products 17 (float16) and 18 (float32); others are made of these.
CYCLES = {
    "float32.div": 8, "float32.rem": 16, "float32.sqrt": 8, "float32.round": 1, "float16.div": 8, "float16.sqrt": 8,
    "int32.mul": 4, "int16.mul": 4, "int64.mul": 16, "int64.add": 2, "int64.minmax": 4, "int32.div": 40,
    "int16.div": 40, "int64.div": 120, "select": 1, "compare": 1, "branch": 1, "convert": 1,
    "special.exp": 5, "special.exp2": 4, "special.exp10": 5, "special.log": 5, "special.log2": 4, "special.log10": 5,
    "special.sqrt": 8, "special.rsqrt": 8, "special.rsqrt_precise": 8, "special.sin": 16, "special.cos": 16,
    "special.tanh": 12, "special.pow": 12,
    "simd.fetch": 2, "simd.fetch_first": 2, "simd.fill": 4, "simd.ballot": 2, "simd.is_first": 2, "simd.reduce": 14.5,
    "simd.prefix": 20, "quad.fetch": 2, "quad.reduce": 4,
    "matrix.float16": 17, "matrix.bfloat16": 17, "matrix.float32": 18,
    "barrier": 4, "barrier.simdgroup": 1,
}  # fmt: skip
SPECIAL = 20  # of other special functions, which are programs
WHOLE = {"int32.add", "int16.add", "int32.minmax", "int16.minmax", "compare", "select", "branch", "convert"}


class Parameters(NamedTuple):
    """What is fitted. `RANGES` has each one's range and source.

    Attributes:
        efficiency: the part of its cycles in which a scheduler begins an instruction, with enough simdgroups.
        whole: cycles of an instruction on integers, a comparison, a selection, a conversion or a branch: addresses and
            conditions are folded into others.
        access: cycles of a scheduler for an access.
        bank: cycles of a core for each time the bank is used that an access to threadgroup memory uses most.
        core: bytes of a cycle and core from the first-level cache.
        gpu: bytes of a cycle and core from the second-level cache.
        memory: the part of the specified bandwidth that kernels get.
        norm: how times of resources are joined: 1 adds them, infinity takes the longest.
        matrix: cycles of an 8x8 product from M3 on, to those before.
        launch: microseconds from one dispatch to the next.
        trip: milliseconds of a measurement by the host, to the GPU and back.
    """

    efficiency: float = 0.85
    whole: float = 0.6
    access: float = 2.0
    bank: float = 1.0
    core: float = 64.0
    gpu: float = 32.0
    memory: float = 0.85
    norm: float = 4.0
    matrix: float = 1.0
    launch: float = 2.0
    trip: float = 0.2


RANGES = {
    "efficiency": (0.6, 1.0, "metal-benchmarks: 102 of 128 products a cycle by matrices, 24 simdgroups saturate"),
    "whole": (0.2, 1.0, "one cycle each on M1; compilers fold addresses and conditions"),
    "access": (0.5, 8.0, "not known"),
    "bank": (0.5, 4.0, "32 banks of 4 bytes, 64 to 128 bytes a cycle; not known"),
    "core": (32.0, 128.0, "metal-benchmarks: 64"),
    "gpu": (16.0, 64.0, "metal-benchmarks: about 32"),
    "memory": (0.6, 0.98, "STREAM and copies: 0.78 to 0.9 of the specification"),
    "norm": (1.5, 10.0, "not known"),
    "matrix": (0.5, 1.2, "not known for M3 and M4"),
    "launch": (0.5, 5.2, "ferrox#149: 3 microseconds; gpu-forge: 0.6 on the GPU and 5.2 on the host"),
    "trip": (0.1, 0.3, "gpu-forge: 0.12 ms; measured.tsv: 0.1 to 0.3 ms"),
}


def cycles_of(kind: str, chip: Chip, p: Parameters) -> float:
    """Returns how many cycles of a scheduler an instruction takes; accesses have resources of their own beside it."""
    if kind.endswith((".load", ".store", ".atomic")):
        return 0.0 if kind.startswith("constant") else p.access
    if kind in WHOLE:
        return p.whole
    if kind.startswith("matrix."):
        return CYCLES[kind] * (p.matrix if chip.generation >= 3 else 1.0)
    if kind.startswith("special."):
        return CYCLES.get(kind, SPECIAL)
    if kind.startswith(("bfloat16", "float64")):
        raise ValueError(f"no chip has instructions of kind {kind}")
    return CYCLES.get(kind, 1.0)


def resident(counted: Counted) -> int:
    """Returns how many threadgroups a core holds: 60 KB of threadgroup memory, and as many threads as registers leave;
    1024 where their number is not known."""
    halves = 2 * (counted.registers or 0)
    most = next((threads for halves_of, threads in OCCUPANCY if halves <= halves_of), OCCUPANCY[-1][1])
    threads = math.prod(counted.group)
    by_memory = 60 * 1024 // counted.threadgroup_memory if counted.threadgroup_memory else 64
    return max(1, min(most // threads, by_memory))


def read_again(counted: Counted, chip: Chip) -> float:
    """Returns how often a threadgroup fetches a line that it reads."""
    read, once = counted.memory.get(("device", "load")), sum(b.read for b in counted.buffers)
    return max(1.0, read.missed[chip.generation >= 3] / once) if read and once else 1.0


def _fetched(buffer: Buffer, counted: Counted, groups: int, again: float, cache: float) -> tuple[float, float]:
    """Returns the bytes of an argument that a dispatch fetches from memory or writes there, and those it uses in all.

    Args:
        groups: threadgroups that run at a time.
        again: how often a threadgroup reads a line again that its first-level cache has lost.
        cache: bytes for which the last-level cache has room.
    """
    counts = [-(-t // g) for t, g in zip(counted.threads, counted.group, strict=True)]
    shared = [max(0.0, s) for s in buffer.shared]
    of_group = LINE * (buffer.read + buffer.written) / counted.groups

    def distinct(sides):
        size = of_group
        for side, part in zip(sides, shared, strict=True):
            size *= 1 + (side - 1) * (1 - part)
        return size

    used = min(distinct(counts), LINE * (buffer.read + buffer.written), max(buffer.bytes, of_group))
    sides, left = [], groups
    for count in counts:
        sides.append(min(count, max(1, left)))
        left //= sides[-1]
    wave = min(distinct(sides), used)
    reads = buffer.read / max(1.0, buffer.read + buffer.written)
    waves = counted.groups / math.prod(sides)
    if wave > cache:  # what one pass over the data leaves behind, the next does not find
        return used * (1 + reads * (again - 1)), used
    return (used if used <= cache / 2 else min(max(used, wave * waves), LINE * (buffer.read + buffer.written))), used


class Times(NamedTuple):
    """Seconds that a dispatch takes, as far as each resource goes, and in all."""

    arithmetic: float
    matrices: float
    threadgroup: float
    core: float
    gpu: float
    memory: float
    launch: float
    total: float

    @property
    def bound(self) -> str:
        """The resource that takes longest."""
        return max(zip(self[:-1], self._fields[:-1], strict=True))[1]


def times(counted: Counted, chip: Chip, p: Parameters) -> Times:
    """Returns how long a dispatch takes on a chip."""
    hertz = chip.clock * 1e9
    at_once = resident(counted)
    simdgroups = -(-math.prod(counted.group) // 32)
    # The last threadgroups leave cores without work, and few simdgroups leave schedulers without instructions.
    used = min(chip.cores, counted.groups)
    turns = math.ceil(counted.groups / chip.cores) * chip.cores / counted.groups if counted.groups > chip.cores else 1.0
    active = simdgroups * min(at_once, max(1, counted.groups // chip.cores))
    hidden = min(1.0, 0.3 + 0.7 * active / 8)
    issue = SCHEDULERS * used * hertz * p.efficiency * hidden / turns
    cycles = {kind: n * cycles_of(kind, chip, p) for kind, n in counted.instructions.items()}
    products = sum(n for kind, n in cycles.items() if kind.startswith("matrix."))
    memory = counted.memory
    passes = sum(m.passes for (space, _), m in memory.items() if space == "threadgroup")
    device = [m for (space, _), m in memory.items() if space == "device"]
    own = sum(m.bytes for (space, _), m in memory.items() if space == "thread")
    asked, missed = sum(m.bytes + TAG * m.lines for m in device), sum(m.missed[chip.generation >= 3] for m in device)
    again = read_again(counted, chip)
    cache = chip.cache * 1e6
    moved = [_fetched(b, counted, chip.cores * at_once, again, cache) for b in counted.buffers]
    arithmetic = (sum(cycles.values()) - products) / issue
    matrices = products / issue
    threadgroup = passes * p.bank * turns / (used * hertz)
    core = (asked + own) * turns / (p.core * used * hertz)
    gpu = missed * LINE * turns / (p.gpu * used * hertz)
    dram = sum(fetched for fetched, _ in moved) / (p.memory * chip.bandwidth * 1e9)
    parts = (arithmetic + matrices, threadgroup, core, gpu, dram)
    joined = sum(part**p.norm for part in parts) ** (1 / p.norm) if any(parts) else 0.0
    launch = p.launch * 1e-6
    return Times(arithmetic, matrices, threadgroup, core, gpu, dram, launch, joined + launch)


def kind_of(counted: Counted, found: Times, chip: Chip) -> str:
    """Returns which kernels are like a dispatch: errors of measured ones of its kind make its interval."""
    special = any(kind.startswith("special.") for kind in counted.instructions)
    if found.matrices:
        if chip.generation >= 5:
            return "matrices from M5 on"  # which have other instructions for them, that nobody has published
        if special:
            return "attention"
        return "matrices float32" if "matrix.float32" in counted.instructions else "matrices float16"
    if found.memory < 0.8 * max(found.arithmetic, found.threadgroup, found.core, found.gpu):
        return "on the core"
    return "memory"
