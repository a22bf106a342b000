"""The wheel for Macs can be built and has the right files. This is the quick part of tools/mac_check. `make mac-check`
runs the rest, which downloads PyTorch's macOS releases."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("clang++-19", "ld64.lld-19")


@pytest.mark.skipif(
    not all(map(shutil.which, TOOLS)) and not os.environ.get("CI"),
    reason=f"needs {', '.join(TOOLS)} (Debian: clang-19 lld-19)",
)
def test_the_wheel_is_right():
    command = [sys.executable, "-m", "tools.mac_check", "--quick"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.stderr.startswith("mac-check: PyPI") and not os.environ.get("CI"):
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stdout + done.stderr
