"""Modules with packed weights in the place of others."""

from __future__ import annotations

from typing import Any

import torch

from ..quant import quantize
from ..quant._types import Type
from ._experts import QuantizedExperts
from ._quantized import QuantizedEmbedding, QuantizedLinear, TiedLinear

__all__ = ["packed_module"]


def packed_module(
    module: Any, types: tuple[Type, ...], pack: bool, shared: QuantizedEmbedding | None = None
) -> torch.nn.Module:
    """A module that computes what the given one does, with packed weights.

    Args:
        module: torch.nn.Linear, torch.nn.Embedding, transformers' Conv1D, or a module of experts with the parameters
            gate_up_proj and down_proj.
        types: of its weight, or of gate, up and down.
        pack: whether to pack the weights; or else new ones have no numbers yet.
        shared: an embedding that has packed the same weight already.
    """
    if isinstance(module, torch.nn.Embedding):
        made = _embedding(module, types[0])
        weight = module.weight
    elif hasattr(module, "gate_up_proj"):
        return _experts(module, types, pack)
    else:
        if shared is not None:
            return TiedLinear(shared, module.bias)
        weight = module.weight if isinstance(module, torch.nn.Linear) else module.weight.T  # Conv1D
        made = QuantizedLinear(weight.shape[1], weight.shape[0], types[0], bias=False, device="meta")
        made.bias = module.bias
    made.packed = quantize(weight, types[0]) if pack else torch.empty_like(made.packed, device=weight.device)
    return made


def _embedding(module, type):
    rows, length = module.weight.shape
    scale = float(getattr(module, "scalar_embed_scale", 1.0))
    return QuantizedEmbedding(rows, length, type, device="meta", dtype=module.weight.dtype, scale=scale)


def _experts(module, types, pack):
    up, down = module.gate_up_proj, module.down_proj
    experts, hidden, width = down.shape
    made = QuantizedExperts(experts, hidden, width, list(types), device="meta")
    for part, weight, type in zip(("gate", "up", "down"), (*up.chunk(2, 1), down), types):
        packed = quantize(weight, type) if pack else torch.empty_like(getattr(made, part), device=up.device)
        setattr(made, part, packed)
    return made
