"""New Python processes, for what happens once in a process."""

from __future__ import annotations

import os
import subprocess
import sys

from .machine import ROOT


def python(*arguments, **environment):
    """What a new Python prints. It finds this metalcore first, whether it is installed or not.

    Raises:
        RuntimeError: it failed. The message begins with the last line that it wrote to stderr.
    """
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    found = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **environment, "PYTHONPATH": path},
    )
    if found.returncode:
        errors = found.stderr.strip() or f"exit status {found.returncode}"
        raise RuntimeError(f"a new process failed: {errors.splitlines()[-1]}\n{errors[-2000:]}")
    return found.stdout
