"""python -m metalcore bench: runs the scripts of benchmarks/, which print how metalcore compares with PyTorch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def add_parser(commands):
    parser = commands.add_parser(
        "bench", help="run the benchmarks of a source checkout",
        description="Runs benchmarks/<family>.py of the source checkout; each prints its own table.")
    parser.add_argument("family", nargs="*", help="which ones; all of them if none is given")
    parser.add_argument("--list", action="store_true", help="print the families and stop")
    parser.add_argument("--quick", action="store_true", help="small inputs and few repetitions")
    parser.set_defaults(run=run)


def families():
    return sorted(path.stem for path in BENCHMARKS.glob("[a-z]*.py"))


def run(arguments):
    known = families()
    if not known:
        raise ValueError("the benchmarks come with the source checkout; this is an installed package")
    for family in arguments.family:
        if family not in known:
            raise ValueError(f"{family!r} is not a benchmark; there are {', '.join(known)}")
    if arguments.list:
        print("\n".join(known))
        return 0
    # The scripts measure this metalcore, whether it is installed or not.
    path = os.pathsep.join(filter(None, [str(BENCHMARKS.parent), os.environ.get("PYTHONPATH")]))
    failed = 0
    for family in arguments.family or known:
        print(f"\n{family}", flush=True)
        command = [sys.executable, str(BENCHMARKS / f"{family}.py"), *(["--quick"] if arguments.quick else [])]
        failed |= subprocess.run(command, env={**os.environ, "PYTHONPATH": path}).returncode != 0
    return int(failed)
