"""Which silent faults of PyTorch's MPS backend this machine has: `python -m metalcore doctor`.

rows.py knows public reports. probes.py tries each against the CPU, in a process of its own (runner.py), and results.py
keeps what was found. `metalcore.enable_pytorch_overrides("safe")` goes around it: routes.py says how.
"""

from .machine import Machine, this_machine
from .results import faults, load, missing, save
from .rows import ROWS, Row, row_of
from .runner import Outcome, judge, judge_apart

__all__ = [
    "ROWS",
    "Machine",
    "Outcome",
    "Row",
    "faults",
    "judge",
    "judge_apart",
    "load",
    "missing",
    "row_of",
    "save",
    "this_machine",
]
