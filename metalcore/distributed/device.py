"""What DeviceMesh, FSDP2 and gloo ask of a device, and `torch.mps` lacks."""

from __future__ import annotations

import sys

import torch

from .._core.environment import after_import

__all__ = ["complete"]

_FSDP = "torch.distributed.fsdp._fully_shard"
_library = None  # keeps the kernels


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
    for name, value in ours.items():
        if not hasattr(torch.mps, name):
            setattr(torch.mps, name, value)
    after_import(f"{_FSDP}._fsdp_collectives", _register_copies)
    after_import(f"{_FSDP}._fsdp_param", _keep_storages)
    devices = torch.distributed.Backend.backend_capability["gloo"]
    if "mps" not in devices:
        devices.append("mps")


def _register_copies() -> None:
    """FSDP2's own operators copy tensors, with functions of PyTorch that run on any device. They are registered for
    devices by name, `mps` not among them."""
    global _library
    _library = torch.library.Library("fsdp", "IMPL")
    for name in ("all_gather_copy_in", "split_with_sizes_copy", "chunk_cat"):
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"fsdp::{name}", "MPS"):
            _library.impl(name, torch.library.get_kernel(f"fsdp::{name}", "CPU").call_boxed, "MPS", with_keyset=True)


def _keep_storages() -> None:
    """FSDP2 frees the memory of whole parameters between their uses by resizing storages, which PyTorch cannot do on
    `mps`. They keep it there, so that shards save the memory of gradients and of optimizers' states alone."""
    module = sys.modules[f"{_FSDP}._fsdp_param"]
    free_storage = module.free_storage

    def free_or_keep(tensor):
        if tensor.device.type != "mps":
            free_storage(tensor)

    module.free_storage = free_or_keep  # pyright: ignore[reportAttributeAccessIssue]


def _set_device(device) -> None:
    """Refuses all devices except the one that there is."""
    index = torch.device("mps", device).index if isinstance(device, int) else torch.device(device).index
    if index not in (None, 0):
        raise ValueError(f"torch.mps has one device, mps:0, and no mps:{index}")
