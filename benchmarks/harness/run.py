"""A whole run: which cases, in which order, with what progress."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path

from . import machine, report
from .case import FAMILIES, Cell
from .cells import Skipped, measure_cell
from .device import open_device
from .measure import measure
from .summary import failure, summarize

FOLDER = Path(__file__).resolve().parents[1] / "families"
OUT = machine.ROOT / "build" / "benchmarks"
ROUNDS, QUICK_ROUNDS = 31, 3


@dataclass
class Run:
    """What a case may look at while it is measured."""

    device: object
    rounds: int
    quick: bool
    eager: bool
    # One sample takes this long, and all rounds of a case that long.
    sample_seconds: float
    case_seconds: float
    least_rounds: int = 3


@functools.cache
def _registered():
    """Returns {family: its function} of all modules. Folders, named as those of kernels/, are no part of names."""
    for path in sorted(FOLDER.rglob("[a-z]*.py")):
        importlib.import_module(".".join(("benchmarks.families", *path.relative_to(FOLDER).with_suffix("").parts)))
    return dict(sorted(FAMILIES.items()))


def families():
    return list(_registered())


def family(name):
    """Returns the function that returns a family's cases."""
    if name not in _registered():
        raise ValueError(f"{name!r} is not a benchmark; there are {', '.join(families())}")
    return _registered()[name]


def title(name):
    """Returns the first line of a family's docstring, or of its module's where the function has none."""
    function = family(name)
    return inspect.getdoc(function if function.__doc__ else inspect.getmodule(function)).splitlines()[0]


def select(names, scale, words):
    """Returns [(family, case)] of the named families, or of all, where family and label contain all words."""
    return matching([(name, case) for name in names or families() for case in family(name)(scale)], words)


def matching(cases, words):
    """Returns the pairs of [(family, case)] whose family and label contain all words."""
    words = (words or "").lower().split()
    matches = [(name, case) for name, case in cases if all(word in f"{name} {case.label}".lower() for word in words)]
    if not matches:
        raise ValueError(f"no case contains {' and '.join(map(repr, words))}")
    return matches


def scale(device_scale, quick):
    return "quick" if quick else device_scale


def list_cases(arguments):
    """Returns what --list prints: the families, or the cases of those that were named."""
    names = arguments.family
    if not names and not arguments.filter:
        return "\n".join(f"{name:<14} {title(name)}" for name in families())
    which = scale("simulator" if arguments.device == "simulator" else "gpu", arguments.quick)
    return "\n".join(f"{name:<14} {case.label}" for name, case in select(names, which, arguments.filter))


def report_again(arguments):
    """Shows and writes what JSON files hold, after several have become one."""
    paths = [Path(path) for path in arguments.report]
    data = report.merge([report.load(path) for path in paths])
    files = report.Files(
        arguments.out or paths[0].parent, paths[0].stem if len(paths) == 1 else machine.stem(data["machine"])
    )
    files.write_json(data)
    print_and_write(data, files)
    return 0


def benchmark(arguments):
    """Measures, prints and writes what `python -m metalcore bench` was asked for, and returns the exit status."""
    for name in arguments.family:
        family(name)
    run = begin(arguments)
    chosen = select(arguments.family, scale(run.device.scale, run.quick), arguments.filter)
    return measure_all(chosen, run, arguments, arguments.family)


def begin(arguments):
    """Returns a run on the device that the arguments name."""
    device = open_device(arguments.device, arguments.threads)
    quick = arguments.quick
    return Run(
        device,
        arguments.rounds or (QUICK_ROUNDS if quick else ROUNDS),
        quick,
        arguments.eager,
        sample_seconds=1e-4 if quick else 1e-3,
        case_seconds=1.0 if quick else 4.0,
    )


def measure_all(chosen, run, arguments, names, against="PyTorch"):
    """Measures cases, prints tables and writes files; the exit status.

    Args:
        chosen: [(family, case)].
        names: families for the files' names; none stands for all.
        against: the other side, in words.
    """
    say("measuring the machine's ceilings")
    data = {
        "machine": machine.describe(run.device, arguments.commit),
        "ceilings": machine.ceilings(run.device, run.quick),
        "settings": {"rounds": run.rounds, "quick": run.quick, "eager": run.eager, "against": against},
        "results": [],
    }
    results = data["results"]
    files = report.Files(arguments.out or OUT, machine.stem(data["machine"], names))
    for number, (name, case) in enumerate(chosen, 1):
        try:
            results.append(measure_case(name, case, run, data["ceilings"]))
            outcome = report.brief(results[-1])
        except Skipped as reason:
            outcome = str(reason)
        say(f"[{number}/{len(chosen)}] {name}: {case.label}: {outcome}")
        if number == len(chosen) or chosen[number][0] != name:
            files.write_json(data)  # what is there already, if a later family takes the process with it
    print_and_write(data, files)
    return int(any("error" in result for result in results))


def print_and_write(data, files):
    print(report.text(data), flush=True)
    for path in files.write_reports(data):
        say(f"wrote {path}")


def measure_case(name, case, run, ceilings):
    try:
        samples = measure_cell(case, run) if isinstance(case, Cell) else measure(case, run)
        return summarize(name, case, samples, ceilings, targets_hold(run))
    except Skipped:
        raise
    except Exception as error:
        traceback.print_exc(limit=-5)
        return failure(name, case, error)


def targets_hold(run):
    return run.device.name == "cuda" and not run.quick


def say(line):
    print(line, file=sys.stderr, flush=True)
