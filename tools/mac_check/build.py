"""Builds the macOS wheel with setup.py itself, which is told that it runs on a Mac, and links it again strictly."""

import hashlib
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from ..build.objects import precompile, read_compile_commands
from ..build.places import ROOT
from ..build.tasks import Tasks
from . import CheckFailed

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
    """Returns the command that compiles and links for a Mac."""
    return [
        COMPILER,
        "--target=arm64-apple-macos14.0",
        "-isysroot",
        str(sdk),
        "-fuse-ld=lld",
        "-Wno-unused-command-line-argument",
        "-fpch-instantiate-templates",  # once, and not in each source
        "-Werror",
        "-isystem",
        str(sdk / "python"),
    ]


def run(command, what, **options):
    done = subprocess.run(command, capture_output=True, text=True, **options)
    if done.returncode:
        raise CheckFailed(f"{what}:\n{done.stdout}{done.stderr.strip()}")
    return done.stdout


def build_wheel(sdk, torch, *flags):
    """Returns the wheel that `pip wheel` would make on a Mac with this PyTorch. The compiler gets the flags too."""
    output = WORK / "wheel"
    shutil.rmtree(output, ignore_errors=True)
    environment = {
        **os.environ,
        "_PYTHON_HOST_PLATFORM": "macosx-14.0-arm64",
        "CXX": " ".join([*compiler(sdk), *flags]),
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


def link_command(output="_C.abi3.so"):
    """Returns the command with which setup.py linked the extension, or another output."""
    return Tasks(_BUILT).signature(output)


def compile_command(name):
    """Returns (source, the command without files) of how setup.py compiled csrc's source of this name, as
    "gpu/recorder"."""
    return read_compile_commands(_BUILT)[name]


def compile_with_headers(torch, built_with):
    """Compiles every source once more, with another PyTorch's headers, for the errors alone; returns what it did."""
    note = WORK / "compiled.json"
    names = read_compile_commands(_BUILT)
    made_from = hashlib.sha256(repr([torch, names]).encode())
    for path in sorted(path for folder in ("csrc", "kernels") for path in (ROOT / folder).rglob("*") if path.is_file()):
        made_from.update(path.read_bytes())
    if note.exists() and note.read_text() == made_from.hexdigest():
        return f"{len(names)} files, unchanged since"
    header = _precompiled(torch, built_with)
    with ThreadPoolExecutor(JOBS) as pool:
        list(pool.map(lambda name: compile_source(name, torch, built_with, header=header), names))
    note.write_text(made_from.hexdigest())
    return f"{len(names)} files"


def _precompiled(torch, built_with):
    """Returns the header with which sources compile faster with the headers of a PyTorch."""
    _, command = compile_command("gpu/recorder")
    tasks = Tasks(WORK / "precompiled")
    header = precompile(tasks, tasks.out / "precompiled.h", _with_torch(command, torch, built_with))
    tasks.run()
    return header


def _with_torch(command, torch, built_with):
    return [part.replace(str(built_with), str(torch)) for part in command]


def compile_source(name, torch, built_with, source=None, header=None):
    """Compiles csrc's source of this name, or a changed copy of it, with the headers of a PyTorch."""
    original, command = compile_command(name)
    flags = _with_torch(command, torch, built_with)
    if header and original.suffix == ".cpp":
        flags += ["-include", str(header)]
    run(
        [*flags, "-fsyntax-only", f"-iquote{original.parent}", str(source or original)],
        f"{original.relative_to(ROOT)} does not compile with {torch.parent.name}",
    )


def link_strictly(torch, output, *, python_symbols, command=None):
    """Links the extension against a PyTorch's own libraries, with nothing left undefined except Python's functions."""
    command = list(command or link_command())
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
