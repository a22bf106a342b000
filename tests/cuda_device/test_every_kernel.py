"""Every built-in kernel is launched, and gives the same results in every process."""

import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).with_name("every_kernel.py")


def test_every_kernel():
    first, second = (subprocess.run([sys.executable, PROGRAM], capture_output=True, text=True) for _ in range(2))
    assert first.returncode == 0, first.stdout + first.stderr
    assert "results" in first.stdout and first.stdout == second.stdout
