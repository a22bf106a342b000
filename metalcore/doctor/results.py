"""What doctor has found here, kept in the cache directory for each PyTorch, GPU, system and set of probes."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from ..msl import cache
from .machine import Machine
from .rows import ROWS, Row
from .runner import Outcome, judge_apart

__all__ = ["faults", "load", "missing", "save"]


@functools.cache
def _probes_digest():
    """Returns a digest of this package, whose probes may have learned something since."""
    combined, package = hashlib.sha256(), Path(__file__).parent
    for path in sorted(package.rglob("*.py")):
        combined.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes())
    return combined.hexdigest()


def _name(machine):
    parts = machine.torch, machine.chip, machine.system, str(machine.simulated), _probes_digest()
    return f"doctor-{cache.digest(*parts)}.json"


def load(machine: Machine) -> dict[str, Outcome]:
    """Returns what was found, by row; empty where doctor has not run."""
    if cache.existing(_name(machine)) is None:
        return {}
    content = json.loads(cache.content(_name(machine), lambda path: path.write_text("[]")))
    return {one["row"]: Outcome(**one) for one in content}


def save(machine: Machine, outcomes: Iterable[Outcome]) -> Path:
    """Keeps outcomes, beside those of other rows. Returns where."""
    new = {one.row: one for one in outcomes}  # takes a while where these are run now
    merged = load(machine) | new
    text = json.dumps([one._asdict() for one in merged.values()], indent=1)
    if old := cache.existing(_name(machine)):
        old.unlink()
    return cache.entry(_name(machine), lambda path: path.write_text(text))


def missing(machine: Machine) -> list[Row]:
    """Returns the rows that have not been tried on this machine."""
    outcomes = load(machine)
    return [row for row in ROWS if row.name not in outcomes]


def faults(machine: Machine) -> tuple[Row, ...]:
    """Returns the rows whose fault this machine has. Probes that have not run on it run now, in a child process."""
    if rows := missing(machine):
        save(machine, judge_apart(rows, machine))
    outcomes = load(machine)
    return tuple(row for row in ROWS if outcomes[row.name].is_fault)
