"""The devices of the commands: `mps` (an Apple GPU), `cuda` (an NVIDIA GPU), `simulator` (the simulated mps device)."""

from __future__ import annotations

import os
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
