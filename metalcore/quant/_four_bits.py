"""Weights of 4 bits in blocks, and products with them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from .._core.operators import autograd, cpu_kernel, fake_kernel, ops
from .._core.registry import Op, Sample, register
from .._core.routing import accelerated, autocast_operands, require_tensors
from ._blockwise import SCALE_BLOCK, TABLES, dynamic_code, pack_blocks, unpack_blocks
from ._eight_bits import (
    even_code,
    quantized_blocks,
    require_dtype,
    sample_bytes,
    sample_scales,
    unpacked_scales,
)
from ._linear import add_bias

__all__ = ["FourBits", "as_bytes", "dequantize_4bit", "four_bits_sample", "linear_4bit", "quantize_4bit"]


@dataclasses.dataclass
class FourBits:
    """What packed weights of 4 bits are, beside their bytes.

    Attributes:
        absmax: the blocks' scales, float32. If `scales` are there, absmax are the scales of these.
        shape, dtype: of the numbers that were packed.
        block_size: how many consecutive numbers share a scale.
        type: "nf4" or "fp4".
        scales: the blocks' scales in 8 bits, uint8, or None.
        scales_code: what these 8 bits stand for, 256 float32 numbers.
        offset: the mean of the scales, which was subtracted before they were packed.

    Example:
        >>> packed, state = metalcore.quantize_4bit(torch.ones(4, 32, device="mps"), "fp4", compress=True)
        >>> state.type, state.block_size, state.scales.shape
        ('fp4', 64, torch.Size([2]))
    """

    absmax: Tensor
    shape: Sequence[int]
    dtype: torch.dtype
    block_size: int = 64
    type: str = "nf4"
    scales: Tensor | None = None
    scales_code: Tensor | None = None
    offset: Tensor | None = None

    def operands(self) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, str, int]:
        """Returns what the operators take of it."""
        return self.absmax, self.scales, self.scales_code, self.offset, self.type, self.block_size


def quantize_4bit(
    tensor: Tensor, type: str = "nf4", block_size: int = 64, compress: bool = False
) -> tuple[Tensor, FourBits]:
    """Packs numbers in 4 bits, each block with the largest absolute value in it as its scale.

    Args:
        tensor: float32, float16 or bfloat16, of any shape.
        type: "nf4" (quantiles of a normal distribution) or "fp4" (a sign, two bits of exponent, one of fraction).
        block_size: 32, 64, 128 … 4096.
        compress: whether the scales are packed in 8 bits, too ("double quantization").

    Returns:
        packed: uint8, (bytes, 1), on the tensor's device: two numbers a byte, the first of them in its upper half.
        FourBits: the scales, and what else tells how to read the bytes. Bytes and scales are those of bitsandbytes.

    Raises:
        ValueError: type or block_size is another.
        TypeError: tensor is no tensor of these dtypes.

    Example:
        >>> packed, state = metalcore.quantize_4bit(torch.ones(4, 32, device="mps"), "nf4")
        >>> packed.shape, state.absmax.tolist()
        (torch.Size([64, 1]), [1.0, 1.0])
    """
    _require_type("quantize_4bit", type)
    packed, absmax = quantized_blocks("quantize_4bit", tensor, type, block_size, None)
    state = FourBits(absmax, tensor.shape, tensor.dtype, block_size, type)
    if compress:
        code = dynamic_code(tensor.device)
        state.offset = absmax.mean() if absmax.numel() else absmax.new_zeros(())
        state.scales, state.absmax = quantized_blocks("quantize_4bit", absmax - state.offset, "code", SCALE_BLOCK, code)
        state.scales_code = code
    return packed[:, None], state


def dequantize_4bit(packed: Tensor, state: FourBits, dtype: torch.dtype | None = None) -> Tensor:
    """Returns packed numbers of 4 bits as numbers.

    Args:
        packed: the bytes, of any shape and dtype.
        state: as quantize_4bit returns it.
        dtype: of the result; None is the dtype of what was packed. Numbers are rounded once, from float32.

    Returns:
        a tensor of the state's shape. It has no derivative.

    Raises:
        TypeError: packed is no tensor, or dtype no torch.dtype of float32, float16 or bfloat16.
        RuntimeError: packed or the scales have another size than the shape needs.

    Example:
        >>> packed, state = metalcore.quantize_4bit(torch.tensor([3.0, -3.0, 0.0, 1.0], device="mps"), "fp4")
        >>> metalcore.dequantize_4bit(packed, state).tolist()
        [3.0, -3.0, 0.0, 1.0]
    """
    require_tensors("dequantize_4bit", packed=packed)
    _require_state("dequantize_4bit", state)
    dtype = require_dtype("dequantize_4bit", state.dtype if dtype is None else dtype)
    return ops.dequantize_blockwise(as_bytes(packed), *state.operands(), None, list(state.shape), dtype)


def linear_4bit(x: Tensor, packed: Tensor, state: FourBits, bias: Tensor | None = None) -> Tensor:
    """Computes x Wᵀ + bias for weights W of 4 bits, as torch.nn.functional.linear with dequantize_4bit(packed, state).

    Up to 8 rows of x are multiplied with the weights as they are read, in float32. GPUs of compute capability 9.0 take
    2 to 16 rows of 16 bits to their tensor cores, where weights have x's dtype. For more rows, and for the gradient by
    x, the weights become numbers of x's dtype, which PyTorch's matmul multiplies.

    Args:
        x: float32, float16 or bfloat16, (*, columns of W), any strides.
        packed, state: W, as quantize_4bit returns it, of two dimensions.
        bias: (rows of W,), or None.

    Returns:
        (*, rows of W), of x's dtype, or of autocast's where that is on. It has derivatives with respect to x and the
        bias, not to the weights.

    Raises:
        TypeError: x, packed or bias is no tensor.
        RuntimeError: shapes do not match, or x is not of these dtypes.

    Example:
        >>> packed, state = metalcore.quantize_4bit(torch.ones(4, 32, device="mps"))
        >>> metalcore.linear_4bit(torch.ones(2, 32, device="mps"), packed, state)[0].tolist()
        [32.0, 32.0, 32.0, 32.0]
    """
    require_tensors("linear_4bit", x=x, packed=packed)
    require_tensors("linear_4bit", optional=True, bias=bias)
    _require_state("linear_4bit", state)
    if len(state.shape) != 2:
        raise RuntimeError(f"linear_4bit: weights must have 2 dimensions, not {len(state.shape)}")
    x, bias = autocast_operands(x, bias)
    inputs = x, as_bytes(packed), *state.operands(), *state.shape, False
    result = _matmul(*inputs) if accelerated(x) else ops.blockwise_matmul(*inputs)
    return result if bias is None else add_bias(result, bias)


def as_bytes(packed: Tensor) -> Tensor:
    """Returns packed numbers as bytes, flat. They may be kept as another dtype, as FSDP needs it."""
    return packed.detach().reshape(-1).view(torch.uint8)


def _require_state(op, state):
    if not isinstance(state, FourBits):
        raise TypeError(f"{op}: state must be what quantize_4bit returns, not {type(state).__name__}")


def _require_type(op, type):
    if not isinstance(type, str) or type not in TABLES:
        raise ValueError(f'{op}: type must be "nf4" or "fp4", not {type!r}')


@cpu_kernel("blockwise_matmul")
def _(x, packed, absmax, scales, scales_code, offset, type, block_size, rows, length, transposed):
    absmax = unpacked_scales(absmax, scales, scales_code, offset)
    weights = unpack_blocks(packed, absmax, type, block_size, None, (rows, length)).to(x.dtype)
    return x @ (weights if transposed else weights.T)


@fake_kernel("blockwise_matmul")
def _(x, packed, absmax, scales, scales_code, offset, type, block_size, rows, length, transposed):
    return x.new_empty([*x.shape[:-1], length if transposed else rows])


def _save(ctx, inputs, output):
    _, *weights, ctx.type, ctx.block_size, ctx.rows, ctx.length, ctx.transposed = inputs
    ctx.save_for_backward(*weights)


def _backward(ctx, grad):
    numbers = ctx.type, ctx.block_size, ctx.rows, ctx.length, not ctx.transposed
    return _matmul(grad, *ctx.saved_tensors, *numbers), *[None] * 10


_matmul = autograd("blockwise_matmul", _backward, _save)


def four_bits_sample(
    type: str, rows: int, length: int, device: torch.device | str, block_size: int = 64, nested: bool = False
) -> tuple[Tensor, FourBits]:
    """Returns packed weights and their state, the same on every device."""
    absmax = sample_scales(-(rows * length // -block_size), device)
    state = FourBits(absmax, (rows, length), torch.float32, block_size, type)
    if nested:
        state.scales = sample_bytes(len(absmax), device)
        state.absmax = sample_scales(-(len(absmax) // -SCALE_BLOCK), device) / 4
        state.scales_code, state.offset = even_code(device), torch.full((), 0.75, device=device)
    return sample_bytes((rows * length + 1) // 2, device)[:, None], state


def _unpacked(packed, state):
    absmax = unpacked_scales(state.absmax, state.scales, state.scales_code, state.offset)
    return unpack_blocks(as_bytes(packed), absmax, state.type, state.block_size, None, state.shape)


def _linear_samples():
    def sample(type, rows, length, nested):
        return Sample(
            f"{type}, {rows} rows of {length}{', scales in 8 bits' * nested}",
            ((rows, length),),
            arguments=lambda x: (x, *four_bits_sample(type, 37, length, x.device, nested=nested)),
            terms=length,
            roundings=2,
        )

    return tuple(
        sample(*of)
        for of in (
            ("nf4", 1, 1280, False),
            ("fp4", 1, 1280, True),
            ("nf4", 5, 1280, True),
            ("fp4", 3, 1280, False),
            ("nf4", 20, 1280, False),
            ("nf4", 2, 50, False),
        )
    )


register(
    Op(
        "linear_4bit",
        linear_4bit,
        reference=lambda x, packed, state, bias=None: torch.nn.functional.linear(
            x, _unpacked(packed, state).to(x.dtype), bias
        ),
        operators=("blockwise_matmul",),
        samples=_linear_samples,
    )
)
# The samples' tensor gives only the device and the dtype.
register(
    Op(
        "dequantize_4bit",
        dequantize_4bit,
        reference=_unpacked,
        operators=("dequantize_blockwise",),
        samples=lambda: tuple(
            Sample(
                f"{type}{', scales in 8 bits' * nested}",
                ((1,),),
                arguments=lambda x, type=type, nested=nested: four_bits_sample(type, 9, 333, x.device, 128, nested),
            )
            for type, nested in (("nf4", False), ("fp4", False), ("nf4", True))
        ),
        backward=False,
    )
)
register(
    Op(
        "quantize_4bit",
        quantize_4bit,
        reference=lambda tensor, type, block_size=64: pack_blocks(tensor, type, block_size)[1],
        results=lambda returned: [returned if isinstance(returned, Tensor) else returned[1].absmax],
        operators=("quantize_blockwise",),
        samples=lambda: (
            Sample("nf4", ((33, 31),), {"type": "nf4"}),
            Sample("fp4, long blocks", ((3, 4100),), {"type": "fp4", "block_size": 4096}),
        ),
        backward=False,
    )
)
