"""Fits the model of metalcore/estimates to a table of measurements, and writes metalcore/estimates/fitted.json:

    python -m benchmarks.apple --measured measured.tsv --mlx DIR --ggml DIR [--keep DIR]

The table has a line for each measurement: chip, GPU cores, program, what ran, figure, unit, source, separated by tabs.
A figure is ms, "ms host" (with a trip to the GPU and back), TFLOP/s, GFLOP/s, GB/s or tokens/s. A last column may say
why the figure is in doubt: such a row does not make intervals.

The model is then asked for the measurements of held_out.tsv, to which it is not fitted. Its errors there make the
intervals. Of kinds with few of them, errors are those of the first table's rows, by models that saw neither their
kernel nor their chip.
"""

from __future__ import annotations

import argparse
import csv
import functools
import json
import math
import random
import re
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

import metalcore.simulator  # noqa: F401
from metalcore.estimates import chips, figures
from metalcore.estimates.model import RANGES, Parameters, kind_of, times

from . import header
from .workloads import Workload, Workloads, counts

HELD_OUT = Path(__file__).parent / "held_out.tsv"
OUT = Path(__file__).parents[2] / "metalcore" / "estimates" / "fitted.json"
UNITS = {"ms host": None, "ms": None, "TFLOP/s": 1e12, "GFLOP/s": 1e9, "GB/s": 1e9, "tokens/s": 1.0}


PRIOR = 0.003
# Kinds of which no model of this form is right, so that they would spoil the others: (what is known of them).
LEFT_OUT = {
    "matrices from M5 on": "programs use its neural accelerators by another interface",
}


@dataclass
class Row:
    """A measurement: its chip, its seconds, and what it ran."""

    chip: chips.Chip
    what: str
    seconds: float
    work: Workload
    counted: list
    doubt: str  # why the figure may not be the kernel's time, or ""

    @functools.cached_property
    def kind(self):
        """That of what takes longest."""
        timed = [(n, each, times(each, self.chip, Parameters())) for n, each in self.counted]
        _, each, longest = max(timed, key=lambda entry: entry[0] * entry[2].total)
        return kind_of(each, longest, self.chip)

    def estimate(self, p: Parameters) -> float:
        total = sum(n * times(each, self.chip, p).total for n, each in self.counted)
        return total + self.work.small * p.launch * 1e-6 + self.work.syncs * p.trip * 1e-3


def rows(path, workloads, keep):
    """Returns the rows of the table whose kernels are at hand, and the names of the others."""
    measured_rows, missing, kept = [], [], {}
    with open(path, encoding="utf-8") as file:
        table = list(csv.DictReader(file, delimiter="\t"))
    for entry in table:
        chip, program, what, unit = (entry[name].strip() for name in ("chip", "program", "what", "unit"))
        work = workloads.find(program, what)
        if work is None or unit not in UNITS or re.sub(r" ", "-", chip.lower()) not in chips.CHIPS:
            missing.append(f"{chip} {program}: {what}")
            continue
        on = chips.find(chip, int(entry["GPU cores"] or 0))
        key = re.sub(r"\W+", "_", f"{program} {what} {on.name} {on.cores}" if work.planned else f"{program} {what}")
        if key not in kept:
            print(f"counting {program}: {what}", file=sys.stderr)
            kept[key] = counts(work, keep / f"{key}.pkl", on)
        figure, scale = float(entry["figure"]), UNITS[unit]
        seconds = figure / 1e3 if scale is None else work.amount / (figure * scale)
        measured_rows.append(Row(on, f"{program} {what}", seconds, work, kept[key], entry.get("doubt") or ""))
    return measured_rows, missing


def loss(p, some):
    """Returns the mean of the logarithms' errors, which counts large ones as little as the interval does, and a little
    for what departs from what was published or is usual."""
    errors = (min(abs(math.log(row.estimate(p) / row.seconds)), 0.7) for row in some)
    departs = sum(math.log(value / usual) ** 2 for value, usual in zip(p, Parameters(), strict=True))
    return statistics.fmean(errors) + PRIOR * departs


def fit(some, steps=400, seed=1):
    """Parameters within their ranges that minimize the loss: a walk whose steps become small."""
    draw = random.Random(seed)
    best = Parameters()
    least = loss(best, some)
    for step in range(steps):
        width = 0.5 * (1 - step / steps) + 0.02
        changed = {}
        for name in draw.sample(Parameters._fields, draw.choice((1, 1, 2, 3))):
            low, high, _ = RANGES[name]
            changed[name] = min(high, max(low, getattr(best, name) * math.exp(draw.gauss(0, width))))
        tried = best._replace(**changed)
        if (value := loss(tried, some)) < least:
            best, least = tried, value
    return best


def held_out(found, usable):
    """Returns each row's error where neither its kernel nor its chip was fitted to: (row, estimate)."""
    errors, known = [], {}
    for row in found:
        key = row.what, row.chip.name
        if key not in known:
            rest = [other for other in usable if other.what != row.what and other.chip.name != row.chip.name]
            known[key] = fit(rest, steps=200)
        errors.append((row, row.estimate(known[key])))
    return errors


def show(title, errors, fitted):
    """Prints each row, and how far off the estimates are."""
    print(f"{title}\n{'chip':<10} {'cores':>5} {'ms':>10} {'estimate':>10} {'ratio':>6}  bound by      what")
    for row, estimate in errors:
        bound = max((n * t.total, t.bound) for n, each in row.counted for t in [times(each, row.chip, fitted)])[1]
        print(
            f"{row.chip.name:<10} {row.chip.cores:>5} {row.seconds * 1e3:>10.3f} {estimate * 1e3:>10.3f} "
            f"{estimate / row.seconds:>6.2f}  {bound:<12}  {row.what}"
        )
    for what, some in (
        ("all", errors),
        ("kinds that get a figure", [entry for entry in errors if entry[0].kind not in LEFT_OUT]),
    ):
        print(f"{what}: {of_all(some)}")


def of_all(errors):
    """Returns the number of rows, the median error, the one that nine in ten do not pass, and the part within 40%."""
    every = sorted(abs(math.log(estimate / row.seconds)) for row, estimate in errors)
    return {
        "rows": len(every),
        "median": round(math.exp(statistics.median(every)) - 1, 3),
        "ninth": round(math.exp(every[math.ceil(0.9 * len(every)) - 1]) - 1, 3),
        "within40": round(sum(error <= math.log(1.4) for error in every) / len(every), 3),
    }


def summary(errors):
    """Returns the figures of of_all() for each kind, without rows that are in doubt."""
    sure = [entry for entry in errors if not entry[0].doubt]
    kinds = sorted({row.kind for row, _ in sure})
    return {kind: of_all([entry for entry in sure if entry[0].kind == kind]) for kind in kinds}


def misses(errors):
    """Returns the rows that an estimate misses by more than 40%, as lists for the page."""
    return [
        [row.chip.name, row.chip.cores, row.what, round(row.seconds, 6), round(estimate, 6), row.doubt]
        for row, estimate in errors
        if not 1 / 1.4 <= estimate / row.seconds <= 1.4
    ]


def main():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.apple", description=__doc__.split("\n")[0])
    parser.add_argument("--measured", required=True, type=Path, help="the table of measurements")
    parser.add_argument("--mlx", required=True, help="a checkout of ml-explore/mlx")
    parser.add_argument("--ggml", required=True, help="a checkout of ggml-org/ggml or llama.cpp")
    parser.add_argument("--keep", type=Path, default=Path("build/apple"), help="where counts are kept")
    options = parser.parse_args()
    options.keep.mkdir(parents=True, exist_ok=True)
    workloads = Workloads(options.mlx, options.ggml)
    found, left = rows(options.measured, workloads, options.keep)
    usable = [row for row in found if row.kind not in LEFT_OUT]
    fitted = fit(usable)
    errors = held_out(found, usable)
    show("of the table that the model is fitted to, by models that saw neither kernel nor chip", errors, fitted)
    print(f"{len(left)} more rows, whose kernels are not here")
    others, unknown = rows(HELD_OUT, workloads, options.keep)
    if unknown:
        raise ValueError(f"{HELD_OUT} has rows whose kernels are not here: {', '.join(unknown)}")
    checked = [(row, row.estimate(fitted)) for row in others]
    show("of the table that was held out", checked, fitted)
    kinds = summary(errors)
    kinds |= {kind: values for kind, values in summary(checked).items() if values["rows"] >= figures.LEAST_ROWS}
    for kind, values in kinds.items():
        print(kind, values)
    OUT.write_text(
        json.dumps(
            {
                "command": "python -m benchmarks.apple --measured measured.tsv --mlx DIR --ggml DIR",
                "parameters": {name: round(value, 4) for name, value in fitted._asdict().items()},
                "errors": kinds,
                "held_out": {"all": of_all(checked), **summary(checked)},
                "misses": misses(checked),
            },
            indent=1,
        )
        + "\n"
    )
    figures.fitted.cache_clear()
    header.write()
    for name, value in fitted._asdict().items():
        print(f"{name:<11} {value:8.3f}  {RANGES[name]}")


if __name__ == "__main__":
    main()
