"""Measures a comparison: both sides in turns, in samples that are long enough for the clock.

Calls of a sample take turns among several sets of inputs. A result is kept until its set's next turn, so that the times
are those of a GPU's memory and not of its cache.
"""

from __future__ import annotations

import math

from .case import Comparison, Samples

# So many times the last-level cache goes by before an input is used again.
CACHES = 4
MAX_SETS = 64
MAX_CALLS = 2048
# A side whose calls take longer than this for one turn is far from the memory's limit, and takes fewer sets.
TURNS_SECONDS = 0.25
# A batch that takes longer needs no other batch ahead of it.
LEAD_IN_SECONDS = 0.02


def measure(case, run) -> Samples:
    if not isinstance(case, Comparison):
        return case.sample(run)
    with run.device.session():
        try:
            return compare(case, run)
        finally:
            run.device.release()


def compare(case, run) -> Samples:
    device = run.device
    sets = input_sets(case.bytes, device.cache_bytes)
    inputs = [case.inputs(device.ours) for _ in range(sets)]
    theirs = inputs if device.theirs == device.ours else [case.inputs(device.theirs) for _ in range(sets)]
    if case.check:
        case.check(case, *inputs[0])
    graph = device.graphs and case.graph and not run.eager
    sides = [
        Side([case.bind(function, *values) for values in values_of], run, graph)
        for function, values_of in ((case.ours, inputs), (case.theirs, theirs))
    ]
    times = alternate(sides, run)
    return Samples(
        ours=times[0],
        theirs=times[1],
        method="graph replay" if graph else device.method,
        calls=sides[0].calls,
        sets=sides[0].sets,
        cached=sides[0].sets * case.bytes < 2 * device.cache_bytes,
        variant=case.variant(*inputs[0]) if case.variant else "",
    )


def input_sets(bytes_per_call, cache_bytes):
    """How many sets of inputs take turns."""
    if not bytes_per_call or not cache_bytes:
        return 1
    return max(1, min(MAX_SETS, math.ceil(CACHES * cache_bytes / bytes_per_call)))


class Side:
    """One side of a comparison: calls that take turns, as many in a batch as a sample needs."""

    def __init__(self, calls, run, graph):
        self.device = run.device
        calls[0]()  # compiles and loads kernels
        self.device.synchronize()
        calls = calls[: max(1, int(TURNS_SECONDS / max(self.device.seconds(calls[0]), 1e-9)))]
        for call in calls[1:]:  # makes the state of each optimizer
            call()
        self.device.synchronize()
        self.calls = self.sets = len(calls)
        while True:
            self.batch = in_turns(calls, self.calls)
            if graph:
                self.batch = self.device.capture(self.batch)
            self.batch()
            self.device.synchronize()
            self.batch_seconds = self.device.seconds(self.batch)
            if self.batch_seconds >= run.sample_seconds or self.calls >= MAX_CALLS:
                return
            self.calls = more_calls(self.calls, len(calls), self.batch_seconds, run.sample_seconds)

    def sample(self):
        if self.device.lead_in and self.batch_seconds < LEAD_IN_SECONDS:
            self.batch()
        return self.device.seconds(self.batch) / self.calls


def in_turns(calls, count):
    """Returns a function that makes `count` calls, and keeps each result until its call's next turn."""
    results = [None] * len(calls)

    def batch():
        for index in range(count):
            turn = index % len(calls)
            results[turn] = calls[turn]()

    return batch


def more_calls(calls, turns, seconds, wanted):
    """Returns a multiple of `turns`, for a batch of a little more than `wanted` seconds; `calls` took `seconds`."""
    factor = 1.2 * wanted / max(seconds, 1e-9)
    return min(math.ceil(MAX_CALLS / turns), max(calls // turns + 1, math.ceil(calls * factor / turns))) * turns


def alternate(sides, run):
    """Seconds of a call, a list per side. The side that goes first changes with the round."""
    round_seconds = sum(side.batch_seconds for side in sides)
    rounds = max(run.least_rounds, min(run.rounds, int(run.case_seconds / max(round_seconds, 1e-9))))
    times = [[] for _ in sides]
    for round_ in range(rounds):
        order = range(len(sides)) if round_ % 2 == 0 else reversed(range(len(sides)))
        for index in order:
            times[index].append(sides[index].sample())
    return times
