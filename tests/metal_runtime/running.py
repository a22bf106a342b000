"""Runs programs on the Metal runtime in processes of their own, since the runtime takes metalcore._C's place."""

import os
import shutil
import sys
from pathlib import Path

import pytest
from processes import python

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]

_HERE = sys.platform == "linux" and shutil.which("clang++-19") and list(Path("/usr/lib").glob("*/libobjc.so.4"))
# In continuous integration these tests fail where a tool is missing.
needs_runtime = pytest.mark.skipif(
    not _HERE and not os.environ.get("CI"),
    reason="needs Linux with clang 19 and GCC's Objective-C runtime (Debian: clang-19 libobjc-12-dev)",
)

PROGRAM = """
import use_runtime
use_runtime.start()
import torch, metalcore
from metalcore import _C
"""


def run(extension, *command, **environment):
    """Returns what a Python program prints. The program must exit with 0."""
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "METALCORE_TEST_EXTENSION": str(extension), "PYTHONPATH": path, **environment}
    done = python(*command, env=environment, cwd=ROOT, timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
