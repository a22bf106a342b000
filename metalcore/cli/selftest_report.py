"""What selftest prints last: one short block to paste, with the machine, the worst error of each op and its time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from metalcore._core.registry import Op

CALLS, ROUNDS = 5, 3
_COLUMNS = "{:<29} {:>7} {:>7} {:>8}"


def times(op: Op, device: str, simulated: bool) -> dict[str, float | None]:
    """Returns how long a call of an op takes, and of PyTorch's ops that compute the same, in microseconds, for the op's
    largest sample. None where the call raises an error, as where PyTorch has no kernel for the device."""
    sample = max(op.samples(), key=lambda sample: sample.elements)
    dtype = torch.float32 if torch.float32 in op.dtypes else min(op.dtypes, key=str)
    tensors = sample.make(device, dtype)
    found = {}
    for name, function in (("microseconds", None), ("microseconds of PyTorch", op.reference)):
        try:
            with torch.no_grad():
                found[name] = _time(lambda function=function: op.compute(sample, tensors, function), device, simulated)
        except Exception:  # the checks say what is wrong with an op
            found[name] = None
    return found


def _time(call: Callable[[], Any], device: str, simulated: bool) -> float:
    """Returns the least time of a call, the GPU's work included, out of a few rounds of some calls."""
    synchronize = getattr(torch, device).synchronize
    calls, rounds = (1, 1) if simulated else (CALLS, ROUNDS)
    found = []
    for _ in range(rounds):
        synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        synchronize()
        found.append((time.perf_counter() - start) / calls * 1e6)
    return round(min(found), 1)


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
