"""csrc/backends/cuda with a driver that only takes notes. These tests use no GPU, even where there is one."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fakes import HERE, Fakes

collect_ignore_glob = [] if sys.platform.startswith("linux") else ["*.py"]

PACKAGE = Path(importlib.util.find_spec("metalcore").origin).parent


@pytest.fixture(scope="session")
def fake(tmp_path_factory):
    """build(source, soname, *flags) -> path of a shared library with that soname."""
    return Fakes(tmp_path_factory.mktemp("fake_cuda")).build


@pytest.fixture
def run(fake):
    """run(program, …) runs a program with the names of fake_gpu.py, and returns what it prints."""
    torch_lib = Path(importlib.util.find_spec("torch").origin).parent / "lib"

    def run(program, *, driver=True, driver_flags=(), streams=False):
        paths = [
            fake("fake_driver.c", "libcuda.so.1", *driver_flags) if driver else "none",
            fake("fake_torch_cuda.c", "libtorch_cuda.so") if streams else "none",
            str(PACKAGE / "_C.abi3.so"),
            str(torch_lib),
        ]
        command = [sys.executable, str(HERE / "fake_gpu.py"), *paths]
        done = subprocess.run(command, input=program, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture
def run_c(fake):
    """run_c(program, …) runs a program with the names of fake_c.py, and returns what it prints."""
    library = PACKAGE / "lib" / "libmetalcore.so"

    def run(program, *, driver=True, nvrtc_flags=(), **environment):
        driver = fake("fake_driver.c", "libcuda.so.1") if driver else "none"
        nvrtc = fake("fake_nvrtc.c", "libnvrtc.so.12", *nvrtc_flags)
        done = subprocess.run(
            [sys.executable, str(HERE / "fake_c.py"), driver, str(library)],
            input=program,
            capture_output=True,
            text=True,
            timeout=300,
            env={**os.environ, "METALCORE_NVRTC": nvrtc, **environment},
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run
