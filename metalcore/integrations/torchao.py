"""torchao on metalcore's kernels: linear layers whose weights `quantize_` has made weight-only tensors of 4 or 8 bits.

Where metalcore and torchao are both imported, whichever comes first, linear() of these tensors runs
`metalcore.affine_linear` on their own bytes, once they are on `mps`: Int8Tensor (Int8WeightOnlyConfig),
IntxUnpackedToInt8Tensor (IntxWeightOnlyConfig) and Int4Tensor (Int4WeightOnlyConfig); and `metalcore.scaled_linear`
those of Float8Tensor (Float8WeightOnlyConfig). Int4TilePackedTo4dTensor (Int4WeightOnlyConfig with
int4_packing_format="tile_packed_to_4d") has its integers in the order of CUDA's tensor cores: the first product makes
a copy of them in rows, which stays beside them. torchao's own function takes all others: with quantized activations, in
other layouts of one kind of device, and rows or groups that are no multiples of 32.

torchao.float8 (convert_to_float8_training) computes scales in float64, which `mps` does not have. There they are
computed in float32, and are the same numbers.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch

from .._core.environment import after_import
from .._core.routing import accelerated
from ..quant._affine import affine_linear
from ..quant._repack import AffineWeight, from_tile_packed
from ..quant._scaled import scaled_linear
from ..quant._scaled_weight import ScaledWeight

__all__ = ["register"]


def register() -> None:
    """Lets metalcore's kernels multiply with torchao's weight-only tensors, from now on.

    Raises:
        ModuleNotFoundError: torchao is not installed.
    """
    quantization = importlib.import_module("torchao.quantization")
    for name, weights_of in _WEIGHTS.items():
        kind = getattr(quantization, name, None)
        if kind is None or name in _registered:
            continue
        theirs = kind._TORCH_FN_TABLE[kind][torch.nn.functional.linear]
        ours = _linear(weights_of, theirs)
        kind.implements_torch_function(torch.nn.functional.linear)(ours)
        kind.implements(torch.ops.aten.linear.default)(ours)
        _registered.add(name)
    after_import("torchao.float8.float8_utils", _scale_in_float32)


_registered: set[str] = set()


def _linear(weights_of: Callable[[Any], AffineWeight | ScaledWeight | None], theirs: Callable[..., Any]):
    def linear(function, types, args, kwargs):
        given = dict(zip(("input", "weight", "bias"), args)) | (kwargs or {})
        x, weight, bias = given["input"], given["weight"], given.get("bias")
        weights = _kept(weight, weights_of) if accelerated(x) and weight.device == x.device else None
        if weights is None:
            return theirs(function, types, args, kwargs)
        if isinstance(weights, ScaledWeight):
            return scaled_linear(x, weights, bias)
        scale, (packed, scales, offsets, bits, _) = getattr(weight, "act_pre_scale", None), weights
        return affine_linear(x if scale is None else x * scale, packed, scales, offsets, bits, bias)

    return linear


def _kept(weight, weights_of):
    """Returns what affine_linear or scaled_linear takes of a weight, or None. It is made again once torchao's tensors
    are replaced or written."""
    tensors = [getattr(weight, name, None) for name in ("qdata", "scale", "zero_point", "scale_and_zero")]
    state = [tensor is not None and (id(tensor), tensor._version) for tensor in tensors]
    kept = getattr(weight, "_metalcore", None)
    if kept is None or kept[0] != state:
        # The tensors are kept, so that no other one gets their id.
        kept = weight._metalcore = state, tensors, weights_of(weight) if weight.dim() == 2 else None
    return kept[2]


def _group(weight):
    """Returns the largest power of 2 that divides a group's length, and how many of it a group has; or None, None."""
    length = weight.block_size[-1]
    size = length & -length
    return (size, length // size) if size >= 32 else (None, None)


def _int8(weight) -> AffineWeight | None:
    """Returns a scale and a zero point for each row or group, or for the whole weight."""
    size, each = _group(weight)
    if size is None or weight.qdata.dtype != torch.int8 or _activations(weight):
        return None

    def spread(tensor):
        return tensor.repeat_interleave(each, 1).expand(weight.shape[0], -1).contiguous()

    scales, zeros = spread(weight.scale), weight.zero_point
    if zeros is None:
        return AffineWeight(weight.qdata, scales, torch.zeros_like(scales, dtype=torch.int8), 8)
    zeros = spread(zeros)
    if zeros.dtype == torch.int8:
        return AffineWeight(weight.qdata, scales, zeros, 8)
    return AffineWeight(weight.qdata, scales.float(), -scales.float() * zeros.float(), 8)


def _activations(weight):
    return any(getattr(weight, name, None) is not None for name in ("act_quant_kwargs", "activation_quantization"))


def _int4(weight) -> AffineWeight | None:
    """Returns columns of scales and of what 0 stands for, a row of them for each group."""
    size, each = _group(weight)
    if size is None or weight.activation_dtype != torch.bfloat16:
        return None
    scales, offsets = (tensor.T.repeat_interleave(each, 1).contiguous() for tensor in (weight.scale, weight.zero_point))
    return AffineWeight(weight.qdata, scales, offsets, 4)


def _tile_packed(weight) -> AffineWeight | None:
    rows, length = weight.shape
    if length % 32 or weight.block_size[-1] % 32:
        return None
    return from_tile_packed(weight.qdata, weight.scale_and_zero, rows, length, weight.block_size[-1])


def _float8(weight) -> ScaledWeight | None:
    """Returns a scale for each row, for each block of some rows and columns, or for the whole weight."""
    format = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}.get(weight.qdata.dtype)
    sides = tuple(
        0 if parts == 1 and side >= size else side
        for side, size, parts in zip(weight.block_size, weight.shape, weight.scale.shape)
    )
    whole = weight.shape[1] % 32 == 0 and all(side & (side - 1) == 0 for side in sides) and sides[1] % 32 == 0
    if format is None or not whole or weight.scale.dtype != torch.float32 or _activations(weight):
        return None
    return ScaledWeight(weight.qdata.view(torch.uint8), weight.scale, format, sides)


def _scale_in_float32():
    """Lets torchao's float8 training run on `mps`. A quotient of two float32 numbers that is computed in float64 and
    then rounded to float32 equals the quotient in float32."""
    module: Any = importlib.import_module("torchao.float8.float8_utils")
    theirs = getattr(module, "amax_to_scale", None)
    if theirs is None or hasattr(theirs, "_metalcore"):
        return

    @functools.wraps(theirs)
    def amax_to_scale(amax, float8_dtype, round_scales_to_power_of_2=False):
        if amax.device.type != "mps" or float8_dtype not in module.FP8_TYPES:
            return theirs(amax, float8_dtype, round_scales_to_power_of_2)
        with torch.no_grad():
            largest = torch.finfo(float8_dtype).max
            amax = amax.float()
            scale = (torch.full_like(amax, largest) / amax).clamp(max=largest / module.EPS)
            return module._round_scale_down_to_power_of_2(scale) if round_scales_to_power_of_2 else scale

    vars(amax_to_scale)["_metalcore"] = True
    module.amax_to_scale = amax_to_scale


_WEIGHTS: dict[str, Callable[[Any], AffineWeight | ScaledWeight | None]] = {
    "Int8Tensor": _int8,
    "IntxUnpackedToInt8Tensor": _int8,
    "Int4Tensor": _int4,
    "Int4TilePackedTo4dTensor": _tile_packed,
    "Float8Tensor": _float8,
}
