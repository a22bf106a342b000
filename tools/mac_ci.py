"""Tries what users install with Apple's own tools, on a Mac: `python -m tools.mac_ci dist/*`.

The arguments are the macOS wheel and, if there is one, the source distribution. In this order

- every Python that wheels are for, where it is found, installs the wheel and runs `info`, and `selftest` where PyTorch
  finds a GPU;
- Apple's C compiler builds examples/c/next_token.c with what the newest of them says (`metalcore cflags`), and it runs;
- another environment installs the source distribution with Command Line Tools alone, without Xcode;
- Apple's compiler compiles every kernel of the wheel, and `metalcore check` reads the same files.

A table says what passed, what failed, and what did not run and why; it also goes to $GITHUB_STEP_SUMMARY. build/mac_ci
has everything that the programs print, such as the warnings of Apple's compiler. The exit status is 1 if something
failed. Where CI is set it is also 1 if something other than `selftest` did not run. A failure on a virtual GPU does not
count.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from .build.metal_kernels import METAL, flags, for_language
from .wheel_check import PYTHONS

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "mac_ci"
# The oldest Python takes the oldest PyTorch. The others take the newest one that there is for them.
TORCH = {PYTHONS[0]: "torch==2.10.*"}
COMMAND_LINE_TOOLS = "/Library/Developer/CommandLineTools"
SELFTEST_SECONDS = 600
PASSED, FAILED, NOT_COUNTED, NOT_RUN = "passed", "FAILED", "failed, which is not counted", "did not run"


@dataclass
class Row:
    """A line of the table.

    Attributes:
        needed: whether this must run in continuous integration.
    """

    what: str
    outcome: str
    note: str = ""
    needed: bool = True

    def is_wrong(self):
        return self.outcome == FAILED or (self.outcome == NOT_RUN and self.needed and bool(os.environ.get("CI")))


def main(files):
    (wheel,) = [path.absolute() for path in files if path.suffix == ".whl"]
    sdist = next((path.absolute() for path in files if path.name.endswith(".tar.gz")), None)
    shutil.rmtree(WORK, ignore_errors=True)
    rows, checker = [], None
    for version in PYTHONS:
        python, found = _try_python(version, wheel)
        rows += found
        checker = python or checker
    rows += [_try_c(checker), _try_source_distribution(sdist)]
    kernels = _unpack_kernels(wheel)
    rows += [_compile_kernels(kernels), _check_kernels(kernels, checker)]
    _report(rows)
    return any(row.is_wrong() for row in rows)


def _try_python(version, wheel):
    """Returns (the Python of an environment with the wheel, or None; its rows)."""
    what = f"Python {version}: pip install, info"
    if not shutil.which(f"python{version}"):
        return None, [Row(what, NOT_RUN, f"there is no python{version}")]
    folder = WORK / f"python{version}"
    python, failure = _install(f"python{version}", folder, [wheel, TORCH.get(version, "torch")])
    if failure:
        return None, [Row(what, FAILED, failure)]
    return python, [Row(what, PASSED, _versions(folder)), _selftest(python, f"Python {version}: selftest")]


def _install(interpreter, folder, requirements, **variables):
    """Returns (the Python of a new environment in which pip installed that and `info` ran, what failed or "")."""
    environment = folder / "venv"
    python = environment / "bin" / "python"
    steps = {
        "venv": [interpreter, "-m", "venv", "--clear", environment],
        "pip": [python, "-m", "pip", "install", "--disable-pip-version-check", *requirements],
        "info": [python, "-m", "metalcore", "info"],
    }
    for name, command in steps.items():
        done = _run(command, folder / f"{name}.txt", **variables)
        if done.returncode:
            return python, f"{name}: {_last_line(done.stdout)}"
    return python, "" if _versions(folder) else "info: it names no kernels for Metal"


def _versions(folder):
    """Returns what `info` says of PyTorch and of the Metal backend, or "" where there is none."""
    match = re.search(
        r"^ *torch +(\S+)(?s:.*)^ *metal +(\d+ kernels.*)", (folder / "info.txt").read_text(), re.MULTILINE
    )
    return f"torch {match[1]}, Metal: {match[2]}" if match else ""


def _selftest(python, what):
    folder = python.parents[2]
    asked = _run([python, "-c", "import torch; print(torch.backends.mps.is_available())"], folder / "gpu.txt")
    if asked.returncode:
        return Row(what, FAILED, _last_line(asked.stdout))
    if asked.stdout.split()[-1:] != ["True"]:
        return Row(what, NOT_RUN, "PyTorch finds no GPU", needed=False)
    try:
        done = _run([python, "-m", "metalcore", "selftest"], folder / "selftest.txt", timeout=SELFTEST_SECONDS)
    except subprocess.TimeoutExpired:
        return _judged(what, f"not done after {SELFTEST_SECONDS} s")
    note = _last_line(done.stdout)
    return _judged(what, note) if done.returncode else Row(what, PASSED, note)


def _judged(what, note):
    """A failure on a Mac's GPU counts. A virtual machine's GPU belongs to an older family than every Mac's."""
    virtual = subprocess.run(["sysctl", "-n", "kern.hv_vmm_present"], capture_output=True, text=True).stdout.strip()
    return Row(what, NOT_COUNTED, f"on a virtual GPU: {note}") if virtual == "1" else Row(what, FAILED, note)


def _try_c(python):
    what = "C program: cc, run"
    if python is None:
        return Row(what, NOT_RUN, "no Python has the wheel")
    if not shutil.which("cc"):
        return Row(what, NOT_RUN, "there is no cc")
    folder = WORK / "c"
    flags = []
    for options in ([], ["--libs"]):
        done = _run([python, "-m", "metalcore", "cflags", *options], folder / "cflags.txt")
        if done.returncode:
            return Row(what, FAILED, _last_line(done.stdout))
        flags += shlex.split(_last_line(done.stdout))
    program = folder / "next_token"
    done = _run(["cc", ROOT / "examples" / "c" / "next_token.c", *flags, "-o", program], folder / "cc.txt")
    if done.returncode:
        return Row(what, FAILED, _last_line(done.stdout))
    done = _run([program], folder / "next_token.txt")
    note = _last_line(done.stdout)
    return _judged(what, note) if done.returncode else Row(what, PASSED, note)


def _try_source_distribution(sdist):
    what = "source distribution with Command Line Tools alone: pip install, info"
    if sdist is None:
        return Row(what, NOT_RUN, "no source distribution was given")
    if not Path(COMMAND_LINE_TOOLS).is_dir():
        return Row(what, NOT_RUN, f"there is no {COMMAND_LINE_TOOLS}")
    chosen = {"DEVELOPER_DIR": COMMAND_LINE_TOOLS}
    folder = WORK / "source"
    if not _run([*METAL, "--version"], folder / "metal.txt", **chosen).returncode:
        return Row(what, FAILED, "Command Line Tools have Metal's compiler, so this shows nothing")
    _, failure = _install(sys.executable, folder, [sdist], **chosen)
    return Row(what, FAILED, failure) if failure else Row(what, PASSED, _versions(folder))


def _unpack_kernels(wheel):
    """Returns {family: its source in one file, as it is in the wheel}."""
    kernels = {}
    with zipfile.ZipFile(wheel) as archive:
        for name in sorted(archive.namelist()):
            if family := re.fullmatch(r"metalcore/lib/metal/(.+)\.metal", name):
                kernels[family[1]] = Path(archive.extract(name, WORK / "kernels"))
    return kernels


def _compile_kernels(kernels):
    what = f"Apple's compiler on {len(kernels)} families of kernels"
    asked = _run([*METAL, "--version"], WORK / "metal.txt")
    if asked.returncode:
        return Row(what, NOT_RUN, _last_line(asked.stdout))

    options = flags()

    def compiled(family):
        language = for_language(options, kernels[family].read_text(encoding="utf-8"))
        command = [*METAL, *language, "-Wall", "-Wextra", kernels[family], "-o", WORK / "metal" / f"{family}.metallib"]
        return _run(command, WORK / "metal" / f"{family}.txt")

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = dict(zip(kernels, pool.map(compiled, kernels)))
    # A compiler before Xcode 26 knows no Metal 4, which nothing on its Mac runs.
    refused = [
        family
        for family, done in results.items()
        if done.returncode and not re.search("invalid value 'metal4.0'", done.stdout)
    ]
    warnings = sum(len(re.findall(r": warning: ", done.stdout)) for done in results.values())
    note = f"{asked.stdout.splitlines()[0]}; {warnings} warnings; {' '.join(options)}"
    if refused:
        return Row(what, FAILED, f"{note}; refused: {', '.join(refused)}")
    return Row(what, PASSED, note)


def _check_kernels(kernels, python):
    what = f"metalcore check on {len(kernels)} families of kernels"
    if python is None:
        return Row(what, NOT_RUN, "no Python has the wheel")
    command = [python, "-m", "metalcore", "check"]
    newer = [path for path in kernels.values() if "#include <metal_tensor>" in path.read_text(encoding="utf-8")]
    done = _run([*command, *(path for path in kernels.values() if path not in newer)], WORK / "check.txt", **_llvm())
    if newer and not done.returncode:
        done = _run([*command, "--std", "metal4.0", *newer], WORK / "check_tensors.txt", **_llvm())
    if done.returncode == 2:  # a request that cannot be met
        return Row(what, NOT_RUN, _last_line(done.stdout))
    return Row(what, FAILED if done.returncode else PASSED, _last_line(done.stdout))


def _llvm():
    """Returns the variable that names Homebrew's Clang, where it is: Apple's does not read Metal as OpenCL's C++."""
    if os.environ.get("CLANG") or not shutil.which("brew"):
        return {}
    prefix = subprocess.run(["brew", "--prefix", "llvm"], capture_output=True, text=True).stdout.strip()
    clang = Path(prefix) / "bin" / "clang"
    return {"CLANG": str(clang)} if prefix and clang.exists() else {}


def _run(command, log, timeout=None, **variables):
    """Returns the finished process. Its output, both streams in one, is also in the file `log`.

    It runs in the file's folder, since Python would import the checkout's metalcore in the checkout's.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [str(part) for part in command]
    print("+", *command, flush=True)
    if not shutil.which(command[0]):
        return subprocess.CompletedProcess(command, 127, f"there is no {command[0]}")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | variables
    options = {"stderr": subprocess.STDOUT, "cwd": log.parent, "env": environment, "timeout": timeout}
    with log.open("w") as output:
        done = subprocess.run(command, stdout=output, **options)
    done.stdout = log.read_text(errors="replace")
    return done


def _last_line(text):
    return (text.strip().splitlines() or ["it printed nothing"])[-1].strip()


def _report(rows):
    lines = ["| what | outcome | |", "|---|---|---|"]
    lines += [f"| {row.what} | {row.outcome} | {row.note.replace('|', '/')} |" for row in rows]
    table = "\n".join(lines) + "\n"
    print("\n" + table)
    (WORK / "summary.md").write_text(table)
    if summary := os.environ.get("GITHUB_STEP_SUMMARY"):
        with open(summary, "a") as file:
            file.write("### metalcore on a Mac\n\n" + table)


if __name__ == "__main__":
    sys.exit(main([Path(argument) for argument in sys.argv[1:]]))
