"""Measures the cells of a speed-up map: hundreds of comparisons in minutes, of calls between microseconds and seconds.

A map's row is one op on matrices of one size, and its cells are batches from small to large. The time of one cell says
what the next may take. Where PyTorch would take long, it loops over the matrices, and its time for the smaller batch is
multiplied. Where metalcore would take long, the cell is left out.
"""

from __future__ import annotations

import dataclasses
import functools

from .case import Samples
from .measure import Side, alternate

ROUNDS = 7
# A call that takes longer is timed once; others are timed in rounds.
SLOW_SECONDS = 0.02
# The rounds of both sides take this long together.
CELL_SECONDS = 0.3
# PyTorch's time is multiplied where a call is expected to take longer.
THEIRS_SECONDS = 0.5
# A cell is left out where metalcore took longer for the one before.
OURS_SECONDS = 0.15


class Skipped(Exception):
    """A cell is left out; the message says why."""


def measure_cell(case, run) -> Samples:
    """Returns the samples of one cell.

    Raises:
        Skipped: it would take too long.
    """
    row, device = case.row, run.device
    if row.ours and row.ours[1] > OURS_SECONDS:
        raise Skipped(f"left out: {row.ours[0]} took {row.ours[1]:.2g} s")
    known = row.theirs and row.theirs[1] * case.batch / row.theirs[0]
    times = known and known > THEIRS_SECONDS
    with device.session():
        try:
            ours = functools.partial(case.ours, *case.inputs(device.ours))
            theirs = None if times else functools.partial(case.theirs, *case.inputs(device.theirs))
            samples = measure_calls(ours, theirs, run)
        finally:
            device.release()
    if times:
        samples = dataclasses.replace(samples, theirs=[known], theirs_batch=row.theirs[0])
    else:
        row.theirs = case.batch, min(samples.theirs)
    row.ours = case.batch, min(samples.ours)
    return samples


def measure_calls(ours, theirs, run):
    """Returns samples of one or two calls: rounds in turns where both are quick, else a single time of each."""
    calls = [ours] if theirs is None else [ours, theirs]
    first = [first_seconds(call, run.device) for call in calls]
    if max(first) > SLOW_SECONDS:
        return Samples(ours=[first[0]], theirs=first[1:] or None, method=run.device.method)
    brief = dataclasses.replace(run, rounds=min(run.rounds, ROUNDS), case_seconds=CELL_SECONDS)
    sides = [Side([call], brief, False) for call in calls]
    times = alternate(sides, brief)
    return Samples(
        ours=times[0], theirs=times[1] if len(times) > 1 else None, method=run.device.method, calls=sides[0].calls
    )


def first_seconds(call, device):
    """Returns the seconds of the second call, since the first one compiles and loads kernels."""
    call()
    device.synchronize()
    return device.seconds(call)
