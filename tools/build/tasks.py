"""Commands with their inputs and outputs. Those whose outputs are out of date run. Several run at once."""

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .places import WORK

PER_COMPILER = 2 << 30  # bytes that a compiler takes for PyTorch's headers and the larger kernels
# A container's limits lie here, by the second and the first version of Linux's control groups.
_LIMITS = ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes")


def jobs():
    """Returns METALCORE_JOBS, or by default as many as there are cores and as the memory suffices for."""
    chosen = os.environ.get("METALCORE_JOBS", "")
    if chosen and not (chosen.isdecimal() and int(chosen)):
        raise SystemExit(f"METALCORE_JOBS: {chosen!r} is no number of compilers")
    return int(chosen) if chosen else max(1, min(_cores(), available_memory() // PER_COMPILER))


def _cores():
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def available_memory(root=Path("/")):
    """Returns bytes. On Linux they are the available ones, and no more than a container may have; on a Mac they are
    all."""
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    if (root / "proc/meminfo").exists():
        match = re.search(r"MemAvailable:\s+(\d+) kB", (root / "proc/meminfo").read_text())
        sizes += [int(match[1]) << 10] if match else []
    limits = [(root / name).read_text().strip() for name in _LIMITS if (root / name).exists()]
    return min([*sizes, *(int(limit) for limit in limits if limit.isdecimal())])  # "max" stands for none


class Tasks:
    """Tasks that wait to be run.

    Args:
        work: the folder that keeps the outputs (in out/) and what made them (in stamps/).
    """

    def __init__(self, work=WORK):
        self.out = work / "out"
        self._stamps = work / "stamps"
        self._pending = []
        self.left_out = set()  # the paths of optional outputs that could not be made

    def add(self, name, inputs, signature, action, optional=""):
        """Has `action(output)` make the file out/`name`, unless it is there and newer than its inputs.

        Args:
            name: the output's path, which lies in the package as it lies in out/.
            signature: whatever else the output depends on, as JSON takes it.
            optional: what happens without the output, in words, if it may be missing. A RuntimeError of `action` is
                then a warning.

        Returns:
            The output's path.
        """
        output, stamp = self.out / name, self._stamp(name)
        signature = json.dumps(signature)
        if output.exists() and stamp.exists() and stamp.read_text() == signature:
            made = output.stat().st_mtime
            if all(path.exists() and path.stat().st_mtime <= made for path in inputs):
                return output

        def task():
            print(f"building {name}", flush=True)
            output.parent.mkdir(parents=True, exist_ok=True)
            stamp.parent.mkdir(parents=True, exist_ok=True)
            stamp.unlink(missing_ok=True)
            try:
                action(output)
            except RuntimeError as failure:
                if not optional:
                    raise
                output.unlink(missing_ok=True)
                self.left_out.add(output)
                print(f"warning: {name} is left out ({optional}): {failure}", file=sys.stderr, flush=True)
                return
            stamp.write_text(signature)

        self._pending.append(task)
        return output

    def signature(self, name):
        """Returns the signature with which an output was made."""
        return json.loads(self._stamp(name).read_text())

    def _stamp(self, name):
        return self._stamps / (name + ".json")

    def run(self):
        """Runs what waits, some at a time. Raises SystemExit with all errors: one of them does not stop the rest."""
        with ThreadPoolExecutor(jobs()) as pool:
            failures = [future.exception() for future in [pool.submit(task) for task in self._pending]]
        self._pending.clear()
        if errors := [str(failure) for failure in failures if failure]:
            raise SystemExit("\n".join(errors))


def run(command):
    """Runs a command. Raises RuntimeError where it fails."""
    if subprocess.run(command).returncode:
        raise RuntimeError("failed: " + " ".join(map(str, command)))
