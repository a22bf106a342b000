"""Where a run takes place: names and versions, and the ceilings that no op can pass, measured."""

from __future__ import annotations

import datetime
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
REPEATS = 11


def describe(device, commit=None):
    """Versions and names, as plain data."""
    import metalcore

    facts = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "metalcore": metalcore.__version__,
        "commit": commit or _commit(),
        "device": device.name,
        "device_name": _device_name(device),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": f"{_cpu_name()}, {os.cpu_count()} logical cores",
        "threads": torch.get_num_threads(),
    }
    if device.name == "cuda":
        drivers = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()
        facts["driver"] = drivers[0] if drivers else "unknown"
        facts["cuda"] = torch.version.cuda
        facts["cache_bytes"] = device.cache_bytes
    return facts


def _device_name(device):
    if device.name == "cuda":
        return torch.cuda.get_device_name()
    return "Apple GPU" if device.name == "mps" else f"simulated mps, {platform.machine()}"


def _cpu_name():
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _commit():
    commit = _output("git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD")
    changed = commit and _output("git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no")
    return (commit or "unknown") + (" with changes" if changed else "")


def _output(*command):
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def ceilings(device, quick):
    """Returns bytes read and written per second by a copy, and operations per second of square matrix products, by
    PyTorch."""
    gpu = device.scale == "gpu" and not quick
    torch.set_float32_matmul_precision("highest")  # no TF32
    with device.session():
        rates = {
            "copy": _copy_bandwidth(device, 1 << 30 if gpu else 1 << 27),
            "matmul_float32": _matmul_rate(device, torch.float32, 8192 if gpu else 512),
            "matmul_bfloat16": _matmul_rate(device, torch.bfloat16, 8192 if gpu else 256),
        }
        device.release()
    return rates


def _copy_bandwidth(device, size):
    source, target = (torch.ones(size // 4, device=device.theirs) for _ in range(2))
    return 2 * size / _median_seconds(device, lambda: target.copy_(source))


def _matmul_rate(device, dtype, n):
    a, b = (torch.randn(n, n, device=device.theirs).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * n**3 / _median_seconds(device, lambda: torch.mm(a, b, out=out))


def _median_seconds(device, call, calls=5):
    def batch():
        for _ in range(calls):
            call()

    batch()
    device.synchronize()
    return statistics.median(device.seconds(batch) for _ in range(REPEATS)) / calls


def stem(machine, families=()):
    """Returns the name of a run's files: its date, its device, and its families unless it had all."""
    device = "".join(letter if letter.isalnum() else "-" for letter in machine["device_name"].lower())
    return "-".join([machine["date"][:10], *filter(None, device.split("-")), *families])


def python(*arguments, **environment):
    """Returns what a new Python prints. It finds this metalcore first, whether it is installed or not.

    Raises:
        RuntimeError: it failed. The message begins with the last line that it wrote to stderr.
    """
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    process = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **environment, "PYTHONPATH": path},
    )
    if process.returncode:
        errors = process.stderr.strip() or f"exit status {process.returncode}"
        raise RuntimeError(f"a new process failed: {errors.splitlines()[-1]}\n{errors[-2000:]}")
    return process.stdout
