"""examples/distributed_svd.py in the ranks of a group."""

import runpy
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[3] / "examples" / "distributed_svd.py"


def svd(folder, *, fail_at=None):
    sys.argv = [str(SCRIPT), "--data", folder, "--matrices", "52", "--shard", "8", "--size", "9", "6"]
    sys.argv += [] if fail_at is None else ["--fail-at", str(fail_at)]
    runpy.run_path(str(SCRIPT), run_name="__main__")
