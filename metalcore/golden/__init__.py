"""Golden artifacts: results that one device recorded, and that others must agree with.

    record(OPS.values(), "cuda", Path("golden"))      # one folder for each case, with meta.json and values.bin
    for comparison in compare(Path("golden"), "mps"): # errors in units of the tolerance
        print(comparison)

Inputs are not kept. They are made again from a seed, by a generator that gives the same numbers on every machine
(values.py), and a digest tells whether they are the same. selection.py says which calls are recorded, artifact.py has
the files, comparison.py the comparison, packing.py one file for a whole folder.
"""

from pathlib import Path

from .artifact import Artifact, record
from .comparison import Comparison, compare
from .packing import pack, unpack, unpacked
from .selection import CASES, Case, cases

__all__ = [
    "CASES",
    "REFERENCE",
    "Artifact",
    "Case",
    "Comparison",
    "cases",
    "compare",
    "pack",
    "record",
    "unpack",
    "unpacked",
]

# Artifacts that were recorded on an NVIDIA GPU.
REFERENCE = Path(__file__).parent / "reference.zip"
