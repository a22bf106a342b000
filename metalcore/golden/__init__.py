"""Golden artifacts: results that one device recorded, and that others must agree with.

    record(OPS.values(), "cuda", Path("golden"))      # one folder for each case, with meta.json and values.bin
    for comparison in compare(Path("golden"), "mps"): # errors in units of the tolerance
        print(comparison)

Inputs are not kept. They are made again from a seed, by a generator that gives the same numbers on every machine
(values.py), and a digest tells whether they are the same. cases.py says which calls are recorded, artifact.py has the
files, compare.py the comparison, packing.py one file for a whole folder.
"""

from pathlib import Path

from .artifact import Artifact, record
from .cases import CASES, Case, cases
from .compare import Comparison, compare
from .packing import pack, unpack, unpacked

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
