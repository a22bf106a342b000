"""The machine in words, for reports: chip, cores, operating system."""

from __future__ import annotations

import os
import platform
import re
import subprocess


def describe(kind: str) -> dict[str, str]:
    """Returns what a report says of a device ("mps", "cuda" or "simulator") and of the machine around it."""
    return {"chip": _chip(kind), "cores": _cores(kind), "system": _system()}


def _chip(kind):
    if kind == "cuda":
        import torch

        return torch.cuda.get_device_name()
    if kind == "mps":
        return _said("sysctl", "-n", "machdep.cpu.brand_string") or platform.machine()
    return platform.processor() or platform.machine()


def _cores(kind):
    cores = f"{os.cpu_count()} CPU cores"
    if kind == "cuda":
        import torch

        return f"{cores}, {torch.cuda.get_device_properties().multi_processor_count} multiprocessors"
    if kind == "mps":
        # The registry's entry of the GPU's driver has a line such as: "gpu-core-count" = 8
        found = re.search(r'"gpu-core-count" = (\d+)', _said("ioreg", "-r", "-d", "1", "-c", "AGXAccelerator"))
        return f"{cores}, {found[1] if found else 'unknown'} GPU cores"
    return cores


def _system():
    if platform.system() != "Darwin":
        return platform.platform()
    virtual = ", a virtual machine" if _said("sysctl", "-n", "kern.hv_vmm_present") == "1" else ""
    return f"macOS {platform.mac_ver()[0]} ({platform.machine()}{virtual})"


def _said(*command):
    """Returns what a program prints, or "" where it is missing or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""
