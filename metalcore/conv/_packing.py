"""How a weight lies best in memory for the kernels of conv2d."""

from __future__ import annotations

from torch import Tensor

__all__ = ["weight_order"]


def weight_order(x: Tensor, weight: Tensor, groups: int, channels_last: bool) -> tuple[int, ...] | None:
    """Returns the order of the weight's dimensions, from the outermost one on, in which its kernel reads 16 bytes at a
    time (csrc/ops/conv/plan.cpp). None if the kernel gains nothing by that.

    Args:
        x: (N, C, H, W), and weight: (K, C / groups, R, S), for their shapes and strides.
        channels_last: whether the result is.
    """
    outputs, channels = weight.shape[0] // groups, weight.shape[1]
    pack = 16 // weight.element_size()
    if groups > 1 and channels == 1 or outputs <= 4:
        return (2, 3, 1, 0) if channels == outputs == 1 and channels_last else None
    terms = (2, 3, 1) if x.stride(1) == 1 and channels % pack == 0 else (1, 2, 3)
    return (*terms, 0) if outputs % pack == 0 else (0, *terms)
