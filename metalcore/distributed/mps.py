"""What torch.distributed and those who launch it ask of `mps` devices, and PyTorch lacks: collectives by way of the
CPU, what DeviceMesh, FSDP2 and gloo ask of a device, and a warning where accelerate trains on each rank by itself.

PyTorch has no kernels of c10d's operators for `mps`. These copy the tensors to the CPU, call the operator again, where
the process group's CPU backend (gloo) takes it, wait, and copy the results back. DDP, FSDP2, DTensor and functional
collectives all end in these operators. Where a PyTorch has a kernel of its own for one of them, that one stays.
"""

from __future__ import annotations

import functools
import os
import sys
import warnings

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from .._core.environment import after_import

__all__ = ["OPERATORS", "complete", "register_collectives", "watch_accelerate"]

_READ_AND_WRITTEN = ("allreduce_", "allreduce_coalesced_", "barrier", "broadcast_", "reduce_")
_WRITTEN = (
    "_allgather_base_",
    "_reduce_scatter_base_",
    "allgather_",
    "allgather_coalesced_",
    "allgather_into_tensor_coalesced_",
    "alltoall_",
    "alltoall_base_",
    "gather_",
    "reduce_scatter_",
    "reduce_scatter_tensor_coalesced_",
    "scatter_",
)
_RECEIVED = ("recv_", "recv_any_source_")
# The first argument of each is what it writes, except for that of send.
OPERATORS = (*_READ_AND_WRITTEN, *_WRITTEN, *_RECEIVED, "send")

_c10d = torch.library.Library("c10d", "IMPL")


def register_collectives() -> None:
    """Registers the kernels, where PyTorch has none. More than one call changes nothing."""
    if not torch.distributed.is_available():
        return
    for name in OPERATORS:
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"c10d::{name}", "MPS"):
            _c10d.impl(name, _kernel(name), "MPS")


def _kernel(name):
    operator = getattr(torch.ops.c10d, name).default
    returns_tensors = len(operator._schema.returns) > 1

    def by_cpu(written, *others):
        empty = name in _WRITTEN or name in _RECEIVED
        staged = tree_map_only(Tensor, _empty_on_cpu if empty else Tensor.cpu, written)
        result = operator(staged, *tree_map_only(Tensor, Tensor.cpu, others))
        work = result[-1] if returns_tensors else result
        if name in _RECEIVED:
            # It may be asked for before the send that answers it: to wait here could be for ever.
            return _later(work, lambda: _copy_back(staged, written))
        if name != "send":  # whose work keeps its tensors
            work.wait()
            _copy_back(staged, written)
            work = _done(written)
        return (written, work) if returns_tensors else work

    return by_cpu


def _empty_on_cpu(tensor):
    return torch.empty_like(tensor, device="cpu")


def _copy_back(staged, written):
    if isinstance(staged, Tensor):
        written.copy_(staged)
        return
    for one, other in zip(staged, written):
        _copy_back(one, other)


def _done(written):
    """Returns the work of a collective that has been done. DDP takes the results from its future."""
    c10d = torch._C._distributed_c10d  # pyright: ignore[reportAttributeAccessIssue]
    future = torch.futures.Future()
    future.set_result(written)
    return c10d._create_work_from_future(future).boxed()


def _later(work, finish):
    """Returns the work of a message that comes some time: what waits for it gets its result."""
    c10d = torch._C._distributed_c10d  # pyright: ignore[reportAttributeAccessIssue]

    def wait(timeout):
        work.wait()
        finish()
        return True

    return c10d.PythonCallbackWork(wait).boxed()


_FSDP = "torch.distributed.fsdp._fully_shard"
_fsdp = None  # keeps the kernels


def complete() -> None:
    """Adds to torch.mps the functions that torch.cpu has for code that is written for any device, and lets gloo take
    `mps` tensors (see register_collectives). What this PyTorch has already stays.

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
    """Registers FSDP2's own operators, which copy tensors by functions of PyTorch that run on any device. PyTorch
    registers them for devices by name, and `mps` is not among these."""
    global _fsdp
    _fsdp = torch.library.Library("fsdp", "IMPL")
    for name in ("all_gather_copy_in", "split_with_sizes_copy", "chunk_cat"):
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"fsdp::{name}", "MPS"):
            _fsdp.impl(name, torch.library.get_kernel(f"fsdp::{name}", "CPU").call_boxed, "MPS", with_keyset=True)


def _keep_storages() -> None:
    """Keeps the memory of whole parameters, which FSDP2 frees between their uses by resizing storages: PyTorch
    cannot do so on `mps`. Shards then save the memory of gradients and of optimizers' states alone."""
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


_STATE = "accelerate.state"


def watch_accelerate() -> None:
    """Makes accelerate warn where it leaves each of several processes on `mps` to train a model of its own."""
    after_import(_STATE, _watch)


def _watch() -> None:
    state = sys.modules[_STATE].PartialState
    make = state.__init__

    @functools.wraps(make)
    def initialize(self, *arguments, **options):
        make(self, *arguments, **options)
        ranks = int(os.environ.get("WORLD_SIZE", "1"))
        if ranks > 1 and self.device.type == "mps" and self.distributed_type == "NO":
            warnings.warn(
                f"accelerate takes mps for a single device: each of the {ranks} ranks would train by itself. With the "
                "variable ACCELERATE_TORCH_DEVICE=mps and accelerate.PartialState(cpu=True), or "
                "TrainingArguments(use_cpu=True), ranks exchange by way of the CPU and compute on mps",
                stacklevel=2,
            )

    state.__init__ = initialize
