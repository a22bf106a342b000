"""Finds the fastest legal value of each tunable field, by the wall-clock time that a user waits, transfers and the
host's own work included.

A value matters only through the plans that it makes. So each distinct plan of a call is timed once, and a value's time
is the sum over the calls. That holds for every field: sizes at which another kernel takes over, numbers of threads, and
regions in which PyTorch's own op, or the CPU, is faster."""

from __future__ import annotations

import math
import random
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

import torch

from .. import _C
from . import store
from .workloads import Workload

__all__ = ["Clock", "Outcome", "Search", "Timing", "Tunable", "fit_regions", "text", "tunables"]

LONG_NOISE = 0.05


@dataclass(frozen=True)
class Timing:
    """The median seconds of a call, and the share of it by which the middle half of the samples differ."""

    seconds: float
    noise: float


class Clock:
    """Times calls on a type of device.

    Args:
        device_type: "mps" or "cuda".
        rounds: the samples of a call.
        sample_seconds: a sample has as many calls as take about so long.
    """

    def __init__(self, device_type: str, rounds: int, sample_seconds: float):
        self._synchronize = getattr(torch, device_type).synchronize
        self._rounds, self._sample_seconds = rounds, sample_seconds

    def time(self, call: Callable[[], Any]) -> Timing:
        self._sample(call, 1)  # compiles and loads kernels
        once = self._sample(call, 1)
        calls = max(1, min(1000, int(self._sample_seconds / max(once, 1e-7))))
        rounds = min(self._rounds, int(20 * self._rounds * self._sample_seconds / max(once, 1e-7)))
        if rounds < 2:  # a call that takes so long varies little
            return Timing(once, LONG_NOISE)
        samples = sorted(self._sample(call, calls) for _ in range(rounds))
        quarter = len(samples) // 4
        middle = median(samples)
        return Timing(middle, (samples[-1 - quarter] - samples[quarter]) / middle)

    def _sample(self, call, calls):
        self._synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        self._synchronize()
        return (time.perf_counter() - begin) / calls


# A value replaces the present one only where calls gain more than this, and more than the noise of their times.
LEAST_GAIN = 0.03
# A value is judged by so many calls at the least.
LEAST_CALLS = 3
# So many calls are timed again before that.
CONFIRMED = 6

NEVER = 1e9  # seconds of a call that fails
NO_REGIONS: list = []
EVERYWHERE = [[0, None, 1, None]]
# The first and the last number of matrices of the regions that are fitted.
BATCHES = ((1, 1), (2, 16), (17, None))


@dataclass(frozen=True)
class Tunable:
    """A field of a tuning table, its present value and the legal ones."""

    table: str
    field: str
    kind: str
    value: store.Value
    lowest: int
    highest: int
    step: int
    measured: bool
    per_core: int = 0  # the present value is so many for each of the GPU's cores, or 0

    @property
    def name(self) -> str:
        return f"{self.table}.{self.field}"


def tunables(device_type: str) -> list[Tunable]:
    """Returns every field that can be measured on a type of device."""
    return [Tunable(**{**entry, "value": store.value_of(entry)}) for entry in _C.tunables(device_type)]


@dataclass(frozen=True)
class Outcome:
    """What was found for a field.

    Attributes:
        value: the best value; the present one where no other was better.
        gain: by how much less time the calls that it concerns take, as a share of one.
        calls: the number of calls that some value concerns. 0: nothing was timed.
        note: why the present value stays, or "".
    """

    tunable: Tunable
    value: store.Value
    gain: float
    calls: int
    note: str = ""

    @property
    def changed(self) -> bool:
        return self.value != self.tunable.value


class Search:
    """Times calls on a GPU under different values.

    Args:
        gpu: where.
        clock: times calls.
        values: what is in use at the start beside the family's rows; tune() adds what it finds.
        progress: called with what is about to be timed.
    """

    def __init__(
        self, gpu: store.GPU, clock: Clock, values: store.Values, progress: Callable[[str], None] = lambda text: None
    ):
        self.gpu, self.values = gpu, dict(values)
        self._clock, self._progress = clock, progress
        self._deadline = math.inf
        self._times: dict[tuple, Timing] = {}

    def tune(self, tunable: Tunable, workloads: Sequence[Workload], deadline: float = math.inf) -> Outcome:
        """Finds the best value of one field, which is then in use.

        Args:
            tunable: the field.
            workloads: the calls that may depend on it.
            deadline: the time.monotonic() after which the rest of the calls is left out.
        """
        self._deadline = deadline
        try:
            outcome = self._tune(tunable, workloads)
        except TimeoutError:
            outcome = Outcome(tunable, tunable.value, 0.0, 0, "no time was left")
        except BaseException:
            self._use(self.values)
            raise
        if outcome.calls:
            self.values[tunable.name] = outcome.value
        self._use(self.values)
        return outcome

    def times(self) -> list[tuple[Workload, float]]:
        """Returns the calls that were timed with the plans which the values in use make, and their seconds."""
        device = self.gpu.device_type
        found = {w: t.seconds for (w, plan), t in self._times.items() if t.seconds < NEVER and plan == w.plan(device)}
        return [*found.items()]

    def _tune(self, tunable, workloads):
        candidates = _candidates(tunable, workloads)
        plans = self._plans(tunable, candidates, workloads)
        concerned = [i for i in range(len(workloads)) if len({row[i] for row in plans}) > 1]
        if not concerned:
            return Outcome(tunable, tunable.value, 0.0, 0, "it changes no plan of the calls")
        # Where the time is short, those that are timed should be of all kinds.
        random.Random(0).shuffle(concerned)
        workloads = [workloads[i] for i in concerned]
        plans = [tuple(row[i] for i in concerned) for row in plans]
        if tunable.kind == "regions":
            none, everywhere = self._seconds(tunable, [NO_REGIONS, EVERYWHERE], workloads)
            workloads = workloads[: len(none)]
            candidates = [tunable.value, fit_regions(workloads, none, everywhere, tunable.value)]
            plans = self._plans(tunable, candidates, workloads)
        # Of values with the same plans one is timed: the present one where it is among them.
        distinct = dict(zip(plans, candidates))
        distinct[plans[candidates.index(tunable.value)]] = tunable.value
        values = sorted(distinct.values(), key=lambda value: value != tunable.value)
        times = self._seconds(tunable, values, workloads)
        workloads = workloads[: len(times[0])]
        best = min(range(len(values)), key=lambda i: sum(math.log(t.seconds) for t in times[i]))
        if best == 0:
            return Outcome(tunable, tunable.value, 0.0, len(workloads), f"the fastest for {len(workloads)} calls")
        return self._confirmed(tunable, values[best], workloads, times[0], times[best])

    def _confirmed(self, tunable, value, workloads, before, after):
        """Returns the outcome for a value that seems faster: its gain has to show again where it is greatest."""
        differing = [i for i in range(len(workloads)) if before[i] is not after[i]]
        gain, noise = _gain([before[i] for i in differing], [after[i] for i in differing])
        if gain > max(LEAST_GAIN, noise):
            again = sorted(differing, key=lambda i: -abs(math.log(before[i].seconds / after[i].seconds)))[:CONFIRMED]
            few = [workloads[i] for i in again]
            second = [self._seconds(tunable, [v], few, fresh=True)[0] for v in (tunable.value, value)]
            confirmed, noise = _gain(*second)
            if confirmed > max(LEAST_GAIN, noise):
                return Outcome(tunable, value, gain, len(workloads))
        return Outcome(tunable, tunable.value, 0.0, len(workloads), f"{text(value)} gains no more than noise")

    def _use(self, values):
        store.use(self.gpu, values)

    def _plans(self, tunable, values, workloads):
        """Returns the plan of each call, under each value."""
        columns = [self._plans_of(tunable, values, workload) for workload in workloads]
        return list(zip(*columns))

    def _plans_of(self, tunable, values, workload):
        """Returns the plan of a call under each value. Between two numbers with the same plan no other one is
        expected."""

        def plan(value):
            self._use({**self.values, tunable.name: value})
            return workload.plan(self.gpu.device_type)

        if tunable.kind == "regions":
            return [plan(value) for value in values]
        plans = [None] * len(values)
        plans[0], plans[-1] = plan(values[0]), plan(values[-1])
        ranges = [(0, len(values) - 1)]
        while ranges:
            low, high = ranges.pop()
            if plans[low] == plans[high]:
                plans[low:high] = [plans[low]] * (high - low)
            elif high - low > 1:
                middle = (low + high) // 2
                plans[middle] = plan(values[middle])
                ranges += (low, middle), (middle, high)
        return plans

    def _seconds(self, tunable, values, workloads, fresh=False):
        """Returns the Timing of each call, under each value. A call's inputs are made once for all values.

        After the deadline the rest of the calls is left out, as long as there are some already.
        """
        columns = []
        for number, workload in enumerate(workloads, 1):
            try:
                say = f"{tunable.name}: {number}/{len(workloads)} {workload}"
                columns.append(self._seconds_of(tunable, values, workload, fresh, say))
            except TimeoutError:
                if number <= LEAST_CALLS:
                    raise
                break
        return list(zip(*columns))

    def _seconds_of(self, tunable, values, workload, fresh, say):
        call, column = None, []
        for value in values:
            self._use({**self.values, tunable.name: value})
            key = workload, workload.plan(self.gpu.device_type)
            if fresh or key not in self._times:
                if time.monotonic() > self._deadline and not fresh:
                    raise TimeoutError
                self._progress(f"{say}, {text(value)}")
                call = call or workload.call(self.gpu.device_type)
                self._times[key] = self._time(call, value == tunable.value)
            column.append(self._times[key])
        return column

    def _time(self, call, needed):
        try:
            return self._clock.time(call)
        except RuntimeError:  # PyTorch may lack an op that a region would send to it, or memory
            if needed:
                raise
            return Timing(NEVER, 0.0)


def _gain(before, after):
    """Returns (the mean share of their time that calls save, and the noise of that)"""
    saved = mean(
        1 - b.seconds / a.seconds if b.seconds < a.seconds else a.seconds / b.seconds - 1 for a, b in zip(before, after)
    )
    return saved, median(max(a.noise, b.noise) for a, b in zip(before, after)) / len(before) ** 0.5


def _candidates(tunable, workloads):
    """Returns values to try, the present one among them; numbers are in order."""
    if tunable.kind == "regions":
        return [NO_REGIONS, EVERYWHERE, tunable.value]
    ladder = {tunable.lowest, tunable.highest, *(workload.size for workload in workloads)}
    ladder |= {2**k for k in range(32)} | {tunable.value, tunable.value * 3 // 4, tunable.value * 3 // 2}
    snapped = {tunable.lowest + (value - tunable.lowest) // tunable.step * tunable.step for value in ladder}
    return sorted(value for value in snapped if tunable.lowest <= value <= tunable.highest)


def fit_regions(workloads: Sequence[Workload], ours: Sequence[Timing], theirs: Sequence[Timing], present: list) -> list:
    """Returns the regions in which the others are faster: for single matrices, few and many, the sizes above one. Where
    ours are faster up to the largest size that was timed, `present` says what larger ones take."""
    regions: list = []
    for first, last in BATCHES:
        saved: dict[int, float] = defaultdict(float, {0: 0.0})  # by size, the logarithm of ours' time over theirs
        for workload, a, b in zip(workloads, ours, theirs):
            if first <= workload.batch <= (last or workload.batch):
                saved[workload.size] += math.log(a.seconds / b.seconds)
        above = max(saved, key=lambda size: (sum(saved[larger] for larger in saved if larger > size), size))
        if above == max(saved):
            above = _larger(present, above, first)
        if above is None:
            continue
        if regions and regions[-1][0] == above and regions[-1][3] == first - 1:
            regions[-1][3] = last
        else:
            regions.append([above, None, first, last])
    return regions


def _larger(regions, size, batch):
    """Returns the size above which the regions have every batch of so many matrices, if it is not below `size`."""
    sizes = [
        max(above, size)
        for above, up_to, first, last in regions
        if up_to is None and first <= batch and (last is None or batch <= last)
    ]
    return min(sizes, default=None)


def text(value: store.Value) -> str:
    """Returns a value in words."""
    if isinstance(value, int):
        return "any" if value == 2**32 - 1 else str(value)
    return "; ".join(map(_region_text, value)) or "nowhere"


def _region_text(region):
    above, up_to, first, last = region
    sizes = f"above {above}" + (f" up to {up_to}" if up_to is not None else "")
    if (first, last) == (1, None):
        return f"sizes {sizes}"
    batch = f"{first}" if last == first else f"from {first}" if last is None else f"{first} to {last}"
    return f"{batch} of size {sizes}"
