"""The machine that the rows are judged for: PyTorch, the GPU and the operating system."""

from __future__ import annotations

import platform
from typing import NamedTuple

import torch

__all__ = ["Machine", "this_machine"]


class Machine(NamedTuple):
    """A PyTorch on a machine.

    Attributes:
        torch: PyTorch's version.
        chip: the GPU, as the tuning's files name it.
        system: the operating system with its release.
        simulated: whether the mps device is metalcore's, and not PyTorch's.
    """

    torch: str
    chip: str
    system: str
    simulated: bool

    @property
    def release(self) -> tuple[int, int]:
        """(2, 13) of PyTorch 2.13.1."""
        major, minor = self.torch.split(".")[:2]
        return int(major), int(minor)

    def __str__(self):
        return f"PyTorch {self.torch} on {self.chip}, {self.system}"


def this_machine() -> Machine:
    """Returns the machine of this process, whose mps device is there.

    Raises:
        RuntimeError: there is none.
    """
    from ..tuning.store import this_gpu

    if not torch.backends.mps.is_available():
        raise RuntimeError("this process has no mps device")
    gpu = this_gpu("mps")
    system = f"macOS {release}" if (release := platform.mac_ver()[0]) else platform.system()
    simulated = getattr(torch._C, "_metalcore_simulates_mps", False)
    return Machine(torch.__version__, gpu.name if gpu else platform.machine(), system, simulated)
