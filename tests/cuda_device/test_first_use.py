"""Every built-in kernel is launched, and gives the same results in every process. Kernels are compiled and loaded in
threads, during captures of graphs, and in several processes at the same time."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from first_use import PROGRAMS

HERE = Path(__file__).parent


def test_every_kernel():
    first, second = (
        subprocess.run([sys.executable, HERE / "every_kernel.py"], capture_output=True, text=True) for _ in range(2)
    )
    assert first.returncode == 0, first.stdout + first.stderr
    assert "results" in first.stdout and first.stdout == second.stdout


def start(name, cache):
    return subprocess.Popen(
        [sys.executable, HERE / "first_use.py", name],
        env={**os.environ, "METALCORE_CACHE_DIR": str(cache)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.parametrize("name", PROGRAMS)
def test_first_use(name, tmp_path):
    process = start(name, tmp_path)
    output = process.communicate()[0]
    assert process.returncode == 0, output
    assert any(tmp_path.rglob("*")), "nothing was compiled"


def test_processes_that_start_together(tmp_path):
    processes = [start("threads", tmp_path) for _ in range(3)]
    for process, output in [(process, process.communicate()[0]) for process in processes]:
        assert process.returncode == 0, output
