#!/usr/bin/env python3
"""Checks everything on a machine with an NVIDIA GPU, from a checkout with a built extension.

    python tools/cuda_check.py                              # all parts
    python tools/cuda_check.py --only suite -n 8            # one of them
    python tools/cuda_check.py --only suite -- tests/linalg -k qr

    suite        the test-suite with --device cuda (what follows -- goes to pytest)
    kernels      every built-in kernel is launched, and gives the same results in two processes
    memcheck, racecheck, synccheck
                 compute-sanitizer finds no error in any built-in kernel, and finds one in a kernel that has one

The sanitizers watch tests/cuda_device/every_kernel.py, section by section. Logs and a report go to --out. A part that
takes longer than --timeout seconds is ended, and what it found is reported.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = ROOT / "tests" / "cuda_device" / "every_kernel.py"
TOOLS = ("memcheck", "racecheck", "synccheck")
FOUND = 86  # compute-sanitizer's exit status where it found an error
LONGEST = 60  # lines of findings that a part prints


class Result:
    def __init__(self, ok, summary, findings=(), log=""):
        self.ok, self.summary, self.findings, self.log = ok, summary, list(findings), log


def run(command, seconds, **environment):
    """Returns (exit status or None where time was up, all output). The process is interrupted before it is killed, so
    that pytest can say what it has."""
    process = subprocess.Popen(
        [str(word) for word in command],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        text=True,
        errors="replace",
    )
    for wait, then in ((max(1, seconds), signal.SIGINT), (15, signal.SIGKILL), (15, None)):
        try:
            output = process.communicate(timeout=wait)[0]
            return (process.returncode if then == signal.SIGINT else None), output
        except subprocess.TimeoutExpired:
            if then:
                os.killpg(process.pid, then)
    return None, ""


# ---------------------------------------------------------------- the test-suite


def suite(arguments, deadline):
    command = [
        sys.executable,
        "-m",
        "pytest",
        *(arguments.pytest or ["tests"]),
        "--device",
        "cuda",
        "-rfEs",
        "--tb=short",
        "--durations=15",
        "-p",
        "no:cacheprovider",
    ]
    if arguments.processes > 1:
        command += ["-n", arguments.processes, "--dist", "worksteal"]
    status, output = run(command, deadline - time.time())
    lines = output.splitlines()
    summary = lines[-1] if lines else "no output"
    findings = [line for line in lines if line.startswith(("FAILED", "ERROR", "SKIPPED"))]
    if status != 0 and not findings:
        findings = lines[-30:]
    return Result(status == 0, summary if status is not None else f"time was up; {summary}", findings, output)


# ---------------------------------------------------------------- the kernels by themselves


def sections():
    sys.path[:0] = [str(PROGRAM.parent)]
    import every_kernel

    return list(every_kernel.SECTIONS), every_kernel.built_in()


def each_section(arguments, deadline, command, **environment):
    """Runs the program, with `command` before it, for each section. The result is {section: (status, output)}, the
    kernels that no section launched, and the number of kernels."""
    names, built_in = sections()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(arguments.processes) as pool:

        def one(name):
            words = [*command, sys.executable, PROGRAM, "--section", name, "--launched", Path(folder) / name]
            return run(words, deadline - time.time(), **environment)

        results = dict(zip(names, pool.map(one, names)))
        # The file of a section that was ended is empty.
        lists = [text for path in Path(folder).iterdir() if (text := path.read_text())]
        launched = {kernel for text in lists for kernel in json.loads(text)}
    return results, sorted(built_in - launched), len(built_in)


def not_launched(kernels):
    return textwrap.wrap("not launched: " + ", ".join(kernels), 160) if kernels else []


def kernels(arguments, deadline):
    first, missing, count = each_section(arguments, deadline, [])
    second, _, _ = each_section(arguments, deadline, [])
    findings = []
    for name, (status, output) in first.items():
        if status != 0:
            findings += [f"{name}: ended with {status}", *output.splitlines()[-8:]]
        elif second[name] != (status, output):
            findings += [f"{name}: other results the second time", output, second[name][1]]
    findings += not_launched(missing)
    log = "".join(
        f"### {name}: {status}\n{output}\n" for runs in (first, second) for name, (status, output) in runs.items()
    )
    return Result(not findings, f"{count - len(missing)} of {count} built-in kernels launched, twice", findings, log)


# ---------------------------------------------------------------- compute-sanitizer


def sanitizer():
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    return shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path=os.pathsep.join(f"{home}/bin" for home in homes if home)
    )


def options(tool):
    # A sanitizer watches the kernels that NVRTC compiled for metalcore, and not PyTorch's.
    common = ["--tool", tool, "--error-exitcode", FOUND, "--kernel-name", "kns=metalcore", "--print-limit", "20"]
    special = {"memcheck": ["--report-api-errors", "no"], "racecheck": ["--racecheck-report", "all"]}
    return common + special.get(tool, [])


LINES = {"METALCORE_NVRTC_FLAGS": "-lineinfo"}  # reports name lines of source


def environment(tool):
    # Without PyTorch's cache each tensor is an allocation of its own, and a sanitizer knows its end.
    return LINES | ({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if tool == "memcheck" else {})


def errors(output):
    """Returns how many errors a sanitizer's output counts, or None where it has no summary."""
    counts = re.findall(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)", output)
    return sum(int(number) for pair in counts for number in pair if number) if counts else None


FINDING = re.compile(r"Invalid|Uninit|Error|Warning|Race|Potential|Barrier|Divergent|Address|at ")


def said(output):
    """Returns a sanitizer's findings without their backtraces on the host."""
    lines = [line.removeprefix("=========").strip() for line in output.splitlines() if line.startswith("=========")]
    return [line for line in lines if FINDING.match(line) and "/lib" not in line]


def sanitize(tool):
    def part(arguments, deadline):
        program = sanitizer()
        if program is None:
            return Result(False, "compute-sanitizer is not on the PATH, in $CUDA_HOME/bin or in /usr/local/cuda/bin")
        command = [program, *options(tool)]
        fault = [*command, sys.executable, PROGRAM, "--fault", tool]
        status, log = run(fault, deadline - time.time(), **environment(tool))
        findings = []
        if status != FOUND or not errors(log):
            findings += [f"the planted fault was not found (exit status {status})", *log.splitlines()[-12:]]
        results, missing, count = each_section(arguments, deadline, command, **environment(tool))
        for name, (status, output) in results.items():
            log += f"### {name}: {status}\n{output}\n"
            if status != 0 or errors(output) != 0:
                findings.append(f"{name}: exit status {status}, {errors(output)} errors")
                findings += [f"  {line}" for line in said(output)[:12]] or output.splitlines()[-6:]
        findings += not_launched(missing)
        return Result(not findings, f"{count - len(missing)} of {count} built-in kernels watched", findings, log)

    return part


PARTS = {"suite": suite, "kernels": kernels, **{tool: sanitize(tool) for tool in TOOLS}}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    parser.add_argument("-n", "--processes", type=int, default=8)
    parser.add_argument("--timeout", type=float, default=520, help="seconds for each part")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "cuda_check", help="default: %(default)s")
    words = sys.argv[1:]
    split = words.index("--") if "--" in words else len(words)
    arguments = parser.parse_args(words[:split])
    arguments.pytest = words[split + 1 :]
    arguments.out.mkdir(parents=True, exist_ok=True)

    if set(arguments.only) & set(TOOLS):
        # Compiles the kernels, so that the processes that a sanitizer slows down need only load them.
        each_section(arguments, time.time() + arguments.timeout, [], **LINES)
    report, failed = [], False
    for name in arguments.only:
        start = time.time()
        result = PARTS[name](arguments, start + arguments.timeout)
        failed |= not result.ok
        (arguments.out / f"{name}.log").write_text(result.log)
        lines = [f"{name:<10} {'ok' if result.ok else 'FAILED':<7} {time.time() - start:5.0f} s  {result.summary}"]
        lines += [f"  {line[:180]}" for line in result.findings[:LONGEST]]
        if len(result.findings) > LONGEST:
            lines.append(f"  … and {len(result.findings) - LONGEST} more lines; {arguments.out / name}.log has all")
        print("\n".join(lines), flush=True)
        report += lines
    (arguments.out / "report.txt").write_text("\n".join(report) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
