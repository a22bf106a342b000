"""The devices on which a backend of this build runs kernels."""

from __future__ import annotations

import os

import torch

from . import _C

__all__ = ["DEVICES"]


def _simulator_has_kernels():
    """Returns whether this build has the kernels for this CPU. METALCORE_ISA can leave them out."""
    if not hasattr(_C, "simulator_info"):
        return False
    info = _C.simulator_info()
    places = (os.path.join(info["library_path"], name) for name in (info["isa"], "on-first-use"))
    return any(map(os.path.exists, places))


# `mps` is the device of a Mac or of the simulator; `cuda` counts if PyTorch has CUDA.
_AVAILABLE = {
    "mps": hasattr(_C, "mps_kernels") or _simulator_has_kernels(),
    "cuda": hasattr(_C, "cuda_dispatch") and torch.version.cuda,
}
DEVICES = frozenset(device for device, available in _AVAILABLE.items() if available)
