"""Modules with packed weights in the place of others."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._experts import QuantizedExperts, clamped_swiglu
from ._layers import QuantizedEmbedding, QuantizedLinear, TiedLinear
from ._pack import quantize
from ._roles import is_columns
from ._types import Type

__all__ = ["packed_module", "packed_weight"]


def packed_weight(module: Any, leaf: str, numbers: Tensor, types: tuple[Type, ...]) -> Tensor:
    """Returns the numbers of a module's parameter, packed, in rows. Experts' gate and up, which are one parameter, have
    one type."""
    type = types[-1] if leaf == "down_proj" else types[0]
    return quantize(numbers.T if is_columns(module) else numbers, type)


def packed_module(
    module: Any,
    types: tuple[Type, ...],
    pack: bool,
    shared: QuantizedEmbedding | None = None,
    dtype: torch.dtype | None = None,
) -> torch.nn.Module:
    """Returns a module that computes what the given one does, with packed weights.

    Args:
        module: torch.nn.Linear, torch.nn.Embedding, transformers' Conv1D, or a module of experts with the parameters
            gate_up_proj and down_proj. Its weights are numbers, or uint8 as `packed_weight` makes them.
        types: of its weight, or of gate, up and down.
        pack: whether to pack the weights; or else new ones have no numbers yet.
        shared: an embedding that has packed the same weight already.
        dtype: of the numbers, and of an embedding's result, by default that of the module's weight.
    """
    if hasattr(module, "gate_up_proj"):
        return _experts(module, types, pack)
    if shared is not None:
        return TiedLinear(shared, module.bias)
    weight = module.weight.T if is_columns(module) and _is_numbers(module.weight) else module.weight
    rows, length = weight.shape
    if not _is_numbers(weight):
        length = length // types[0].nbytes * types[0].block
    dtype = dtype or weight.dtype
    if isinstance(module, torch.nn.Embedding):
        scale = float(getattr(module, "scalar_embed_scale", 1.0))
        layer = QuantizedEmbedding(rows, length, types[0], device="meta", dtype=dtype, scale=scale)
    else:
        layer = QuantizedLinear(length, rows, types[0], bias=False, device="meta", dtype=dtype)
        layer.bias = module.bias
    layer.packed = _packed(weight, types[0]) if pack else torch.empty_like(layer.packed, device=weight.device)
    return layer


def _is_numbers(weight):
    return weight.is_floating_point()


def _packed(weight, type):
    return quantize(weight, type) if _is_numbers(weight) else weight.detach().contiguous()


def _experts(module, types, pack):
    """gpt-oss' have biases, and columns in turns; they are not packed here."""
    up, down = module.gate_up_proj, module.down_proj
    clamped = hasattr(module, "gate_up_proj_bias")
    experts, hidden, width = down.shape if not clamped else (down.shape[0], down.shape[2], down.shape[1])
    if not _is_numbers(down):
        width = width // types[2].nbytes * types[2].block
    options: dict[str, Any] = {"activation": clamped_swiglu, "bias": True, "dtype": down.dtype} if clamped else {}
    replacement = QuantizedExperts(experts, hidden, width, list(types), device="meta" if pack else up.device, **options)
    if pack:
        for part, weight, type in zip(("gate", "up", "down"), (*up.chunk(2, 1), down), types):
            setattr(replacement, part, _packed(weight, type))
    return replacement
