"""csrc/backends/cuda with a driver that only takes notes. These tests use no GPU, even where there is one."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from metalcore.msl import host

collect_ignore_glob = [] if sys.platform.startswith("linux") else ["*.py"]

HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="session")
def fake(tmp_path_factory):
    """build(source, soname, *flags) -> path of a shared library with that soname."""
    folder = tmp_path_factory.mktemp("fake_cuda")
    built = {}

    def build(source, soname, *flags):
        key = (source, *flags)
        if key not in built:
            path = folder / str(len(built)) / soname
            path.parent.mkdir()
            command = [
                *host.find_compiler().command,
                "-x",
                "c",
                "-std=c11",
                "-shared",
                "-fPIC",
                "-O1",
                "-pthread",
                f"-Wl,-soname,{soname}",
                *flags,
                str(HERE / source),
                "-o",
                str(path),
            ]
            subprocess.run(command, check=True)
            built[key] = path
        return str(built[key])

    return build


@pytest.fixture
def run(fake):
    """run(program, …) runs a program with the names of fake_gpu.py, and returns what it prints."""
    package = Path(importlib.util.find_spec("metalcore").origin).parent
    torch_lib = Path(importlib.util.find_spec("torch").origin).parent / "lib"

    def run(program, *, driver=True, driver_flags=(), streams=False):
        paths = [
            fake("fake_driver.c", "libcuda.so.1", *driver_flags) if driver else "none",
            fake("fake_torch_cuda.c", "libtorch_cuda.so") if streams else "none",
            str(package / "_C.abi3.so"),
            str(torch_lib),
        ]
        command = [sys.executable, str(HERE / "fake_gpu.py"), *paths]
        done = subprocess.run(command, input=program, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run
