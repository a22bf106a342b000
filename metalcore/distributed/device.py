"""What DeviceMesh, FSDP2 and gloo ask of a device, and `torch.mps` lacks."""

from __future__ import annotations

import torch

__all__ = ["complete"]


def complete() -> None:
    """Adds to torch.mps the functions that torch.cpu has for code that is written for any device, and lets gloo take
    `mps` tensors (see collectives.py). What this PyTorch has already stays.

    Everything on an `mps` device runs on one stream, in order, so that other streams and their events have nothing to
    do.
    """
    ours = {
        "Stream": torch.cpu.Stream,
        "StreamContext": torch.cpu.StreamContext,
        "stream": torch.cpu.stream,
        "current_stream": torch.cpu.current_stream,
        "current_device": lambda: 0,
        "is_initialized": lambda: True,
        "set_device": _set_device,
    }
    if not hasattr(torch.mps, "streams"):
        for name, value in ours.items():
            if not hasattr(torch.mps, name):
                setattr(torch.mps, name, value)
    devices = torch.distributed.Backend.backend_capability["gloo"]
    if "mps" not in devices:
        devices.append("mps")


def _set_device(device) -> None:
    """Refuses all devices except the one that there is."""
    index = torch.device("mps", device).index if isinstance(device, int) else torch.device(device).index
    if index not in (None, 0):
        raise ValueError(f"torch.mps has one device, mps:0, and no mps:{index}")
