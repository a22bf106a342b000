"""Numbers as packed weights.

The types with one scale a block, or a scale and a minimum, are packed by the package gguf, as ggml does. For the others
each block tries scales around the one that covers all its numbers, and takes the one with the smallest squared error.
ggml's own search (github.com/ggml-org/ggml, src/ggml-quants.c) has fewer candidates.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._core.routing import require_tensors
from ._types import Type, type_of
from ._unpack import NONLINEAR

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
        RuntimeError: Q4_0 to Q8_0, MXFP4, TQ1_0 and TQ2_0 need the package gguf, which is not installed.

    Example:
        >>> metalcore.quant.quantize(torch.ones(2, 32, device="mps"), "Q8_0").shape  # 34 bytes for a block of 32
        torch.Size([2, 34])
    """
    type = type_of(type)
    require_tensors("quantize", tensor=tensor)
    if not tensor.is_floating_point():
        raise TypeError(f"quantize: tensor must be floating-point numbers, not {tensor.dtype}")
    if tensor.dim() == 0 or tensor.shape[-1] % type.block:
        raise ValueError(f"{type.name}'s blocks of {type.block} do not divide rows of shape {tuple(tensor.shape)}")
    numbers = tensor.detach().float()
    if type.name in _PLAIN:
        return numbers.to(_PLAIN[type.name]).contiguous().view(torch.uint8)
    shape = (*tensor.shape[:-1], tensor.shape[-1] // type.block * type.nbytes)
    if numbers.numel() == 0:
        return torch.empty(shape, dtype=torch.uint8, device=tensor.device)
    if not numbers.is_meta and (wrong := not_held(largest_of(numbers), type)):
        raise ValueError(f"quantize: tensor has {wrong}, which blocks of {type.name} cannot hold")
    if type.name not in _PACK:
        return _by_gguf(numbers, type).view(shape)
    blocks = numbers.reshape(-1, type.block)
    return torch.cat([_PACK[type.name](part) for part in blocks.split(_AT_ONCE // type.block)]).view(shape)


_LARGEST = 65504.0  # of float16, which scales and least numbers of blocks are


def largest_of(numbers: Tensor) -> float:
    """Returns the largest absolute value, or NaN."""
    # abs() would be one more tensor of this size.
    return max(-numbers.amin().item(), numbers.amax().item()) if numbers.numel() else 0.0


def not_held(largest: float, type: Type) -> str | None:
    """Returns which numbers blocks of a type cannot hold, where this is the largest: some types would say 0 for the
    whole block, others infinity."""
    if not math.isfinite(largest):
        return "NaN or infinite numbers"
    bounded = type.name not in ("MXFP4", *_PLAIN)  # scales of MXFP4 are powers of 2 up to 2**127
    return f"numbers up to {largest:g}, beyond {_LARGEST:g}" if bounded and largest > _LARGEST else None


_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_AT_ONCE = 1 << 22  # numbers; a search needs some times their memory


def _by_gguf(numbers, type: Type):
    try:
        from gguf import GGMLQuantizationType, quants
    except ImportError:
        raise RuntimeError(f"{type.name} needs the package gguf: pip install 'metalcore[gguf]'") from None
    if numbers.is_meta:
        raise ValueError(f"quantize: tensor is on the device meta, and has no numbers to pack as {type.name}")
    try:
        packed = quants.quantize(numbers.cpu().contiguous().numpy(), GGMLQuantizationType(type.number))
    except NotImplementedError:
        raise ValueError(f"metalcore cannot make weights of type {type.name}") from None
    return torch.from_numpy(packed).to(numbers.device)


def _inverse(x):
    return torch.where(x == 0, 0.0, 1 / x)


def _scale_and_minimum(x, most):
    """Returns the scale and the minimum, at most 0, with which integers from 0 to `most` are nearest to x (*,
    numbers)."""
    low = x.amin(-1, keepdim=True).clamp(max=0)
    span = (x.amax(-1, keepdim=True) - low).clamp(min=0)
    count, sum_x = x.shape[-1], x.sum(-1, keepdim=True)
    # From the lowest number to the highest: the best for numbers that are all the same.
    q = ((x - low) * most * _inverse(span)).round()
    scale = span / most
    best = ((scale * q + low - x).square().sum(-1, keepdim=True), scale, low)
    for step in range(-12, 26):
        q = ((x - low) * (most + 0.1 * step) * _inverse(span)).round().clamp(0, most)
        # Least squares for these integers.
        sum_q, sum_qq, sum_qx = q.sum(-1, keepdim=True), (q * q).sum(-1, keepdim=True), (q * x).sum(-1, keepdim=True)
        determinant = _inverse(count * sum_qq - sum_q * sum_q)
        scale = (count * sum_qx - sum_q * sum_x) * determinant
        minimum = (sum_qq * sum_x - sum_q * sum_qx) * determinant
        # A minimum above 0 cannot be packed.
        scale = torch.where(minimum > 0, sum_qx * _inverse(sum_qq), scale)
        minimum = minimum.clamp(max=0)
        best = _better(best, ((scale * q + minimum - x).square().sum(-1, keepdim=True), scale, minimum))
    return best[1], best[2]


def _better(best, other):
    """Returns each block's candidate with the smaller error, which comes first."""
    chosen = other[0] < best[0]
    return tuple(torch.where(chosen, new, old) for new, old in zip(other, best))


def _scale(x, most, nearest: Callable):
    """Returns the scale with which nearest(x / scale), of which the largest is `most`, is nearest to x (*, numbers)."""
    place = x.abs().argmax(-1, keepdim=True)
    largest = x.gather(-1, place)
    best = (torch.full_like(largest, torch.inf), torch.zeros_like(largest))
    for step in range(-18, 19):
        for sign in (-1, 1):
            q = nearest(x * sign * (most + 0.1 * step) * _inverse(largest))
            scale = (q * x).sum(-1, keepdim=True) * _inverse((q * q).sum(-1, keepdim=True))
            best = _better(best, ((scale * q - x).square().sum(-1, keepdim=True), scale))
    return best[1]


def _integers(least, most):
    return lambda x: x.round().clamp(least, most)


def _table_of(values):
    """Returns the nearest entry of a table."""

    def nearest(x):
        table = torch.tensor(values, dtype=torch.float32, device=x.device)
        return table[_index_of(values)(x)]

    return nearest


def _index_of(values):
    def index(x):
        table = torch.tensor(values, dtype=torch.float32, device=x.device)
        return torch.bucketize(x, (table[1:] + table[:-1]) / 2)

    return index


def _half(x):
    """Returns (blocks, 1) float32 as bytes, and what these say."""
    half = x.to(torch.float16)
    return half.view(torch.uint8), half.float()


def _shared(scales, most, least=None):
    """Scales (blocks, groups, 1) as a float16 factor's bytes, integers, and the scales that these say. Integers are
    from 0 to `most`, or from `least`, which the largest scale gets."""
    scales = scales[..., 0]
    if least is None:
        top = scales.amax(-1, keepdim=True) / most
    else:
        top = scales.gather(-1, scales.abs().argmax(-1, keepdim=True)) / least
    bytes, factor = _half(top)
    integers = (scales * _inverse(factor)).round().clamp(0 if least is None else least, most)
    return bytes, integers.to(torch.int32), (factor * integers)[..., None]


def _bytes(*parts):
    return torch.cat([part.to(torch.uint8).flatten(1) for part in parts], 1)


def _quantized(x, scale, minimum, least, most):
    return ((x - minimum) * _inverse(scale)).round().clamp(least, most).to(torch.int32)


def _with_minima(x, group, most, most_scale):
    x = x.view(len(x), -1, group)
    scale, minimum = _scale_and_minimum(x, most)
    d, scales, scale = _shared(scale, most_scale)
    m, minima, minimum = _shared(-minimum, most_scale)
    return d, scales, m, minima, _quantized(x, scale, -minimum, 0, most)


def _q2_k(x):
    d, scales, m, minima, q = _with_minima(x, 16, 3, 15)
    return _bytes(scales | minima << 4, _crumbs(q), d, m)


def _crumbs(q):
    q = q.view(len(q), 2, 4, 32)
    return q[:, :, 0] | q[:, :, 1] << 2 | q[:, :, 2] << 4 | q[:, :, 3] << 6


def _pairs(s, m):
    """Returns eight scales and minima of 6 bits in 12 bytes."""
    low_s, high_s, low_m, high_m = s[:, :4], s[:, 4:], m[:, :4], m[:, 4:]
    return _bytes(low_s | (high_s >> 4) << 6, low_m | (high_m >> 4) << 6, (high_s & 15) | (high_m & 15) << 4)


def _nibbles(q, group):
    q = q.view(len(q), -1, 2, group)
    return q[:, :, 0] | q[:, :, 1] << 4


def _q4_k(x):
    d, scales, m, minima, q = _with_minima(x, 32, 15, 63)
    return _bytes(d, m, _pairs(scales, minima), _nibbles(q, 32))


def _q5_k(x):
    d, scales, m, minima, q = _with_minima(x, 32, 31, 63)
    fifth = sum((q[:, i] >> 4) << i for i in range(8))
    return _bytes(d, m, _pairs(scales, minima), fifth, _nibbles(q & 15, 32))


def _q3_k(x):
    x = x.view(len(x), 16, 16)
    d, scales, scale = _shared(_scale(x, -4, _integers(-4, 3)), 31, -32)
    q = _quantized(x, scale, 0.0, -4, 3) + 4
    high = (q >> 2).view(len(q), 8, 32)
    scales = scales + 32
    low = (scales & 15).view(-1, 2, 8)
    top = (scales >> 4).view(-1, 4, 4)
    packed = _bytes(low[:, 0] | low[:, 1] << 4, top[:, 0] | top[:, 1] << 2 | top[:, 2] << 4 | top[:, 3] << 6)
    return _bytes(sum(high[:, i] << i for i in range(8)), _crumbs(q & 3), packed, d)


def _q6_k(x):
    x = x.view(len(x), 16, 16)
    d, scales, scale = _shared(_scale(x, -32, _integers(-32, 31)), 127, -128)
    q = (_quantized(x, scale, 0.0, -32, 31) + 32).view(len(x), 2, 4, 32)
    low, high = q & 15, q >> 4
    return _bytes(
        torch.cat([low[:, :, 0] | low[:, :, 2] << 4, low[:, :, 1] | low[:, :, 3] << 4], -1),
        high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6,
        scales & 255,
        d,
    )


def _iq4_nl(x):
    scale = _scale(x, NONLINEAR[0], _table_of(NONLINEAR))
    d, scale = _half(scale)
    return _bytes(d, _nibbles(_index_of(NONLINEAR)(x * _inverse(scale)), 16))


def _iq4_xs(x):
    x = x.view(len(x), 8, 32)
    d, scales, scale = _shared(_scale(x, NONLINEAR[0], _table_of(NONLINEAR)), 31, -32)
    q = _index_of(NONLINEAR)(x * _inverse(scale))
    scales = scales + 32
    high = scales >> 4
    return _bytes(
        d,
        torch.stack([sum(high[:, 4 * i + k] << 2 * k for k in range(4)) for i in range(2)], 1),  # pyright: ignore[reportArgumentType]
        (scales[:, ::2] & 15) | (scales[:, 1::2] & 15) << 4,
        _nibbles(q, 16),
    )


_PACK = {
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
}
