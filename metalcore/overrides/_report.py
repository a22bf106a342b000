"""What the overrides have done: counted while they are on, shown by `metalcore.report()`."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from .._core import refused

__all__ = ["Count", "Report", "Row", "count_of", "never_replaced", "report_of", "start"]


class Count:
    """How often something ran by metalcore, and why it was left to PyTorch how often.

    Threads may count at the same time, and need no lock for it: an addition without a call is not interrupted.
    """

    __slots__ = ("_ran_before", "_ran_in_cpp", "left", "ran")

    def __init__(self, ran_in_cpp: Callable[[], int] = int):
        """`ran_in_cpp` tells how often a kernel in C++ ran since the process began."""
        self.ran = 0
        self.left: Counter = Counter()
        self._ran_in_cpp, self._ran_before = ran_in_cpp, ran_in_cpp()

    def run(self, function: Callable, *args: Any) -> Any:
        """Returns function(*args), counted by ran_since()."""
        before = refused.calls()
        result = function(*args)
        self.ran_since(before)
        return result

    def ran_since(self, before: int) -> None:
        """Counts a call of metalcore's operators, before which refused.calls() was `before`: where Metal has refused a
        kernel of it since, it was left to PyTorch."""
        if refused.calls() == before:
            self.ran += 1
        else:
            self.left[refused.REASON] += 1

    def total(self) -> int:
        """Returns how often it ran by metalcore, from Python and from C++."""
        return self.ran + self._ran_in_cpp() - self._ran_before


class Row(NamedTuple):
    """One operator, class of modules or optimizer.

    Attributes:
        override: the name of the override that it belongs to.
        what: "aten::silu on mps", "transformers.models.llama.modeling_llama.LlamaRMSNorm", "torch.optim.AdamW" ….
        replaced: whether metalcore stands in its place.
        ran: how often metalcore ran in its place: calls, and of an optimizer steps of a group's parameters.
        left: why PyTorch's own code ran, with how often. Of what is not replaced: the reason, with 0.
    """

    override: str
    what: str
    replaced: bool
    ran: int
    left: dict[str, int]


class Report:
    """What the overrides have replaced and what not, and how often each ran. Printed, it is a table.

    Attributes:
        active: the names of the overrides that are on.
        devices: the types of the devices that they are on for.
        rows: a tuple of Row, in the order in which they were met.
    """

    def __init__(self, active, devices, rows):
        self.active, self.devices, self.rows = tuple(active), tuple(devices), tuple(rows)

    def as_dict(self) -> dict:
        """Returns the same as lists, dicts, strings and numbers, for JSON."""
        return {
            "active": list(self.active),
            "devices": list(self.devices),
            "rows": [row._asdict() for row in self.rows],
        }

    def __repr__(self):
        called = [row for row in self.rows if row.replaced and (row.ran or row.left)]
        lines = [f"metalcore overrides: {', '.join(self.active) or 'off'}"]
        lines += [f"devices: {', '.join(self.devices) or 'none that metalcore has kernels for'}"]
        if called:
            width = max(len(row.what) for row in called)
            lines += ["", f"{'replaced':{width}}  {'metalcore':>10}  {'PyTorch':>10}"]
            for row in called:
                lines.append(f"{row.what:{width}}  {row.ran:>10}  {sum(row.left.values()):>10}")
                lines += [f"    {times} left to PyTorch: {reason}" for reason, times in row.left.items()]
        lines += _listed(
            "replaced, not called since", [row.what for row in self.rows if row.replaced and row not in called]
        )
        reasons: dict = {}
        for row in self.rows:
            if not row.replaced:
                (reason,) = row.left
                reasons.setdefault(reason, []).append(row.what)
        for reason, names in reasons.items():
            lines += _listed(f"not replaced, {reason}", names)
        return "\n".join([*lines, "", *textwrap.wrap(NEVER, 100)])


# What people look for in the table, and metalcore has no kernels for.
NEVER = (
    "There are no overrides for matrix products, attention that is written out except its softmax, in-place forms "
    "except those of activations, out=, and optimizers other than torch.optim.AdamW, SGD and Muon themselves."
)


def _listed(title, names):
    if not names:
        return []
    return [
        "",
        f"{title}:",
        *textwrap.wrap(
            ", ".join(names),
            100,
            initial_indent="    ",
            subsequent_indent="    ",
            break_long_words=False,
            break_on_hyphens=False,
        ),
    ]


_counts: dict[tuple[str, str], Count] = {}
_never: dict[tuple[str, str], str] = {}


def start() -> None:
    """Forgets what was counted."""
    _counts.clear()
    _never.clear()


def count_of(override: str, what: str, ran_in_cpp: Callable[[], int] = int) -> Count:
    """Returns the count of something that is replaced, for the code that runs in its place."""
    _never.pop((override, what), None)
    return _counts.setdefault((override, what), Count(ran_in_cpp))


def never_replaced(override: str, what: str, reason: str) -> None:
    """Notes that something is not replaced."""
    _never[override, what] = reason


def report_of(active: Iterable[str], devices: Iterable[str]) -> Report:
    """Makes the report while these overrides are on for these types of devices."""
    rows = [Row(*key, True, count.total(), dict(count.left)) for key, count in list(_counts.items())]
    rows += [Row(*key, False, 0, {reason: 0}) for key, reason in list(_never.items())]
    return Report(active, devices if _counts else (), rows)
