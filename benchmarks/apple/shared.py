"""Compares what `python -m metalcore tune --share` printed on a Mac with estimates, and prints its calls as rows of the
table of measurements:

python -m benchmarks.apple.shared issue.md --gpu m2-pro
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

import metalcore.simulator  # noqa: F401
from metalcore.estimates import Estimate, chips, counting
from metalcore.estimates.picture import time_text
from metalcore.tuning.workloads import FULL, QUICK, SIMULATED, Workload, all_workloads

ROW = re.compile(r"^\| (?P<call>\w+(?: backward)?(?: \d+(?:x\d+)*)+) \| (?P<ms>[\d.e-]+) \|$", re.M)
EVENTS = 500_000


def calls(text: str) -> Iterator[tuple[Workload, float]]:
    """Yields the calls of a shared text with their seconds.

    Raises:
        ValueError: there are none, or there is one that `tune` does not time.
    """
    known = {call.text(): call for scale in (SIMULATED, QUICK, FULL) for call in all_workloads(scale)}
    matches = [*ROW.finditer(text)]
    if not matches:
        raise ValueError("the text has no table of calls and their times")
    for match in matches:
        if match["call"] not in known:
            raise ValueError(f"tune times no call {match['call']!r}")
        yield known[match["call"]], float(match["ms"]) / 1e3


def estimated(call: Workload, chip: chips.Chip) -> Estimate:
    """Returns the estimate of a call. What dispatches write is there where other dispatches read it."""
    run = call.call("mps")
    with counting(family=chip.family, cores=chip.cores, events=EVENTS, registers=True) as counts:
        run()
    return Estimate(chip, counts)


def main():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.apple.shared", description=__doc__.split("\n")[0])
    parser.add_argument("text", type=Path, help="a file with what was printed")
    parser.add_argument("--gpu", required=True, help="the chip, such as m2-pro")
    options = parser.parse_args()
    chip = chips.find(options.gpu)
    rows = []
    for call, seconds in calls(options.text.read_text(encoding="utf-8")):
        estimate = estimated(call, chip)
        if estimate.seconds is None:
            said = f"no estimate: {estimate.why}"
        else:
            place = "within" if estimate.low <= seconds <= estimate.high else "outside of"
            ratio = estimate.seconds / seconds
            said = f"estimated {time_text(estimate.seconds)}, {ratio:.2f} times as much, {place} the interval"
        print(f"{call.text():<48} {time_text(seconds):>9} measured, {said}", flush=True)
        name = chip.name.replace("-", " ").title()
        rows.append(f"{name}\t{chip.cores}\tmetalcore\t{call.text()}\t{seconds * 1e3:.6g}\tms\t{options.text.name}")
    print("\nRows of the table of measurements:", *rows, sep="\n")


if __name__ == "__main__":
    main()
