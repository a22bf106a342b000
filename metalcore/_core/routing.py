"""Which calls metalcore takes; all others go to PyTorch's own ops."""

from __future__ import annotations

import os
import threading

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .. import _C

__all__ = [
    "COUNTED",
    "DEVICES",
    "FLOAT_DTYPES",
    "accelerated",
    "alike",
    "autocast_to_float32",
    "explained",
    "is_plain",
    "on_cuda",
    "too_many",
]

_transforms_active = torch._C._are_functorch_transforms_active

FLOAT_DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})
_strided = torch.strided


def _simulator_has_kernels():
    """Whether the built-in kernels are there for this CPU; METALCORE_ISA leaves them out of a build."""
    if not hasattr(_C, "simulator_info"):
        return False
    found = _C.simulator_info()
    return os.path.isdir(os.path.join(found["library_path"], found["isa"]))


# Where a backend can run the kernels: a Mac's `mps` or the simulator's, and `cuda` where PyTorch has CUDA.
_BACKENDS = {
    "mps": hasattr(_C, "mps_kernels") or _simulator_has_kernels(),
    "cuda": hasattr(_C, "cuda_dispatch") and torch.version.cuda,
}
DEVICES = frozenset(device for device, is_there in _BACKENDS.items() if is_there)
_MPS, _CUDA = "mps" in DEVICES, "cuda" in DEVICES


class _Explained(threading.local):
    """The type of device that a thread's meta tensors stand for, while what ops do with them is recorded."""

    device: str | None = None


explained = _Explained()


def on_cuda(tensor) -> bool:
    """Whether a tensor is on an NVIDIA GPU, or stands for one that is."""
    return tensor.is_cuda or tensor.is_meta and explained.device == "cuda"


def accelerated(*tensors, dtypes=FLOAT_DTYPES) -> bool:
    """Whether metalcore's kernels can take these arguments: strided tensors of a supported dtype, all on one supported
    device. None after the first stands for an argument that was left out. Inside torch.func transforms (vmap, grad,
    jvp …) and where forward-mode derivatives are taken PyTorch's own ops are the ones that know what to do."""
    if _transforms_active() or forward_ad._current_level >= 0:
        return False
    first = None
    for tensor in tensors:
        if tensor is None and first is not None:
            continue
        if not isinstance(tensor, Tensor) or tensor.dtype not in dtypes or tensor.layout is not _strided:
            return False
        if first is None:
            first = tensor
            # device.type costs six times as much.
            if not (_CUDA and tensor.is_cuda or _MPS and tensor.is_mps or tensor.is_meta and explained.device):
                return False
        elif tensor.device != first.device:
            return False
    return True


def alike(*tensors) -> bool:
    """Whether the arguments are accelerated() ones of one dtype; None after the first as there."""
    return accelerated(*tensors) and len({tensor.dtype for tensor in tensors if tensor is not None}) == 1


def is_plain(tensor) -> bool:
    """Whether it is no tensor that stands for another while a function is traced; None is one that was left out."""
    return tensor is None or type(tensor) in (torch.Tensor, torch.nn.Parameter)


# Tensors of up to so many elements never have more rows, or longer ones, than kernels count.
COUNTED = 2**31 - 1


def too_many(x, length) -> bool:
    """Whether x, as rows of `length` elements, has more of them, or longer ones, than kernels count."""
    return length > COUNTED or x.numel() // max(length, 1) > 2 * COUNTED + 1


# What torch.autocast computes in float32, where this version of PyTorch has a rule for it.
_AUTOCAST_TO_FLOAT32 = frozenset(
    (name, device)
    for name, operator in {"softmax": "softmax.int", "log_softmax": "log_softmax.int", "rms_norm": "rms_norm"}.items()
    for device in ("mps", "cuda")
    if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{operator}", f"Autocast{device.upper()}")
)


def autocast_to_float32(name, x) -> bool:
    """Whether PyTorch's op of this name would take a 16-bit x as float32, because autocast is on."""
    if x.dtype is torch.float32:
        return False
    device = "cuda" if on_cuda(x) else "mps"
    return torch.is_autocast_enabled(device) and (name, device) in _AUTOCAST_TO_FLOAT32
