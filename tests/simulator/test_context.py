"""The switch between fibers: this machine's own, and the one for machines without their own."""

import subprocess
from pathlib import Path

import pytest

from metalcore.msl.runtime import host

ROOT = Path(__file__).parents[2]
SIMULATOR = ROOT / "csrc" / "backends" / "simulator"


@pytest.mark.parametrize("flags", [[], ["-DMETALCORE_UCONTEXT"]], ids=["own", "ucontext"])
def test_fibers_keep_their_registers(tmp_path, flags):
    program = tmp_path / "driver"
    sources = [Path(__file__).with_name("context_driver.cpp"), SIMULATOR / "context.cpp"]
    command = [*host.find_compiler().command, "-std=c++20", "-O2", f"-I{SIMULATOR}", *flags, *sources, "-o", program]
    subprocess.run(command, check=True)
    assert subprocess.run([program], capture_output=True, text=True, timeout=60).stdout == "done\n"
