"""Puts the kernels of ops' overrides into PyTorch's dispatcher: metalcore's op if it takes the input, else the kernel
that was there before."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from .._core.registry import Override
from .._core.routing import accelerated, is_plain
from ._report import count_of

__all__ = ["install", "remove"]


def install(name: str, overrides: tuple[Override, ...], device: str) -> torch.library.Library:
    """Registers the kernels of an op's override for a device type; what it returns holds them."""
    # All looked up first: with a kernel at one key, PyTorch would compute another answer for the next.
    found = [
        (override, key, torch.library.get_kernel(f"aten::{override.operator}", key))
        for override in overrides
        for key in [("Autograd" if override.at_autograd else "") + device.upper()]
    ]
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        # Some versions of PyTorch warn of the first override of a process. It is what was asked for.
        warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
        for override, key, previous in found:
            count = count_of(name, f"aten::{override.operator} on {device}")
            kernel = override.kernel(previous, count, _left(previous, count, override.dtypes))
            library.impl(override.operator, kernel, key, with_keyset=True)
    _forget_resolved(overrides)
    return library


def remove(overrides: tuple[Override, ...], library: torch.library.Library) -> None:
    """Takes an override's kernels out again; PyTorch's dispatcher goes back to what it had."""
    library._destroy()
    _forget_resolved(overrides)


def _left(previous, count, dtypes):
    def left(keyset, *args, **kwargs):
        count.left[_why_left(args, dtypes)] += 1
        return previous.call_boxed(keyset, *args, **kwargs)

    return left


def _why_left(args, dtypes):
    """Why metalcore did not take these arguments of an operator, in words."""
    tensors = [value for value in args if isinstance(value, Tensor)]
    for tensor in tensors:
        if tensor.dtype not in dtypes:
            return f"{str(tensor.dtype).removeprefix('torch.')}, which its kernels do not take"
        if tensor.layout is not torch.strided:
            return "a layout that its kernels do not take"
        if not is_plain(tensor):
            return "tensors that stand for others, as in a trace"
    if tensors and not accelerated(*tensors, dtypes=dtypes):
        return "torch.func transforms, forward-mode derivatives, or tensors of several devices"
    if len({tensor.dtype for tensor in tensors}) > 1:
        return "tensors of several dtypes"
    return "shapes or options that its kernels do not take"


def _forget_resolved(overrides):
    # Tracing resolves an operator's kernel in Python and remembers it; registering from Python does not reset that.
    for override in overrides:
        getattr(torch.ops.aten, override.operator).default._dispatch_cache.clear()
