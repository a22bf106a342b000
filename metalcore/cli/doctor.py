"""python -m metalcore doctor: which silent faults of PyTorch's MPS backend this machine has."""

from __future__ import annotations

import json
import sys

from . import devices


def add_parser(commands):
    parser = commands.add_parser(
        "doctor",
        help="which known faults of PyTorch's MPS backend this machine has",
        description="Tries public reports of silent faults of PyTorch's MPS backend against the CPU, in a process of "
        "its own, and exits with 1 if one shows. What it finds is kept in the cache directory, where "
        'metalcore.enable_pytorch_overrides("safe") reads it.',
    )
    parser.add_argument("faults", nargs="*", metavar="FAULT", help="only these, by their names in --list")
    parser.add_argument(
        "--device",
        choices=("mps", "simulator"),
        help="an Apple GPU, or the simulated mps device, whose operators are the CPU's; the default is the GPU, if "
        "there is one",
    )
    parser.add_argument("--list", action="store_true", help="print what is known, as Markdown, and try nothing")
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument(
        "--in-process",
        action="store_true",
        help="without a process of its own, for a debugger: a crash ends doctor too",
    )
    parser.set_defaults(run=run)


def run(arguments):
    from .. import doctor
    from ..doctor import results

    rows = [doctor.row_of(name) for name in arguments.faults] or doctor.ROWS
    if arguments.list:
        print(json.dumps(results.as_dicts(None, ()), indent=2) if arguments.json else results.table())
        return 0
    devices.use(arguments.device or ("mps" if devices.has_apple_gpu() else "simulator"))
    machine = doctor.this_machine()
    say = (lambda text: None) if arguments.json else (lambda text: print(text, flush=True))
    say(f"{machine}\n")
    if arguments.in_process:
        stream = (doctor.judge(row, machine) for row in rows)
    else:
        stream = doctor.judge_apart(rows, machine, say=_progress)
    outcomes = []
    for outcome in stream:
        _progress(None)
        outcomes.append(outcome)
        say(results.line(outcome))
    doctor.save(machine, outcomes)
    say("\n" + results.summary(outcomes))
    if arguments.json:
        print(json.dumps(results.as_dicts(machine, outcomes), indent=2))
    return 1 if any(outcome.is_fault for outcome in outcomes) else 0


def _progress(row):
    if sys.stderr.isatty():
        print(f"\r\033[K{row.name if row else ''}", end="", file=sys.stderr, flush=True)
