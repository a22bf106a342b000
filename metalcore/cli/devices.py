"""The devices of the commands: `mps` (an Apple GPU), `cuda` (an NVIDIA GPU), `simulator` (the simulated mps device);
and the machine in words, for reports: chip, cores, operating system."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys

from .. import _system

NAMES = ("mps", "cuda", "simulator")


def add_option(parser):
    parser.add_argument(
        "--device",
        choices=NAMES,
        help="an Apple GPU, an NVIDIA GPU, or the simulated mps device; the default is the GPU that "
        "PyTorch has, or else the simulator",
    )


def default():
    """Returns the name of the GPU that PyTorch has, or else "simulator".

    Raises:
        RuntimeError: this is a Mac, which has no simulator, and PyTorch has no device.
    """
    if has_apple_gpu():
        return "mps"
    if reason := _system.no_mps():
        raise RuntimeError(reason)
    import torch

    return "cuda" if torch.cuda.is_available() else "simulator"


def use(name):
    """Makes a device ready and returns PyTorch's name for it.

    Raises:
        RuntimeError: this machine has no such device.
    """
    import torch

    if name == "simulator":
        os.environ.setdefault("METALCORE_HIDE_CUDA", "1")  # PyTorch supports one accelerator at a time
        import metalcore.simulator  # noqa: F401

        return "mps"
    if not (has_apple_gpu() if name == "mps" else torch.cuda.is_available()):
        if name == "mps" and (reason := _system.no_mps()):
            raise RuntimeError(f"--device mps: {reason}")
        raise RuntimeError(
            f"--device {name}: PyTorch {torch.__version__} has no such device on this machine; "
            "--device simulator runs without a GPU"
        )
    return name


def has_apple_gpu():
    """Returns whether there is a real one: with the simulator PyTorch's own functions say so too."""
    import torch

    return "metalcore.simulator" not in sys.modules and torch.backends.mps.is_available()


def describe(kind: str) -> dict[str, str]:
    """Returns what a report says of a device ("mps", "cuda" or "simulator") and of the machine around it."""
    return {"chip": _chip(kind), "cores": _cores(kind), "system": _system_in_words()}


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
        count = re.search(r'"gpu-core-count" = (\d+)', _said("ioreg", "-r", "-d", "1", "-c", "AGXAccelerator"))
        return f"{cores}, {count[1] if count else 'unknown'} GPU cores"
    return cores


def _system_in_words():
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
