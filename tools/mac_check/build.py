"""Builds the macOS wheel with setup.py itself, which is told that it runs on a Mac, and links it again strictly."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .report import CheckFailed

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / "build" / "mac_check"
COMPILER = "clang++-19"
LINKER = "ld64.lld-19"
_PACKAGES = {COMPILER: "clang-19", LINKER: "lld-19", "llvm-objdump-19": "llvm-19"}
JOBS = os.cpu_count() or 2
# setup.py keeps its outputs for macOS here.
_BUILT = ROOT / "build" / "metalcore-macos"


def require_tools(tools=tuple(_PACKAGES)):
    """Installs clang and lld where they are missing and this is root, or says what to install."""

    def missing():
        return [_PACKAGES[tool] for tool in tools if not shutil.which(tool)]

    if missing() and os.geteuid() == 0 and shutil.which("apt-get"):
        print(f"installing {' '.join(missing())} (apt)", flush=True)
        run(["apt-get", "update", "-qq"], "apt-get update failed")
        run(["apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing()], "apt-get install failed")
    if missing():
        raise CheckFailed(f"packages are missing. Install them first: sudo apt-get install {' '.join(missing())}")


def compiler(sdk):
    """The command that compiles and links for a Mac."""
    return [
        COMPILER,
        "--target=arm64-apple-macos14.0",
        "-isysroot",
        str(sdk),
        "-fuse-ld=lld",
        "-Wno-unused-command-line-argument",
        "-Werror",
        "-isystem",
        str(sdk / "python"),
    ]


def run(command, what, **options):
    done = subprocess.run(command, capture_output=True, text=True, **options)
    if done.returncode:
        raise CheckFailed(f"{what}:\n{done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def build_wheel(sdk, torch):
    """The wheel that `pip wheel` would make on a Mac with this PyTorch."""
    output = WORK / "wheel"
    shutil.rmtree(output, ignore_errors=True)
    environment = {
        **os.environ,
        "_PYTHON_HOST_PLATFORM": "macosx-14.0-arm64",
        "CXX": " ".join(compiler(sdk)),
        "METALCORE_TORCH": str(torch),
        "METALCORE_JOBS": str(JOBS),
    }
    run(
        [sys.executable, "setup.py", "-q", "bdist_wheel", "-d", str(output)],
        "setup.py cannot build for macOS",
        cwd=ROOT,
        env=environment,
    )
    (wheel,) = output.glob("*.whl")
    return wheel


def recorded_command(name):
    """The command with which setup.py made one of its outputs, such as "_C" or "gpu/encode"."""
    recorded = json.loads((_BUILT / "stamps" / f"{name.replace('/', '_')}.json").read_text())
    return recorded if isinstance(recorded[0], str) else recorded[0]


def compile_with_headers(torch, built_with):
    """Compiles every source once more with another PyTorch's headers, only to see errors; returns what it did."""
    note = WORK / "compiled.json"
    names = [
        Path(part).relative_to(_BUILT / "objects").with_suffix("").as_posix()
        for part in recorded_command("_C")
        if part.startswith(str(_BUILT / "objects"))
    ]
    made_from = hashlib.sha256(repr([torch, *map(recorded_command, names)]).encode())
    for path in sorted(path for folder in ("csrc", "kernels") for path in (ROOT / folder).rglob("*") if path.is_file()):
        made_from.update(path.read_bytes())
    if note.exists() and note.read_text() == made_from.hexdigest():
        return f"{len(names)} files, unchanged since"
    with ThreadPoolExecutor(JOBS) as pool:
        list(pool.map(lambda name: compile_source(name, torch, built_with), names))
    note.write_text(made_from.hexdigest())
    return f"{len(names)} files"


def compile_source(name, torch, built_with, source=None):
    """Compiles csrc's source of this name, or a changed copy of it, with a PyTorch's headers."""
    command = recorded_command(name)
    original = Path(command[command.index("-c") + 1])
    flags = [part.replace(str(built_with), str(torch)) for part in command[: command.index("-MMD")]]
    run(
        [*flags, "-fsyntax-only", f"-iquote{original.parent}", str(source or original)],
        f"{original.relative_to(ROOT)} does not compile with {torch.parent.name}",
    )


def link_strictly(torch, output, *, python_symbols, command=None):
    """Links the extension against a PyTorch's own libraries; nothing may be undefined except Python's functions."""
    command = list(command or recorded_command("_C"))
    command[command.index("-o") + 1] = str(output)
    command = [
        f"-L{torch / 'lib'}" if part.startswith("-L") else part
        for part in command
        if part != "-Wl,-undefined,dynamic_lookup"
    ]
    python = [f"-Wl,-U,{symbol}" for symbol in python_symbols]
    output.parent.mkdir(parents=True, exist_ok=True)
    run([*command, "-Wl,-undefined,error", *python], f"the extension does not link against {torch.parent.name}")
    return output
