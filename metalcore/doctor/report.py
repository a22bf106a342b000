"""The tables that doctor prints: the rows that it knows, and what it has found."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

from .machine import Machine
from .rows import ROWS, Row, row_of
from .runner import Outcome

__all__ = ["as_dicts", "known", "line", "summary"]

WIDTH = 118
COLUMNS = ("fault", "report", "what is wrong", "reported for", "chips", "judged by", 'under `"safe"`')


def known() -> str:
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
