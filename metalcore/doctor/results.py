"""What doctor has found, kept in the cache directory for each PyTorch, GPU, system and set of probes, and in tables."""

from __future__ import annotations

import functools
import hashlib
import json
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path

from ..msl import cache
from .machine import Machine
from .rows import ROWS, Row, row_of
from .runner import Outcome, judge_apart

__all__ = ["as_dicts", "faults", "line", "load", "missing", "save", "summary", "table"]


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


WIDTH = 118
COLUMNS = ("fault", "report", "what is wrong", "reported for", "chips", "judged by", 'under `"safe"`')


def table() -> str:
    """Returns the rows as a Markdown table."""
    rows = [COLUMNS, ["---"] * len(COLUMNS), *(_cells(row) for row in ROWS)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def _cells(row):
    return (
        f"`{row.name}`",
        ", ".join(f"[#{number}]({_address(number)})" for number in row.reports),
        row.what.replace("*", "\\*").replace("|", "\\|"),
        row.reported_for,
        row.chips,
        "a probe" if row.probe else "the version",
        row.instead or "nothing: update PyTorch",
    )


def _address(number):
    return f"https://github.com/pytorch/pytorch/issues/{number}"


def line(outcome: Outcome) -> str:
    """Returns an outcome in one line, and a fault with what it is and what "safe" does."""
    row = row_of(outcome.row)
    if outcome.error is not None:
        note = f"error {outcome.error:.2g}, bound {outcome.bound:.2g}, {outcome.seconds:.1f} s"
    else:
        note = outcome.note
    lines = [f"{outcome.status:<13} {row.name:<19} pytorch#{row.reports[0]:<7} {note}".rstrip()]
    if outcome.is_fault:
        instead = row.instead.replace("`", "") or "nothing can; update PyTorch"
        for text in (row.what, f'reported for: {row.reported_for}; chips: {row.chips}; under "safe": {instead}'):
            lines += textwrap.wrap(text, WIDTH, initial_indent=" " * 14, subsequent_indent=" " * 14)
    return "\n".join(lines)


def summary(outcomes: Sequence[Outcome]) -> str:
    """Returns how many of the faults show, and which."""
    shown = [one.row for one in outcomes if one.is_fault]
    if not shown:
        return f"none of {len(outcomes)} known faults shows"
    words = f"{len(shown)} of {len(outcomes)} known faults show: {', '.join(shown)}"
    return f'{words}\nmetalcore.enable_pytorch_overrides("safe") goes around them'


def as_dicts(machine: Machine | None, outcomes: Iterable[Outcome]) -> dict:
    """Returns the same for programs; without a machine, the rows that are known."""
    results = {one.row: {**one._asdict(), "fault": one.is_fault} for one in outcomes}
    rows = [_row(row) | results.get(row.name, {}) for row in ROWS if machine is None or row.name in results]
    return {"machine": machine._asdict() if machine else None, "rows": rows}


def _row(row: Row) -> dict:
    return {
        "row": row.name,
        "reports": list(row.reports),
        "what": row.what,
        "reported for": row.reported_for,
        "chips": row.chips,
        "judged by": "probe" if row.probe else "version",
        "instead": row.instead.replace("`", ""),
    }
