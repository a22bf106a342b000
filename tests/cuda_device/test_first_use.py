"""Kernels are compiled and loaded in threads, during captures of graphs, and in several processes at the same time."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from first_use import PROGRAMS

PROGRAM = Path(__file__).with_name("first_use.py")


def start(name, cache):
    return subprocess.Popen(
        [sys.executable, PROGRAM, name],
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
