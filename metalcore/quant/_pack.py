"""Numbers as packed weights.

The types with one scale a block, or a scale and a minimum, are packed as ggml does. For the others each group of
numbers tries scales around the one that covers all of them, and takes the one with the smallest squared error; where
scales are integers times a factor of a block, those beside the nearest ones are tried, too. ggml's own search
(github.com/ggml-org/ggml, src/ggml-quants.c) has fewer candidates. kernels/quant/quantize.h has the searches. CPU
tensors are packed by the same kernels.
"""

from __future__ import annotations

import math
import threading
from typing import Any

import torch
from torch import Tensor

from .._core.operators import cpu_kernel, fake_kernel, ops
from .._core.registry import Op, Sample, register
from .._core.routing import DEVICES, FLOAT_DTYPES, require_tensors
from .._core.tensors import whole
from ._types import BY_NUMBER, KERNELS, Type, type_of

__all__ = ["quantize"]


def quantize(tensor: Tensor, type: Any) -> Tensor:
    """Packs numbers in one of GGML's types.

    Args:
        tensor: floating-point, (*, length), where blocks of the type divide the length. It is computed in float32.
        type: GGML's type, by name ("Q4_K") or number: Q4_0 to Q8_0, Q2_K to Q6_K, IQ4_NL, IQ4_XS, MXFP4, TQ1_0, TQ2_0,
            F32, F16 or BF16.

    Returns:
        uint8, (*, bytes of a row), on the tensor's device.

    Raises:
        ValueError: the type is unknown or cannot be made, its blocks do not divide the length, or a number is NaN,
            infinite, or beyond ±65504, which blocks with scales in float16 cannot hold. F32, F16 and BF16 hold all,
            and MXFP4 larger ones.
        TypeError: tensor is no tensor of floating-point numbers.
        RuntimeError: tensor is on the CPU, and this build runs kernels nowhere.

    Example:
        >>> metalcore.quantize(torch.ones(2, 32, device="mps"), "Q8_0").shape  # 34 bytes for a block of 32
        torch.Size([2, 34])
    """
    type = type_of(type)
    require_tensors("quantize", tensor=tensor)
    if not tensor.is_floating_point():
        raise TypeError(f"quantize: tensor must be floating-point numbers, not {tensor.dtype}")
    if tensor.dim() == 0 or tensor.shape[-1] % type.block:
        raise ValueError(f"{type.name}'s blocks of {type.block} do not divide rows of shape {tuple(tensor.shape)}")
    numbers = tensor.detach()
    if type.name in _PLAIN:
        return numbers.to(_PLAIN[type.name]).contiguous().view(torch.uint8)
    if type.name not in MADE:
        raise ValueError(f"metalcore cannot make weights of type {type.name}")
    if numbers.dtype not in FLOAT_DTYPES:
        numbers = numbers.float()
    run_here = numbers.device.type in ("cpu", "meta", *DEVICES)
    packed, unheld = ops.quantize(numbers if run_here else numbers.cpu(), type.number)
    if not unheld.is_meta and whole(unheld).item():  # all ranks raise
        wrong = not_held(largest_of(whole(numbers)), type)
        raise ValueError(f"quantize: tensor has {wrong}, which blocks of {type.name} cannot hold")
    return packed.to(numbers.device)


MADE = KERNELS | {"TQ1_0", "TQ2_0"}  # types that have kernels which pack numbers
_LARGEST = 65504.0  # of float16, which scales and least numbers of blocks are


def largest_of(numbers: Tensor) -> float:
    """Returns the largest absolute value, or NaN."""
    if not numbers.numel():
        return 0.0
    # abs() would be one more tensor of this size. aminmax reads it once, and some releases of PyTorch lack it on MPS.
    on_cpu = numbers.device.type == "cpu"
    least, most = torch.aminmax(numbers) if on_cpu else (numbers.amin(), numbers.amax())
    return max(-least.item(), most.item())


def not_held(largest: float, type: Type) -> str | None:
    """Returns which numbers blocks of a type cannot hold, where this is the largest: some types would say 0 for the
    whole block, others infinity."""
    if not math.isfinite(largest):
        return "NaN or infinite numbers"
    bounded = type.name not in ("MXFP4", *_PLAIN)  # scales of MXFP4 are powers of 2 up to 2**127
    return f"numbers up to {largest:g}, beyond {_LARGEST:g}" if bounded and largest > _LARGEST else None


_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@fake_kernel("quantize")
def _(numbers, type):
    type = BY_NUMBER[type]
    row = numbers.shape[-1] // type.block * type.nbytes
    return numbers.new_empty((*numbers.shape[:-1], row), dtype=torch.uint8), numbers.new_empty((), dtype=torch.int32)


if not torch._C._dispatch_has_kernel_for_dispatch_key("metalcore::quantize", "CPU"):  # which the simulator runs
    _entered = threading.local()

    @cpu_kernel("quantize")
    def _(numbers, type):
        # It comes here again where Metal refuses the kernels.
        if numbers.device.type != "cpu" or not DEVICES or getattr(_entered, "already", False):
            raise RuntimeError("quantize: this machine runs no kernels that pack numbers, and PyTorch has no operator")
        _entered.already = True
        try:
            packed, unheld = ops.quantize(numbers.to(next(iter(DEVICES))), type)
            return packed.cpu(), unheld.cpu()
        finally:
            _entered.already = False


def _scales_of_q8(packed):
    """Returns the blocks' scales: whether a number is rounded up or down may depend on the last bit of a scale."""
    return [packed.unflatten(-1, (-1, 34))[..., :2].contiguous().view(torch.float16)]


register(
    Op(
        "quantize",
        quantize,
        reference=lambda tensor, type: (tensor.unflatten(-1, (-1, 32)).abs().amax(-1, keepdim=True) / 127).half(),
        results=lambda returned: _scales_of_q8(returned) if returned.dtype is torch.uint8 else [returned],
        operators=("quantize",),
        error="no kernels that pack numbers",
        samples=lambda: (Sample("Q8_0", ((3, 320),), {"type": "Q8_0"}),),
        backward=False,
        waits=True,
    )
)
