"""Floating-point numbers of 8 and 4 bits with scales on a grid, and products with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .._core.operators import autograd, cpu_kernel, fake_kernel, ops
from .._core.registry import Op, Sample, register
from .._core.routing import FLOAT_DTYPES, accelerated, autocast_operands, require_tensors
from .._core.tensors import in_int32
from ._linear import add_bias
from ._rows import require_integers, rows_of

__all__ = [
    "FORMATS",
    "ScaledWeight",
    "dequantize_scaled",
    "quantize_scaled",
    "require_scaled",
    "scaled_embedding",
    "scaled_linear",
    "scaled_linear_experts",
    "scaled_sample",
    "unpack_scaled",
]

_SLICE = 32


class _Format(NamedTuple):
    """The dtype of numbers, or None for E2M1; the dtype of scales; and how many numbers of a row share one, or 0 where
    a block says it."""

    numbers: torch.dtype | None
    scales: torch.dtype
    of_scale: int

    @property
    def bits(self) -> int:
        return 8 if self.numbers else 4

    @property
    def largest(self) -> float:
        return torch.finfo(self.numbers).max if self.numbers else 6.0


FORMATS: dict[str, _Format] = {
    "e4m3": _Format(torch.float8_e4m3fn, torch.float32, 0),
    "e5m2": _Format(torch.float8_e5m2, torch.float32, 0),
    "mxfp8": _Format(torch.float8_e4m3fn, torch.float8_e8m0fnu, 32),
    "mxfp8_e5m2": _Format(torch.float8_e5m2, torch.float8_e8m0fnu, 32),
    "mxfp4": _Format(None, torch.float8_e8m0fnu, 32),
    "nvfp4": _Format(None, torch.float8_e4m3fn, 16),
}
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class ScaledWeight(NamedTuple):
    """Numbers of 8 or 4 bits with their scales.

    Args:
        packed: uint8, (*, rows, bytes of a row): the bits of float8_e4m3fn or float8_e5m2, or of two numbers of E2M1,
            of which the first is the lower half of a byte. A row has a multiple of 32 numbers.
        scales: float32 (*, rows of scales, scales of a row) for "e4m3" and "e5m2". For the other formats uint8: the
            bits of float8_e8m0fnu for each 32 numbers of a row, or for "nvfp4" of float8_e4m3fn for each 16.
        format: "e4m3", "e5m2", "mxfp8" (of E4M3), "mxfp8_e5m2", "mxfp4" or "nvfp4".
        block: for "e4m3" and "e5m2" the rows, and the numbers of a row, that share a scale: powers of 2, at least 32
            in a row, or 0 for all. (0, 0) is one scale for all, (1, 0) one for each row, (128, 128) DeepSeek's.
        factor: float32, one number (of each matrix) that all scales are multiplied by, or None.

    Example:
        >>> ones = torch.full((1, 32), 0x38, dtype=torch.uint8, device="mps")  # of E4M3
        >>> weight = metalcore.quant.ScaledWeight(ones, torch.full((1, 1), 0.5, device="mps"), "e4m3", (1, 0))
        >>> metalcore.dequantize_scaled(weight)[0, 0].item()
        0.5
    """

    packed: Tensor
    scales: Tensor
    format: str
    block: tuple[int, ...] = ()
    factor: Tensor | None = None


def dequantize_scaled(weight: ScaledWeight, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns numbers of 8 or 4 bits with scales as numbers, computed in float32 and rounded to dtype.

    Args:
        weight: a ScaledWeight whose tensors have 2 dimensions.
        dtype: float32, float16 or bfloat16.

    Returns:
        (rows, numbers of a row). It has no derivative.

    Raises:
        TypeError: weight is no ScaledWeight, or dtype none of these.
        RuntimeError: shapes or dtypes do not go together, or there is no such format.

    Example:
        >>> weight = metalcore.quantize_scaled(torch.ones(2, 32, device="mps"), "mxfp8")
        >>> metalcore.dequantize_scaled(weight)[0, 0].item()
        1.0
    """
    _require("dequantize_scaled", weight, dtype)
    packed, scales, format, block, factor = weight
    return ops.scaled_rows(packed, scales, factor, None, format, block, dtype)


def scaled_embedding(indices: Tensor, weight: ScaledWeight, dtype: torch.dtype = torch.float32) -> Tensor:
    """Looks up rows, as dequantize_scaled(weight, dtype)[indices], and makes numbers only of these.

    Args:
        indices: integers, of any shape. Those that do not exist give NaN on a GPU.
        weight, dtype: as dequantize_scaled has them.

    Returns:
        (*indices.shape, numbers of a row). It has no derivative.

    Raises:
        TypeError: indices are no tensor of integers, or as dequantize_scaled.
        RuntimeError: as dequantize_scaled.

    Example:
        >>> weight = metalcore.quantize_scaled(torch.ones(2, 32, device="mps"), "nvfp4")
        >>> metalcore.scaled_embedding(torch.tensor([1], device="mps"), weight).shape
        torch.Size([1, 32])
    """
    require_tensors("scaled_embedding", indices=indices)
    require_integers("scaled_embedding", indices=indices)
    _require("scaled_embedding", weight, dtype)
    packed, scales, format, block, factor = weight
    return ops.scaled_rows(packed, scales, factor, indices.long(), format, block, dtype)


def scaled_linear(x: Tensor, weight: ScaledWeight, bias: Tensor | None = None) -> Tensor:
    """Computes x Wᵀ + bias for weights W of 8 or 4 bits with scales, as torch.nn.functional.linear(x,
    dequantize_scaled(weight), bias).

    Up to 8 rows of x are multiplied with the weights as they are read, in float32. For more rows, and for the gradient
    by x, the weights become numbers of x's dtype, which PyTorch's matmul multiplies.

    Args:
        x: float32, float16 or bfloat16, (*, numbers of a row), any strides. It is not rounded to 8 or 4 bits.
        weight: W, a ScaledWeight whose tensors have 2 dimensions.
        bias: (rows of W,), or None.

    Returns:
        (*, rows of W), of x's dtype, or of autocast's where that is on. It has derivatives with respect to x and the
        bias, not to the weights.

    Raises:
        TypeError: x or bias is no tensor, or weight no ScaledWeight.
        RuntimeError: shapes or dtypes do not go together, or there is no such format.

    Example:
        >>> weight = metalcore.quantize_scaled(torch.ones(2, 32, device="mps"), "e4m3", (1, 0))
        >>> metalcore.scaled_linear(torch.ones(1, 32, device="mps"), weight).tolist()
        [[32.0, 32.0]]
    """
    require_tensors("scaled_linear", x=x)
    require_tensors("scaled_linear", optional=True, bias=bias)
    _require("scaled_linear", weight)
    x, bias = autocast_operands(x, bias)
    result = _product(x, weight)
    return result if bias is None else add_bias(result, bias)


def _product(x, weight):
    packed, scales, format, block, factor = weight
    inputs = x, packed, scales, factor, format, block, False
    return _matmul(*inputs) if accelerated(x) else ops.scaled_matmul(*inputs)


def scaled_linear_experts(x: Tensor, weight: ScaledWeight, experts: Tensor) -> Tensor:
    """Computes x Wᵀ where each row of the result has a matrix W of its own, as experts of a mixture do.

    Few rows are multiplied with the weights as they are read. Where experts have more than 8 rows on average, and for
    the gradient by x, each expert's rows are put together, and the host waits for their numbers.

    Args:
        x: (tokens, numbers of a row), or (tokens, experts of a token, numbers of a row). float32, float16 or bfloat16.
        weight: a ScaledWeight whose tensors have 3 dimensions, of which the first is the expert. A factor has one
            number for each of them.
        experts: integers, (tokens, experts of a token). One that does not exist makes NaN.

    Returns:
        (tokens, experts of a token, rows of W), of x's dtype. It has a derivative with respect to x.

    Raises:
        TypeError: x or experts is no tensor, or weight no ScaledWeight.
        RuntimeError: shapes or dtypes do not go together, or there is no such format.

    Example:
        >>> two = [metalcore.quantize_scaled(torch.full((4, 32), n, device="mps"), "mxfp4") for n in (1.0, 2.0)]
        >>> packed, scales = (torch.stack([getattr(one, name) for one in two]) for name in ("packed", "scales"))
        >>> weight = metalcore.quant.ScaledWeight(packed, scales, "mxfp4")
        >>> chosen = torch.tensor([[1, 0]], device="mps")
        >>> metalcore.scaled_linear_experts(torch.ones(1, 32, device="mps"), weight, chosen)[0, :, 0].tolist()
        [64.0, 32.0]
    """
    require_tensors("scaled_linear_experts", x=x, experts=experts)
    require_integers("scaled_linear_experts", experts=experts)
    _require("scaled_linear_experts", weight)
    x, experts = autocast_operands(x)[0], in_int32(experts)
    packed, scales, format, block, factor = weight
    inputs = x, packed, scales, factor, experts, format, block
    if experts.numel() > 8 * packed.shape[0] and not x.is_meta:
        return _grouped(*inputs)
    return _matmul_experts(*inputs) if accelerated(x) else ops.scaled_matmul_experts(*inputs)


def _grouped(x, packed, scales, factor, experts, format, block):
    """Multiplies each expert's rows at once."""
    _require_experts(x, packed, scales, factor, experts, format, block)
    result = x.new_full((*experts.shape, packed.shape[1]), float("nan"))
    for of, (numbers, grid), whole in _by_expert(packed, scales, factor, experts):
        rows = _product(x[of[: x.dim() - 1]], ScaledWeight(numbers, grid, format, tuple(block), whole))
        result = result.index_put(of, rows)
    return result


def _by_expert(packed, scales, factor, experts):
    """Yields where each expert is chosen, its packed numbers with their scales, and its factor."""
    for expert in experts.unique().tolist():
        if 0 <= expert < len(packed):
            own = None if factor is None else factor.view(-1)[expert : expert + 1]
            yield (experts == expert).nonzero(as_tuple=True), (packed[expert], scales[expert]), own


def quantize_scaled(
    tensor: Tensor, format: str, block: Sequence[int] | None = None, rounding: str = "floor"
) -> ScaledWeight:
    """Packs numbers in 8 or 4 bits: each is divided by its scale, rounded to the nearest, halves to even, and where it
    is beyond the largest becomes that ("saturation" in the formats' specifications).

    Args:
        tensor: floating-point, (rows, numbers of a row), where 32 divides the numbers of a row.
        format, block: as ScaledWeight has them. A scale of "e4m3" and "e5m2" is the largest absolute number of its
            block over the format's largest. A block is (1, 0), a row, by default.
        rounding: how a power of 2 becomes the scale of formats that begin with "mx". "floor" is the rule of the
            Microscaling specification: 2 to the power of floor(log2(largest number)) - floor(log2(format's largest)),
            so that numbers may be beyond the format's largest. "ceil" is the least power of 2 for which none is.
            "even" is as "floor", for the largest number rounded to the format's precision.

    Returns:
        A ScaledWeight. Of "nvfp4" it has a factor, with which the largest scale is E4M3's largest, 448. The scale of
        blocks with numbers that are NaN or infinite is NaN, in the formats that begin with "mx".

    Raises:
        TypeError: tensor is no tensor of floating-point numbers.
        RuntimeError: there is no such format, block or rounding, or 32 does not divide the rows.

    Example:
        >>> metalcore.quantize_scaled(torch.ones(4, 64, device="mps"), "nvfp4").packed.shape
        torch.Size([4, 32])
    """
    require_tensors("quantize_scaled", tensor=tensor)
    if not tensor.is_floating_point():
        raise TypeError(f"quantize_scaled: tensor must be floating-point numbers, not {tensor.dtype}")
    numbers = tensor.detach()
    numbers = numbers if numbers.dtype in FLOAT_DTYPES else numbers.float()
    of = _format(format)
    if numbers.dim() != 2 or numbers.shape[1] % _SLICE:
        raise RuntimeError(f"quantize_scaled: 32 does not divide rows of shape {tuple(numbers.shape)}")
    scales = factor = None
    sides = () if of.of_scale else (1, 0) if block is None else tuple(block)
    if block is not None and of.of_scale and tuple(block) != (1, of.of_scale):
        raise RuntimeError(f"quantize_scaled: {format} has blocks of its own, and no {tuple(block)}")
    if not of.of_scale:
        scales = _over(_largest(numbers, _sides(format, sides)).float(), of.largest)
        scales = torch.where(scales == 0, torch.ones_like(scales), scales)
    elif format == "nvfp4":
        factor = _over(_largest(numbers, (0, 0)).float().view(-1), 448.0 * 6.0)
        factor = torch.where(factor == 0, torch.ones_like(factor), factor) if factor.numel() else factor.new_ones(1)
    packed, made = ops.scaled_quantize(numbers, scales, factor, format, sides, rounding)
    return ScaledWeight(packed, made if scales is None else scales, format, sides, factor)


def _over(numbers, divisor):
    """Returns quotients, rounded once. Of a number PyTorch's operator takes the reciprocal on some devices."""
    return numbers / torch.full_like(numbers, divisor)


def _largest(numbers, sides):
    """Returns the largest absolute value of each block."""
    rows, length = numbers.shape
    high, wide = (side or max(size, 1) for side, size in zip(sides, numbers.shape))
    padded = torch.nn.functional.pad(numbers, (0, -length % wide, 0, -rows % high))
    blocks = padded.view(padded.shape[0] // high, high, padded.shape[1] // wide, wide)
    return torch.maximum(blocks.amax((1, 3)), -blocks.amin((1, 3)))


def _require(op, weight, dtype=torch.float32):
    if not isinstance(weight, ScaledWeight):
        raise TypeError(f"{op}: weight must be a metalcore.quant.ScaledWeight, not a {type(weight).__name__}")
    if not isinstance(dtype, torch.dtype) or dtype not in FLOAT_DTYPES:
        raise TypeError(f"{op}: dtype must be torch.float32, torch.float16 or torch.bfloat16, not {dtype}")


def _format(name):
    if name not in FORMATS:
        raise RuntimeError(f"format must be one of {', '.join(FORMATS)}, not {name!r}")
    return FORMATS[name]


def _sides(name, block):
    """Returns the rows, and the numbers of a row, of a block."""
    of = _format(name)
    if of.of_scale:
        return 1, of.of_scale
    if len(block) != 2 or any(side < 0 or side & (side - 1) for side in block) or 0 < block[1] < _SLICE:
        raise RuntimeError(f"block must have sides of 0 (all) or powers of 2, at least 32 in a row, not {block}")
    return tuple(block)


def _grid(rows, length, sides):
    return [-(size // -side) if side else int(size > 0) for size, side in zip((rows, length), sides)]


def require_scaled(
    packed: Tensor, scales: Tensor, factor: Tensor | None, format: str, block: Sequence[int], dims: int = 2
) -> int:
    """Refuses what kernels refuse, and returns how many numbers a row has."""
    of = _format(format)
    if packed.dtype != torch.uint8 or packed.dim() != dims:
        raise RuntimeError(f"packed must be uint8 with {dims} dimensions, not {packed.dtype} {list(packed.shape)}")
    length = packed.shape[-1] * 8 // of.bits
    if length % _SLICE:
        raise RuntimeError(f"rows of {length} numbers are no multiples of 32")
    shape = [*packed.shape[:-2], *_grid(packed.shape[-2], length, _sides(format, block))]
    wanted = torch.float32 if of.scales is torch.float32 else torch.uint8
    if list(scales.shape) != shape or scales.dtype != wanted:
        raise RuntimeError(f"scales must be {wanted} {shape}, and are {scales.dtype} {list(scales.shape)}")
    matrices = packed.shape[0] if dims == 3 else 1
    if factor is not None and (factor.dtype != torch.float32 or factor.numel() != matrices):
        raise RuntimeError(f"factor must be float32 with {matrices} elements, not {factor.dtype} {list(factor.shape)}")
    return length


def _require_experts(x, packed, scales, factor, experts, format, block):
    length = require_scaled(packed, scales, factor, format, block, 3)
    leading = x.shape[:-1] in (experts.shape, experts.shape[:1])
    if experts.dim() != 2 or not leading or x.shape[-1] != length:
        raise RuntimeError(
            f"scaled_linear_experts: x of shape {list(x.shape)} does not go with experts of shape "
            f"{list(experts.shape)} and weights of {length}"
        )


def unpack_scaled(packed: Tensor, scales: Tensor, factor: Tensor | None, format: str, block: Sequence[int]) -> Tensor:
    """Returns the numbers, float32, by PyTorch's ops."""
    of = _format(format)
    if of.numbers is None:
        packed = torch.stack([packed & 15, packed >> 4], -1).view(*packed.shape[:-1], 2 * packed.shape[-1])
    numbers = _values(packed, of.numbers)
    scales = scales if of.scales is torch.float32 else _values(scales, of.scales)
    scales = scales if factor is None else scales * factor
    return numbers * _spread(scales, numbers.shape, _sides(format, block))


def _values(codes, dtype):
    """Returns what bytes stand for. A GPU may not have such dtypes, and gets a table."""
    bytes = torch.arange(256, dtype=torch.uint8, device="cpu")
    table = bytes.view(dtype).float() if dtype else torch.tensor([*_E2M1, *(-value for value in _E2M1)], device="cpu")
    return table.to(codes.device)[codes.int()]


def _spread(scales, shape, sides):
    """Returns a scale for each number."""
    for dim, side in zip((0, 1), sides):
        scales = scales.repeat_interleave(side or shape[dim], dim).narrow(dim, 0, shape[dim])
    return scales


def _encode(values, of):
    if of.numbers:
        return values.clamp(-of.largest, of.largest).to(of.numbers).view(torch.uint8)
    size = values.abs()
    codes = sum((size > tie).to(torch.uint8) for tie in (0.25, 1.25, 2.5, 5.0))
    codes = sum(((size >= tie).to(torch.uint8) for tie in (0.75, 1.75, 3.5)), codes)
    codes = (codes | values.signbit().to(torch.uint8) << 3).unflatten(-1, (-1, 2))
    return codes[..., 0] | codes[..., 1] << 4


def _powers(largest, of, rounding):
    """Returns the scales of E8M0 for blocks with these largest numbers."""
    bits = largest.view(torch.int32)
    top = int(torch.tensor(of.largest).view(torch.int32))
    fraction = {torch.float8_e4m3fn: 3, torch.float8_e5m2: 2, None: 1}[of.numbers]
    raised = bits + {"floor": 0, "ceil": 0x7FFFFF - (top & 0x7FFFFF), "even": 1 << (22 - fraction)}[rounding]
    powers = ((raised >> 23) - ((top >> 23) - 127)).clamp(min=0)
    return torch.where(bits >= 0x7F800000, 255, powers).to(torch.uint8)


@cpu_kernel("scaled_quantize")
def _(numbers, scales, factor, format, block, rounding):
    of, x = _format(format), numbers.float()
    if rounding not in ("floor", "ceil", "even"):
        raise RuntimeError(f"scaled_quantize: rounding must be floor, ceil or even, not {rounding}")
    if scales is not None:
        divided = x / _spread(scales, x.shape, _sides(format, block))
        return _encode(divided, of), x.new_empty(0, 0, dtype=torch.uint8)
    blocks = x.unflatten(-1, (-1, of.of_scale))
    largest = blocks.abs().amax(-1) if x.numel() else x.new_empty(blocks.shape[:-1])
    if format != "nvfp4":
        powers = _powers(largest, of, rounding)
        divided = blocks / powers.view(torch.float8_e8m0fnu).float()[..., None]
        return _encode(torch.where((powers == 255)[..., None], 0.0, divided).flatten(-2), of), powers
    factor = x.new_ones(1) if factor is None else factor
    made = (largest / 6.0 / factor).clamp(max=448.0).to(torch.float8_e4m3fn)
    divisor = (made.float() * factor)[..., None]
    divided = torch.where(divisor > 0, blocks / divisor, 0.0)
    return _encode(divided.flatten(-2), of), made.view(torch.uint8)


@fake_kernel("scaled_quantize")
def _(numbers, scales, factor, format, block, rounding):
    of = _format(format)
    rows, length = numbers.shape
    packed = numbers.new_empty([rows, length * of.bits // 8], dtype=torch.uint8)
    made = [0, 0] if scales is not None else [rows, length // of.of_scale]
    return packed, numbers.new_empty(made, dtype=torch.uint8)


@cpu_kernel("scaled_rows")
def _(packed, scales, factor, rows, format, block, dtype):
    require_scaled(packed, scales, factor, format, block)
    numbers = unpack_scaled(packed, scales, factor, format, block).to(dtype)
    return numbers if rows is None else rows_of(numbers, rows.reshape(-1)).view(*rows.shape, numbers.shape[1])


@fake_kernel("scaled_rows")
def _(packed, scales, factor, rows, format, block, dtype):
    shape = packed.shape[:1] if rows is None else rows.shape
    return packed.new_empty([*shape, packed.shape[1] * 8 // _format(format).bits], dtype=dtype)


@cpu_kernel("scaled_matmul")
def _(x, packed, scales, factor, format, block, transposed):
    length = require_scaled(packed, scales, factor, format, block)
    if x.dim() < 1 or x.shape[-1] != (len(packed) if transposed else length):
        raise RuntimeError(
            f"scaled_matmul: x of shape {list(x.shape)} does not go with {len(packed)} rows of {length} weights"
        )
    weights = unpack_scaled(packed, scales, factor, format, block).to(x.dtype)
    return x @ (weights if transposed else weights.T)


@fake_kernel("scaled_matmul")
def _(x, packed, scales, factor, format, block, transposed):
    length = packed.shape[1] * 8 // _format(format).bits
    return x.new_empty([*x.shape[:-1], length if transposed else packed.shape[0]])


@cpu_kernel("scaled_matmul_experts")
def _(x, packed, scales, factor, experts, format, block):
    return _grouped(x, packed, scales, factor, experts, format, block)


@fake_kernel("scaled_matmul_experts")
def _(x, packed, scales, factor, experts, format, block):
    return x.new_empty([*experts.shape, packed.shape[1]])


def _save(ctx, inputs, output):
    _, *weights, ctx.format, ctx.block, ctx.transposed = inputs
    ctx.save_for_backward(*weights)


def _backward(ctx, grad):
    return _matmul(grad, *ctx.saved_tensors, ctx.format, ctx.block, not ctx.transposed), *[None] * 6


_matmul = autograd("scaled_matmul", _backward, _save)


def _save_experts(ctx, inputs, output):
    x, *tensors, ctx.format, ctx.block = inputs
    ctx.save_for_backward(*tensors)
    ctx.own, ctx.shape = x.dim() == 3, x.shape


# An operator of its own, since which experts are chosen decides what it computes.
_library = torch.library.Library("metalcore", "FRAGMENT")
_library.define(
    "_scaled_matmul_experts_backward(Tensor grad, Tensor packed, Tensor scales, Tensor? factor, Tensor experts, "
    "str format, int[] block, int length) -> Tensor"
)


@torch.library.impl(_library, "_scaled_matmul_experts_backward", "CompositeExplicitAutograd")
def _(grad, packed, scales, factor, experts, format, block, length):
    result = grad.new_zeros(*experts.shape, length)
    for of, weight, whole in _by_expert(packed, scales, factor, experts):
        result = result.index_put(of, _matmul(grad[of].contiguous(), *weight, whole, format, block, True))
    return result


@torch.library.impl(_library, "_scaled_matmul_experts_backward", "Meta")
def _(grad, packed, scales, factor, experts, format, block, length):
    return grad.new_empty(*experts.shape, length)


def _save_backward(ctx, inputs, output):
    _, *tensors, ctx.format, ctx.block, _ = inputs
    ctx.save_for_backward(*tensors)


def _backward_backward(ctx, grad):
    return _matmul_experts(grad, *ctx.saved_tensors, ctx.format, ctx.block), *[None] * 7


torch.library.register_autograd(
    "metalcore::_scaled_matmul_experts_backward", _backward_backward, setup_context=_save_backward, lib=_library
)


def _backward_experts(ctx, grad):
    result = torch.ops.metalcore._scaled_matmul_experts_backward(
        grad, *ctx.saved_tensors, ctx.format, ctx.block, ctx.shape[-1]
    )
    return result if ctx.own else result.sum(1), *[None] * 6


_matmul_experts = autograd("scaled_matmul_experts", _backward_experts, _save_experts)


def scaled_sample(
    format: str, rows: int, length: int, device: torch.device | str, block: tuple[int, int] = (1, 0), matrices: int = 0
) -> ScaledWeight:
    """Returns a weight, the same on every device: all codes that are numbers, with scales around 1/8."""
    of, count = FORMATS[format], (matrices or 1) * rows
    numbers = torch.arange(count * length * of.bits // 8, device=device)
    packed = ((numbers * 167 + numbers // 16 * 53 + 11) & 255).to(torch.uint8)
    if of.bits == 8:  # the largest numbers would hide all others
        packed &= 0xBF
    high, wide = _grid(rows, length, _sides(format, block))
    scales = torch.arange((matrices or 1) * high * wide, device=device) % 7
    leading = (matrices,) if matrices else ()
    if of.scales is torch.float32:
        scales = (scales + 4) / 64
    else:
        scales = (scales + (121 if of.of_scale == 32 else 24)).to(torch.uint8)
    factor = None
    if format == "nvfp4":
        factor = torch.arange(1, (matrices or 1) + 1, device=device) / 2
    sides = () if of.of_scale else block
    return ScaledWeight(packed.view(*leading, rows, -1), scales.view(*leading, high, wide), format, sides, factor)


def _reference(x, weight, bias=None):
    numbers = unpack_scaled(weight.packed, weight.scales, weight.factor, weight.format, weight.block)
    return torch.nn.functional.linear(x, numbers.to(x.dtype), bias)


def _experts_reference(x, weight, experts):
    of = [ScaledWeight(*of_each, weight.format, weight.block) for of_each in zip(weight.packed, weight.scales)]
    factors = [None] * len(of) if weight.factor is None else list(weight.factor)
    numbers = torch.stack([unpack_scaled(w.packed, w.scales, f, w.format, w.block) for w, f in zip(of, factors)])
    return torch.einsum("tk,tenk->ten" if x.dim() == 2 else "tek,tenk->ten", x, numbers.to(x.dtype)[experts.long()])


register(
    Op(
        "scaled_linear",
        scaled_linear,
        reference=_reference,
        operators=("scaled_matmul",),
        samples=lambda: tuple(
            Sample(
                f"{format} {'x'.join(map(str, block))}, {rows} rows of {length}",
                ((rows, length),),
                arguments=lambda x, format=format, block=block: (
                    x,
                    scaled_sample(format, 37, x.shape[1], x.device, block),
                ),
                terms=length,
                roundings=2,
            )
            for format, block, rows, length in (
                ("e4m3", (128, 128), 1, 1280),
                ("e5m2", (1, 0), 3, 288),
                ("mxfp8", (1, 32), 2, 1280),
                ("mxfp4", (1, 32), 1, 288),
                ("nvfp4", (1, 16), 5, 288),
                ("e4m3", (0, 0), 20, 288),
            )
        ),
    )
)
register(
    Op(
        "scaled_linear_experts",
        scaled_linear_experts,
        reference=_experts_reference,
        operators=("scaled_matmul_experts", "scaled_matmul"),
        samples=lambda: tuple(
            Sample(
                f"{format}, {tokens} tokens",
                ((tokens, *own, 96),),
                arguments=lambda x, format=format: (
                    x,
                    scaled_sample(format, 21, 96, x.device, (32, 32), 3),
                    (torch.arange(2 * len(x), device=x.device) * 5 % 3).view(-1, 2),
                ),
                terms=96,
                roundings=2,
                backward=False,  # which experts are chosen decides what it runs, so that no plan says it before
            )
            for format, tokens, own in (("e4m3", 2, ()), ("nvfp4", 3, (2,)))
        ),
        waits=True,
    )
)


def _numbers_samples(indices):
    """Returns samples. Their tensor gives only the device."""

    def sample(format):
        def arguments(x):
            weight = scaled_sample(format, 9, 160, x.device, (2, 32))
            return (torch.arange(4, device=x.device).mul(4).view(2, 2) % 9, weight) if indices else (weight,)

        return Sample(format, ((1,),), arguments=arguments)

    return tuple(sample(format) for format in ("e4m3", "mxfp4", "nvfp4"))


def _numbers(weight, dtype=torch.float32):
    return unpack_scaled(weight.packed, weight.scales, weight.factor, weight.format, weight.block).to(dtype)


register(
    Op(
        "dequantize_scaled",
        dequantize_scaled,
        reference=_numbers,
        operators=("scaled_rows",),
        samples=lambda: _numbers_samples(False),
        backward=False,
    )
)
register(
    Op(
        "scaled_embedding",
        scaled_embedding,
        reference=lambda indices, weight: _numbers(weight)[indices],
        operators=("scaled_rows",),
        samples=lambda: _numbers_samples(True),
        backward=False,
    )
)
register(
    Op(
        "quantize_scaled",
        quantize_scaled,
        # Whether a number is rounded up or down may depend on the last bit of a scale.
        reference=lambda tensor, format, block: tensor.abs().amax(1, keepdim=True) / 448.0,
        results=lambda returned: [returned.scales if isinstance(returned, ScaledWeight) else returned],
        operators=("scaled_quantize",),
        samples=lambda: (Sample("rows", ((3, 320),), {"format": "e4m3", "block": (1, 0)}),),
        backward=False,
    )
)
