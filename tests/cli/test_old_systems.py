"""Systems that metalcore cannot use, or whose GPU PyTorch cannot: one clear line says why. tools/setup_venv.sh installs
what pyproject.toml's extras require, and constraints.txt pins it."""

import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from metalcore import _system
from metalcore.cli import devices, info, main

# The first words of a process.
AS_IF = """
import platform
import torch
torch.__version__ = {torch!r}
macos = {macos!r}
if macos:
    platform.system = lambda: "Darwin"
    platform.mac_ver = lambda: (macos, ("", "", ""), "arm64")
"""
OLD = [
    ("2.9.1", "", "metalcore: PyTorch 2.10 or newer is needed, and this is 2.9.1: pip install -U torch"),
    ("2.9.1+cu128", "", "metalcore: PyTorch 2.10 or newer is needed, and this is 2.9.1+cu128: pip install -U torch"),
    ("2.14.0", "13.6.1", "metalcore: macOS 14 or newer is needed, and this is macOS 13.6.1"),
]
NEW_ON_14 = (
    "PyTorch 2.15.0 has no MPS device on macOS 14.6, since PyTorch 2.15 and newer need macOS 15 for it; an older "
    "PyTorch has one (pip install 'torch<2.15')"
)


def run(tmp_path, version, macos, *command):
    (tmp_path / "sitecustomize.py").write_text(AS_IF.format(torch=version, macos=macos))
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}
    )


@pytest.mark.parametrize(("version", "macos", "line"), OLD)
def test_import_says_what_is_needed(tmp_path, version, macos, line):
    done = run(tmp_path, version, macos, "-c", "import metalcore")
    assert done.returncode == 1 and done.stderr.splitlines()[-1] == f"ImportError: {line}"


@pytest.mark.parametrize(("version", "macos", "line", "command"), [(*OLD[1], "info"), (*OLD[2], "selftest")])
def test_commands_say_nothing_else(tmp_path, version, macos, line, command):
    done = run(tmp_path, version, macos, "-m", "metalcore", command)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", line + "\n")


def test_a_warning_where_pytorch_is_too_new_for_the_gpu(tmp_path):
    done = run(tmp_path, "2.15.0", "14.6", "-W", "error", "-c", "import metalcore")
    assert done.stderr.splitlines()[-1] == f"RuntimeWarning: metalcore: {NEW_ON_14}"
    assert run(tmp_path, "2.14.1", "14.6", "-W", "error", "-c", "import metalcore").stderr == ""


@pytest.fixture
def mac(monkeypatch):
    """A Mac on which PyTorch finds no GPU."""
    monkeypatch.delitem(sys.modules, "metalcore.simulator", raising=False)
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    monkeypatch.setattr(platform, "mac_ver", lambda: ("14.6", ("", "", ""), "arm64"))
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_built", lambda: True)
    monkeypatch.setattr(torch, "__version__", "2.15.0")


@pytest.mark.parametrize(
    ("version", "macos", "too_new"),
    [("2.14.1", "14.6", False), ("2.15.0", "14.6", True), ("2.15.0", "15.0", False), ("2.16.0a0+git1", "26.1", False)],
)
def test_which_pytorch_is_too_new_for_the_gpu(mac, monkeypatch, version, macos, too_new):
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(platform, "mac_ver", lambda: (macos, ("", "", ""), "arm64"))
    assert (_system._missing(), bool(_system._too_new_for_macos())) == (None, too_new)
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    assert _system._too_new_for_macos() is None


def test_commands_on_a_mac_without_a_device(mac, capsys, monkeypatch):
    assert main(["selftest"]) == 2 and capsys.readouterr().err == f"metalcore selftest: {NEW_ON_14}\n"
    assert main(["selftest", "--device", "mps"]) == 2
    assert capsys.readouterr().err == f"metalcore selftest: --device mps: {NEW_ON_14}\n"
    assert info._devices()["mps"] == f"none: {NEW_ON_14}"
    monkeypatch.setattr(torch, "__version__", "2.14.0")
    with pytest.raises(RuntimeError, match=r"^PyTorch 2\.14\.0 finds no GPU on this Mac$"):
        devices.default()
    monkeypatch.setattr(torch.backends.mps, "is_built", lambda: False)
    assert _system.no_mps() == "PyTorch 2.14.0 is built without MPS"


ROOT = Path(__file__).resolve().parents[2]
EXTRAS = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]\n")[2].partition("\n\n")[0]
REQUIREMENTS = re.findall(r'"([\w-]+)[^"]*"[,\]]', EXTRAS)


@pytest.mark.parametrize("requirement", REQUIREMENTS)
def test_what_an_extra_asks_for(requirement):
    script = (ROOT / "tools" / "setup_venv.sh").read_text()
    packages = " ".join(re.findall(r'\[\w+\]\+?="([^"]*)"', script))
    assert requirement in re.findall(r"[\w-]+", packages)
    assert re.search(rf"^{requirement}==", (ROOT / "constraints.txt").read_text(), re.M | re.I)


def test_the_extras_are_found():
    assert {"matplotlib", "pytest", "ruff", "pyright", "sphinx", "nvidia-cuda-nvrtc"} <= set(REQUIREMENTS)
