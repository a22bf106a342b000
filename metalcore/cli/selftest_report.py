"""What selftest prints last: one short block to paste, with the machine, the worst error of each op and its time; and
how long it takes on the slowest Mac that is supported, an M1 with 7 GPU cores, by estimates.

The GPU's part of these is the cost model's (csrc/gpu/cost.h) for each sample's dispatches. Nobody has measured the rest
on a Mac. The constants below are assumptions, and the report says what each part really took.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from metalcore._core import accuracy
from metalcore._core.registry import OPS, Op, Sample
from metalcore.recording import on_meta

CALLS, ROUNDS = 5, 3
_COLUMNS = "{:<29} {:>7} {:>7} {:>8}"


def times(op: Op, device: str, simulated: bool) -> dict[str, float | None]:
    """Returns how long a call of an op takes, and of PyTorch's ops that compute the same, in microseconds, for the op's
    largest sample. None where the call raises an error, as where PyTorch has no kernel for the device."""
    sample = max(op.samples(), key=lambda sample: sample.elements)
    dtype = torch.float32 if torch.float32 in op.dtypes else min(op.dtypes, key=str)
    tensors = sample.make(device, dtype)
    result = {}
    for name, function in (("microseconds", None), ("microseconds of PyTorch", op.reference)):
        try:
            with torch.no_grad():
                result[name] = _time(lambda function=function: op.compute(sample, tensors, function), device, simulated)
        except Exception:  # the checks say what is wrong with an op
            result[name] = None
    return result


def _time(call: Callable[[], Any], device: str, simulated: bool) -> float:
    """Returns the least time of a call, the GPU's work included, out of a few rounds of some calls."""
    synchronize = getattr(torch, device).synchronize
    calls, rounds = (1, 1) if simulated else (CALLS, ROUNDS)
    samples = []
    for _ in range(rounds):
        synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        synchronize()
        samples.append((time.perf_counter() - start) / calls * 1e6)
    return round(min(samples), 1)


def text(report: dict) -> str:
    """Returns the block, of what run() in selftest.py has collected."""
    machine = report["machine"]
    lines = [
        f"metalcore {machine['metalcore']}, torch {machine['torch']}, Python {machine['python']}, {machine['system']}",
        f"{machine['device']}: {machine['chip']}, {machine['cores']}, {machine['backend']}",
        f"float16's subnormal numbers: {report['subnormal numbers of float16']}",
        report["summary"],
        report["durations"],
        "error: the largest, as a share of its bound; µs: a call in float32, and PyTorch's",
    ]
    cells = [_COLUMNS.format("", "error", "µs", "PyTorch")] * 2
    cells += [_row(name, op) for name, op in report["ops"].items()]
    lines += ["  ".join(cells[i : i + 2]).rstrip() for i in range(0, len(cells), 2)]
    return "\n".join(lines)


def _row(name, op):
    error = "FAILED" if op["error"] is None else f"{op['error']:.2f}"
    return _COLUMNS.format(name, error, *(_figure(op[key]) for key in ("microseconds", "microseconds of PyTorch")))


def _figure(value):
    return "-" if value is None else f"{value:.0f}"


def worst(checks: Sequence[dict]) -> float | None:
    """Returns the largest share of the bound among an op's checks; None where one of them failed."""
    if any(check["status"] == "FAILED" for check in checks):
        return None
    return max((share for check in checks for share in check.get("share of the bound", {}).values()), default=0.0)


MOST_SECONDS = 120

# Metal's compiler: the front end for a family's program, and then each of its kernels down to the GPU's instructions.
PROGRAM_SECONDS = 0.25
KERNEL_SECONDS = 0.04
# The host: a call of an op with its share of PyTorch's own work, and a wait for the GPU.
CALL_SECONDS = 100e-6
WAIT_SECONDS = 500e-6
# A check computes results and gradients twice, on the GPU and in float64 on the CPU, from tensors that it makes. The
# CPU takes this long for each element of the tensors, sums of products included, and this long for each check.
ELEMENT_SECONDS = 50e-9
CHECK_SECONDS = 10e-3
CHECK_CALLS, CHECK_WAITS = 6, 6


def estimate(kernels: Mapping[str, str], calls_timed: int, ops: Collection[Op] | None = None) -> dict[str, float]:
    """Returns the seconds of each part.

    Args:
        kernels: {name of a kernel: its family}, of all that Metal compiles.
        calls_timed: how many calls of an op are timed, and as many of PyTorch's.
        ops: the default is all.
    """
    ops = OPS.values() if ops is None else ops
    samples = [(op, sample) for op in ops for sample in op.samples() if sample.elements]
    checks = sum(len(op.dtypes) for op, _ in samples) + len(ops)  # golden artifacts are a check of each op
    seconds = {id(sample): device_seconds(op, sample) for op, sample in samples}
    gpu = sum(len(op.dtypes) * seconds[id(sample)] for op, sample in samples)
    timed = sum(max(seconds[id(sample)] for other, sample in samples if other is op) for op in ops)
    elements = sum(len(op.dtypes) * sample.elements for op, sample in samples)
    return {
        "compiling": PROGRAM_SECONDS * len(set(kernels.values())) + KERNEL_SECONDS * len(kernels),
        "checks": gpu
        + checks * (CHECK_SECONDS + CHECK_CALLS * CALL_SECONDS + CHECK_WAITS * WAIT_SECONDS)
        + elements * ELEMENT_SECONDS,
        "times": 2 * calls_timed * (timed + len(ops) * (CALL_SECONDS + WAIT_SECONDS)),
    }


def device_seconds(op: Op, sample: Sample) -> float:
    """Returns the cost model's time for the results and the gradients of a sample. Nothing runs."""
    dtype = max(op.dtypes, key=lambda dtype: dtype.itemsize)
    with on_meta("mps") as recorder:
        accuracy.evaluate(op, sample, [tensor.to("meta") for tensor in sample.make("cpu", dtype)])
    return sum(dispatch.seconds for dispatch in recorder.recording.dispatches)
