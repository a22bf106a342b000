"""Decides which calls metalcore takes. All others go to PyTorch's own ops."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .._backends import DEVICES

__all__ = [
    "DEVICES",
    "FLOAT_DTYPES",
    "INT32_MAX",
    "accelerated",
    "alike",
    "autocast_dtype",
    "autocast_operands",
    "autocast_to_float32",
    "converted",
    "device_type",
    "explained",
    "is_plain",
    "on_cuda",
    "require_floats",
    "require_integers",
    "require_tensors",
    "too_many",
]

_transforms_active = torch._C._are_functorch_transforms_active
_autocast_enabled = torch.is_autocast_enabled

FLOAT_DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})
_IN_16_BITS = FLOAT_DTYPES - {torch.float32}
_strided = torch.strided

_MPS, _CUDA = "mps" in DEVICES, "cuda" in DEVICES


class _Explained(threading.local):
    """What a thread records.

    Attributes:
        device: the type of device that meta tensors stand for while ops on them are recorded.
        observers: how many of the dispatch modes that are active only note what they see.
    """

    device: str | None = None
    observers: int = 0


explained = _Explained()


def device_type(tensor) -> str:
    """Returns the type of a tensor's device, or of the one that a meta tensor stands for."""
    return explained.device if tensor.is_meta and explained.device else tensor.device.type


def on_cuda(tensor) -> bool:
    """Returns whether a tensor is on an NVIDIA GPU, or stands for such a tensor."""
    return tensor.is_cuda or tensor.is_meta and explained.device == "cuda"


def accelerated(first, *others, dtypes=FLOAT_DTYPES) -> bool:
    """Returns whether metalcore's kernels can take these arguments: strided tensors of a supported dtype, all on one
    supported device. After the first argument, None stands for one that was left out. PyTorch's own ops take all calls
    inside torch.func transforms (vmap, grad, jvp …) and under forward-mode differentiation."""
    if _transforms_active() or forward_ad._current_level >= 0:
        return False
    if not isinstance(first, Tensor) or first.dtype not in dtypes or first.layout is not _strided:
        return False
    # These attributes cost a sixth of device.type.
    if not (_CUDA and first.is_cuda or _MPS and first.is_mps or first.is_meta and explained.device):
        return False
    return _beside(first, others, dtypes) if others else True


def _beside(first, others, dtypes):
    device = first.device
    for x in others:
        if x is not None and not (
            isinstance(x, Tensor) and x.dtype in dtypes and x.layout is _strided and x.device == device
        ):
            return False
    return True


def alike(first, *others) -> bool:
    """Returns whether the arguments are accelerated() and have one dtype. None is as for accelerated()."""
    if not accelerated(first):
        return False
    return _beside(first, others, (first.dtype,)) if others else True


def require_tensors(op, optional=False, **arguments) -> None:
    """Raises a TypeError that names an argument of an op that PyTorch lacks, unless it is a tensor, or None if that is
    an option."""
    for name, value in arguments.items():
        if not (isinstance(value, Tensor) or optional and value is None):
            raise TypeError(f"{op}: {name} must be a tensor, not {type(value).__name__}")


def require_integers(op, **arguments) -> None:
    """Raises a TypeError that names an argument of an op that has other numbers than integers, which a conversion would
    round. None stands for an argument that was left out."""
    for name, value in arguments.items():
        if value is not None and (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool):
            raise TypeError(f"{op}: {name} must have integers, not {str(value.dtype).removeprefix('torch.')}")


def require_floats(op, **arguments) -> None:
    """Raises an error that names an argument of an op whose numbers are not real floating-point ones, which PyTorch's
    formulas would round or take the real parts of, or that is not on the device of the first. None stands for an
    argument that was left out."""
    first, device = next((name, value.device) for name, value in arguments.items() if value is not None)
    for name, value in arguments.items():
        if value is None:
            continue
        if not value.is_floating_point():
            kind = str(value.dtype).removeprefix("torch.")
            raise TypeError(f"{op}: {name} must have floating-point numbers, not {kind}")
        if value.device != device:
            raise RuntimeError(f"{op}: {name} must be on {device} as {first}, not on {value.device}")


def is_plain(tensor) -> bool:
    """Returns whether `tensor` is not a tensor that stands for another one in a trace. None, an omitted argument, is
    plain."""
    return tensor is None or type(tensor) in (torch.Tensor, torch.nn.Parameter)


# A tensor of up to so many elements never has more or longer rows than kernels can count.
INT32_MAX = 2**31 - 1
_UINT32_MAX = 2**32 - 1


def too_many(x, length) -> bool:
    """Returns whether x, as rows of `length` elements, has more or longer rows than kernels can count."""
    return length > INT32_MAX or x.numel() // max(length, 1) > _UINT32_MAX


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Returns the dtype of torch.autocast on x's device, or None where it is off. The device "meta" has none."""
    kind = "cuda" if x.is_cuda else "mps" if x.is_mps else x.device.type  # these attributes cost less than the last
    return torch.get_autocast_dtype(kind) if kind != "meta" and _autocast_enabled(kind) else None


def autocast_operands(*tensors: Any) -> tuple[Any, ...]:
    """Returns a product's operands, in autocast's dtype where it is on for the first one's device, as PyTorch converts
    them."""
    dtype = autocast_dtype(tensors[0]) if isinstance(tensors[0], Tensor) else None
    return tensors if dtype is None else converted(dtype, tensors)


def converted(dtype: torch.dtype, tensors: Sequence[Any]) -> tuple[Any, ...]:
    """Returns the arguments, of which tensors of supported dtypes get this one."""
    return tuple(t.to(dtype) if isinstance(t, Tensor) and t.dtype in FLOAT_DTYPES else t for t in tensors)


# The ops that torch.autocast computes in float32, if this version of PyTorch has such a rule.
_AUTOCAST_RULES = {
    "kl_div": "kl_div",
    "softmax": "softmax.int",
    "log_softmax": "log_softmax.int",
    "rms_norm": "rms_norm",
    "layer_norm": "layer_norm",
    "group_norm": "group_norm",
}
_AUTOCAST_TO_FLOAT32 = frozenset(
    (name, device)
    for name, operator in _AUTOCAST_RULES.items()
    for device in ("mps", "cuda")
    if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{operator}", f"Autocast{device.upper()}")
)


def autocast_to_float32(name, x) -> bool:
    """Returns whether autocast is on and makes PyTorch's op of this name convert x to float32, as it does if x has 16
    bits."""
    if not isinstance(x, Tensor) or x.dtype not in _IN_16_BITS:
        return False
    device = "cuda" if on_cuda(x) else "mps"
    return _autocast_enabled(device) and (name, device) in _AUTOCAST_TO_FLOAT32 and accelerated(x)
