"""Descriptions of devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

__all__ = ["APPLE", "CPU", "EXAMPLE_NPU", "NVIDIA", "TARGETS", "Target", "target_of"]

_WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
_SHORT_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Target:
    """A description of what a device asks of programs.

    Attributes:
        name: in files and messages.
        device: the type of PyTorch's device that stands for it; "" for any, where programs for it are tried out.
        dtypes: those that its values may have, the best one first.
        most_dimensions: of a value.
        most_bytes: of a value, or None where the device's memory is the limit.
        static_shapes: whether all sizes are known before a program runs. Programs are always so.
        channel_bytes: channels of what products read and write (dimension 1 of a convolution, the last one of others)
            fill multiples of so many bytes. `metalcore.compile` pads them where it can.
        on_cpu: whether the CPU may do what the device cannot.
        fusions: the patterns that are applied where nobody names others; None means all.

    Example:
        >>> metalcore.programs.targets.NVIDIA.device
        'cuda'
    """

    name: str
    device: str
    dtypes: tuple[torch.dtype, ...]
    most_dimensions: int = 64
    most_bytes: int | None = None
    static_shapes: bool = True
    channel_bytes: int = 1
    on_cpu: bool = True
    fusions: Sequence[str] | None = None

    def channels(self, dtype: torch.dtype) -> int:
        """Returns the number whose multiples a number of channels has to be."""
        return max(1, self.channel_bytes // dtype.itemsize)


APPLE = Target("apple", "mps", (*_SHORT_FLOATS, *_WHOLE, torch.complex64), most_dimensions=16)
NVIDIA = Target("nvidia", "cuda", (*_SHORT_FLOATS, torch.float64, *_WHOLE, torch.complex64, torch.complex128))
CPU = Target("cpu", "cpu", (*_SHORT_FLOATS, torch.float64, *_WHOLE, torch.complex64, torch.complex128))
# No product: what is common among accelerators of phones and cameras.
EXAMPLE_NPU = Target(
    "example-npu",
    "",
    (torch.float16, torch.int8, torch.uint8, torch.int32, torch.bool),
    most_dimensions=5,
    most_bytes=1 << 28,
    channel_bytes=64,
    on_cpu=False,
    fusions=("conv_batch_norm",),  # metalcore's kernels are none of it
)
TARGETS = {target.name: target for target in (APPLE, NVIDIA, CPU, EXAMPLE_NPU)}


def target_of(device: torch.device | None) -> Target:
    """Returns the target of a kind of device."""
    return next((target for target in TARGETS.values() if device is not None and target.device == device.type), CPU)
