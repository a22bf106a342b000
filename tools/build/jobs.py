"""How many compilers run at once."""

import os
import re
from pathlib import Path

PER_COMPILER = 2 << 30  # bytes that a compiler takes for PyTorch's headers and the larger kernels
# A container's limits lie here, by the second and the first version of Linux's control groups.
_LIMITS = ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes")


def jobs():
    """METALCORE_JOBS, or by default as many as there are cores and as the memory suffices for."""
    chosen = os.environ.get("METALCORE_JOBS", "")
    if chosen and not (chosen.isdecimal() and int(chosen)):
        raise SystemExit(f"METALCORE_JOBS: {chosen!r} is no number of compilers")
    return int(chosen) if chosen else max(1, min(_cores(), available_memory() // PER_COMPILER))


def _cores():
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def available_memory(root=Path("/")):
    """Bytes. On Linux they are the available ones, and no more than a container may have; on a Mac they are all."""
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    if (root / "proc/meminfo").exists():
        found = re.search(r"MemAvailable:\s+(\d+) kB", (root / "proc/meminfo").read_text())
        sizes += [int(found[1]) << 10] if found else []
    limits = [(root / name).read_text().strip() for name in _LIMITS if (root / name).exists()]
    return min([*sizes, *(int(limit) for limit in limits if limit.isdecimal())])  # "max" stands for none
