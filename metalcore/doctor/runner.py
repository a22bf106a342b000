"""Runs probes: in this process, or in a child that may crash or hang. Each becomes an `Outcome`.

The child is `python -m metalcore.doctor.runner [MODULE …]`. It imports the modules, and answers each name of a row on
its standard input with a line of JSON.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch

from .machine import Machine, this_machine
from .rows import Row, row_of

__all__ = ["SECONDS", "Outcome", "judge", "judge_apart"]

SECONDS = 120.0  # for a probe, with what Metal compiles for it, and for a child to start
FAULTS = ("WRONG", "FAILS", "CRASHES", "HANGS", "AFFECTED")


class Outcome(NamedTuple):
    """What was found for a row.

    Attributes:
        row: its name.
        status: "right"; "WRONG"; "FAILS", if PyTorch raised an error; "CRASHES" and "HANGS", if it took the process
            with it; "AFFECTED" or "not affected" of a row that the version decides; "no op", if this PyTorch has none
            on the device; "no memory".
        error: the largest relative error, and its bound, of a probe that came to an end.
        note: an error's or a crash's words.
        seconds: how long it took.
    """

    row: str
    status: str
    error: float | None = None
    bound: float | None = None
    note: str = ""
    seconds: float = 0.0

    @property
    def is_fault(self) -> bool:
        return self.status in FAULTS


def judge(row: Row, machine: Machine, device: str = "mps") -> Outcome:
    """Runs a row's probe in this process. It leaves the generators of random numbers as they are."""
    if row.probe is None:
        affected = row.judge(machine)
        return Outcome(row.name, "AFFECTED" if affected else "not affected", note="by the version: nothing ran")
    begin = time.monotonic()
    try:
        with _random_numbers_kept():
            result = row.probe(device)
            torch.mps.synchronize()
    except NotImplementedError as error:
        return Outcome(row.name, "no op", note=_first_line(error))
    except (RuntimeError, MemoryError) as error:
        status = "no memory" if "out of memory" in str(error) or isinstance(error, MemoryError) else "FAILS"
        return Outcome(row.name, status, note=_first_line(error), seconds=time.monotonic() - begin)
    status = "right" if result.error <= result.bound else "WRONG"
    return Outcome(row.name, status, result.error, result.bound, seconds=time.monotonic() - begin)


def _first_line(error):
    return f"{type(error).__name__}: {error}".strip().splitlines()[0][:200]


@contextlib.contextmanager
def _random_numbers_kept():
    on_cpu, on_device = torch.get_rng_state(), torch.mps.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(on_cpu)
        torch.mps.set_rng_state(on_device)


def judge_apart(
    rows: Iterable[Row],
    machine: Machine,
    *,
    seconds: float = SECONDS,
    modules: Iterable[str] = (),
    say: Callable[[Row], None] = lambda row: None,
) -> Iterator[Outcome]:
    """Runs the rows' probes in a child process, one after the other. A new child takes the place of one that crashed or
    hung, which is that row's outcome.

    Args:
        rows: to run.
        machine: this one.
        seconds: that a probe may take.
        modules: that the child imports first.
        say: called with a row before it runs.
    """
    modules = (*(["metalcore.simulator"] if machine.simulated else []), *modules)
    child = None
    try:
        for row in rows:
            say(row)
            if row.probe is None:
                yield judge(row, machine)
                continue
            child = child or _Child(modules, seconds)
            outcome = child.judge(row)
            if not child.is_alive:
                child.end()
                child = None
            yield outcome
    finally:
        if child:
            child.end()


class _Child:
    """A process that runs this file."""

    def __init__(self, modules, seconds):
        self._seconds, self._said = seconds, b""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (end() closes it)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "metalcore.doctor.runner", *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        assert self._process.stdin and self._process.stdout
        self._asked, self._answers = self._process.stdin, self._process.stdout
        self.is_alive, self._hangs = True, False
        if (line := self._line(max(SECONDS, seconds))) is None:
            status, note = self._post_mortem()
            self.end()
            raise RuntimeError(f"doctor's child process did not start: {note or status}")
        assert line == b"ready"

    def judge(self, row):
        begin = time.monotonic()
        with contextlib.suppress(BrokenPipeError):
            self._asked.write(row.name.encode() + b"\n")
            self._asked.flush()
        if (line := self._line(self._seconds)) is None:
            status, note = self._post_mortem()
            return Outcome(row.name, status, note=note, seconds=time.monotonic() - begin)
        return Outcome(**json.loads(line))

    def _line(self, seconds):
        """Returns the next line of the child, or None if it ended or took too long."""
        until = time.monotonic() + seconds
        while b"\n" not in self._said:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, until - time.monotonic()))
            piece = os.read(self._answers.fileno(), 65536) if ready else b""
            if not piece:
                self.is_alive, self._hangs = False, not ready
                return None
            self._said += piece
        line, _, self._said = self._said.partition(b"\n")
        return line

    def _post_mortem(self):
        """Returns (status, note) of a child that ended or hung."""
        if self._hangs:
            return "HANGS", f"longer than {self._seconds:g} s"
        code = self._process.wait()
        self._errors.seek(0)
        words = self._errors.read().decode(errors="replace").strip().splitlines()
        name = signal.Signals(-code).name if code < 0 else f"exit status {code}"
        return "CRASHES", ": ".join([name, *words[-1:]])[:200]

    def end(self):
        self._process.kill()
        self._process.wait()
        for stream in (self._asked, self._answers, self._errors):
            with contextlib.suppress(BrokenPipeError):
                stream.close()


def main():
    for module in sys.argv[1:]:
        importlib.import_module(module)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else prints does not answer
    machine = this_machine()
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(judge(row_of(line.strip()), machine)._asdict()), file=answers, flush=True)


if __name__ == "__main__":
    main()
