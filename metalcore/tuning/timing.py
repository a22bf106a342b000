"""Times calls on a device: the wall-clock time that a user waits, transfers and the host's own work included."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

__all__ = ["Clock", "Timing"]


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
