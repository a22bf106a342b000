"""Counts all that a process dispatches, as METALCORE_COUNT asks, and reports it when the process ends."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
from pathlib import Path

from . import chips
from .counts import Counted, counting
from .figures import Estimate


def begin(wanted: str) -> None:
    """Counts from now on. The report is the estimate for the GPU of that name, on standard error, or a file of JSON.

    Args:
        wanted: a GPU's name, or a path that ends in .json, in which %p stands for the number of the process.

    Raises:
        ValueError: it is neither.
    """
    path = Path(wanted.replace("%p", str(os.getpid()))) if wanted.endswith(".json") else None
    try:
        chip = None if path else chips.find(wanted)
    except ValueError as error:
        raise ValueError(f"METALCORE_COUNT must be a path that ends in .json, or a GPU: {error}") from None
    stack, process = contextlib.ExitStack(), os.getpid()
    counts = stack.enter_context(
        counting(**({"family": chip.family, "cores": chip.cores, "registers": True} if chip else {}))
    )

    def report():
        if os.getpid() != process:  # a fork: its parent reports
            return
        stack.close()
        if chip:
            print(Estimate(chip, counts), file=sys.stderr)
        elif path and counts:
            dispatches = ",\n".join(json.dumps(as_dict(each)) for each in counts)
            path.write_text(f"[{dispatches}]\n", encoding="utf-8")

    atexit.register(report)


def as_dict(counted: Counted) -> dict:
    """Returns a dispatch as lists, dicts, strings and numbers, for JSON."""
    return {
        **counted._asdict(),
        "lines": [[*place, dict(kinds)] for place, kinds in sorted(counted.lines.items())],
        "memory": {".".join(key): memory._asdict() for key, memory in counted.memory.items()},
        "buffers": [buffer._asdict() for buffer in counted.buffers],
    }
