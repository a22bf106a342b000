"""Collectives of `mps` tensors, by way of the CPU.

PyTorch has no kernels of c10d's operators for `mps`. These copy the tensors to the CPU, call the operator again, where
the process group's CPU backend (gloo) takes it, wait, and copy the results back. DDP, FSDP2, DTensor and functional
collectives all end in these operators. Where a PyTorch has a kernel of its own for one of them, that one stays.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

__all__ = ["OPERATORS", "register"]

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

_library = torch.library.Library("c10d", "IMPL")


def register() -> None:
    """Registers the kernels, where PyTorch has none. More than one call changes nothing."""
    if not torch.distributed.is_available():
        return
    for name in OPERATORS:
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"c10d::{name}", "MPS"):
            _library.impl(name, _kernel(name), "MPS")


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
