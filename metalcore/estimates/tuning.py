"""Tuning numbers of Apple's GPUs by estimates, until somebody measures them: a clock for metalcore.tuning.Search."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..tuning.search import Clock, Timing
from ..tuning.workloads import Scale
from .chips import Chip
from .counts import taken
from .figures import fitted
from .model import times

# Calls that fill a GPU, few enough to be counted: what a dispatch repeats is sampled.
SCALE = Scale(elements=2**21, most=1024, largest=1024, longest=16384, steps=1)
# Events of a dispatch that are counted. None runs as a whole, so that ops whose results say what is read are left out.
EVENTS = 200_000
OPS_LEFT_OUT = {"svd", "eigh", "eig", "lu_factor", "lu_solve", "solve"}
NOISE = 0.1  # of an estimate beside that of another kernel for the same job
# Fields that say which kernels fit into registers, of which estimates know nothing, and what only other GPUs have.
FIELDS_LEFT_OUT = (
    *("attention.narrow_forward", "attention.narrow_dq", "attention.narrow_dkv", "attention_decode.narrow"),
    *("gemm.short_steps", "gemm.units", "gemm.unit_threadgroups", "gemm.wide_tiles", "qr.simd_rows"),
    *("jacobi.few_registers", "norm.few_registers", "triangular.few_registers", "quant.torch"),
)


class EstimateClock(Clock):
    """Takes the place of metalcore.tuning.search.Clock inside of counting(). It tells times on a chip by estimate."""

    def __init__(self, chip: Chip):
        self._chip = chip

    def time(self, call: Callable[[], Any]) -> Timing:
        taken()
        call()
        return Timing(sum(times(each, self._chip, fitted()[0]).total for each in taken()), NOISE)
