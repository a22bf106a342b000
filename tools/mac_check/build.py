"""Builds the macOS wheel with setup.py itself, which is told that it runs on a Mac; and links the extension again, strictly."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from .report import CheckFailed

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / "build" / "mac_check"
COMPILER = "clang++-19"
LINKER = "ld64.lld-19"
# Where setup.py keeps what it builds for macOS.
_BUILT = ROOT / "build" / "metalcore-macos"


def require_tools():
    missing = [tool for tool in (COMPILER, LINKER) if not shutil.which(tool)]
    if missing:
        raise CheckFailed(f"missing: {', '.join(missing)}. Install them first, e.g.: sudo apt-get install clang-19 lld-19")


def compiler(sdk):
    """A command that compiles and links for a Mac."""
    return [COMPILER, "--target=arm64-apple-macos14.0", "-isysroot", str(sdk), "-fuse-ld=lld",
            "-Wno-unused-command-line-argument", "-Werror", "-isystem", str(sdk / "python")]


def run(command, what, **options):
    done = subprocess.run(command, capture_output=True, text=True, **options)
    if done.returncode:
        raise CheckFailed(f"{what}:\n{done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def build_wheel(sdk, torch, *, jobs=os.cpu_count() or 2):
    """The wheel that `pip wheel` would make on a Mac with this PyTorch."""
    output = WORK / "wheel"
    shutil.rmtree(output, ignore_errors=True)
    environment = {**os.environ, "_PYTHON_HOST_PLATFORM": "macosx-14.0-arm64", "CXX": " ".join(compiler(sdk)),
                   "METALCORE_TORCH": str(torch), "METALCORE_JOBS": str(jobs)}
    run([sys.executable, "setup.py", "-q", "bdist_wheel", "-d", str(output)], "setup.py cannot build for macOS",
        cwd=ROOT, env=environment)
    (wheel,) = output.glob("*.whl")
    return wheel


def link_command():
    """The command with which setup.py linked the extension."""
    return json.loads((_BUILT / "stamps" / "_C.json").read_text())


def link_strictly(torch, output, *, python_symbols, command=None):
    """Links the extension against a PyTorch's own libraries, with nothing left undefined except Python's functions."""
    command = list(command or link_command())
    command[command.index("-o") + 1] = str(output)
    command = [f"-L{torch / 'lib'}" if part.startswith("-L") else part for part in command
               if part != "-Wl,-undefined,dynamic_lookup"]
    python = [f"-Wl,-U,{symbol}" for symbol in python_symbols]
    output.parent.mkdir(parents=True, exist_ok=True)
    run([*command, "-Wl,-undefined,error", *python], f"the extension does not link against {torch.parent.name}")
    return output
