"""The wheel for Macs can be built and has the right files. This is the quick part of tools/mac_check. `make mac-check`
runs the rest, which downloads PyTorch's macOS releases."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tools.mac_check import CheckFailed, build, pytorch

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("clang++-19", "ld64.lld-19")


@pytest.mark.skipif(
    not all(map(shutil.which, TOOLS)) and not os.environ.get("CI"),
    reason=f"needs {', '.join(TOOLS)} (Debian: clang-19 lld-19)",
)
def test_the_wheel_is_right(tmp_path):
    """It has every kernel as source, which Metal compiles: there is an xcrun, as Apple's command line tools have it
    alone, without a compiler for Metal."""
    xcrun = tmp_path / "xcrun"
    xcrun.write_text("#!/bin/sh\necho 'xcrun: error: unable to find utility \"metal\"' >&2\nexit 72\n")
    xcrun.chmod(0o755)
    command = [sys.executable, "-m", "tools.mac_check", "--quick"]
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    if done.stderr.startswith("mac-check: PyPI") and not os.environ.get("CI"):
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = build.WORK.glob("wheel/*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert not [name for name in archive.namelist() if name.endswith(".metallib")]


def test_wrong_facts_about_pytorch_are_found(tmp_path):
    """tools/mac_check/pytorch.py, with a release that has what the facts say, and with facts that are wrong."""
    facts = pytorch.facts()

    def release(version, names):
        folder = tmp_path / version / "torch"
        table = tmp_path / version / pytorch.TABLE
        (folder / "lib").mkdir(parents=True)
        table.parent.mkdir(parents=True)
        text = b"The MPS backend is supported on macOS 14.0+. "
        (folder / "lib" / "libtorch_cpu.dylib").write_bytes(b"\0".join([text, *(name.encode() for name in names)]))
        operators = [name.removeprefix("aten::") for name in names if name.startswith("aten::")]
        entries = [f"- func: {name}(Tensor self) -> Tensor\n  dispatch:\n    CPU, MPS: f\n" for name in operators]
        table.write_text("\n".join([*entries, "- func: other(Tensor self) -> Tensor\n  dispatch:\n    CPU: f\n"]))
        return {version: folder}

    there = [kernel.evidence.split("|")[0] for kernel in facts.KERNELS.values() if kernel.since <= (2, 13)]
    torch = release("2.13.0", there)
    assert "in 1 releases" in pytorch.check_kernels(torch)
    early = {"silu": facts.MacKernel((2, 14), "silu_dense_")}
    with pytest.raises(CheckFailed, match="torch 2.13.0 has silu_dense_: silu is said to have a kernel since 2.14"):
        pytorch.check_kernels(torch, early)
    late = {"geqrf": facts.MacKernel((2, 13), "geqrf_float"), "lu": facts.MacKernel((2, 10), "aten::lu.out")}
    with pytest.raises(CheckFailed, match="has not geqrf_float(?s:.*)has not aten::lu.out"):
        pytorch.check_kernels(torch, late)
    with pytest.raises(CheckFailed, match="torch 2.15.0 does not say that it needs macOS 15"):
        pytorch.check_kernels(release("2.15.0", there), {})
