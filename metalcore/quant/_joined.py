"""Layers that are given the same tensor, as one product: of queries, keys and values, and of gate and up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ._layers import QuantizedLinear
from ._linear import quantized_linear
from ._modules import role_of

__all__ = ["Joined", "join"]

_ROWS = 8  # of x, for which a weight is read as it is, and a result has the same bits in any company
_TOGETHER = {"q": "attention", "k": "attention", "v": "attention", "gate": "mlp", "up": "mlp"}


class _Product(NamedTuple):
    """Parts of a product that layers have not asked for yet."""

    x: Tensor
    version: int
    parts: dict[QuantizedLinear, Tensor]

    def is_of(self, x: Tensor) -> bool:
        return self.x is x and self.version == _version(x)


def _version(x):
    return 0 if x.is_inference() else x._version


class Joined:
    """Layers whose packed weights have one type and lie one after the other in memory, each with its own part of it.

    The layer that is called first with some tensor multiplies it with the weights of all, and the others take their
    parts of the result. Where a layer is not called with that tensor, they are multiplied one by one from then on.
    """

    def __init__(self, layers: Sequence[QuantizedLinear]):
        self.layers = list(layers)
        self.rows = [layer.out_features for layer in layers]
        self.pending: _Product | None = None
        self.together = True
        with torch.inference_mode(False):
            parts = torch.cat([layer.packed for layer in layers]).split(self.rows)
        for layer, part in zip(layers, parts):
            layer.packed, layer.joined = part, self

    def whole(self) -> Tensor | None:
        """Returns the weights of all, or None if they do not lie together any more, as after a move to another
        device."""
        first = self.layers[0].packed
        storage, at = first.untyped_storage().data_ptr(), first.storage_offset()
        for layer in self.layers:
            packed = layer.packed
            if packed.untyped_storage().data_ptr() != storage or packed.storage_offset() != at:
                return None
            at += packed.numel()
        return first.as_strided((sum(self.rows), first.shape[1]), (first.shape[1], 1))

    def product(self, layer: QuantizedLinear, x: Tensor) -> Tensor | None:
        """Returns x times the layer's weight, or None if the layer is to multiply by itself."""
        if torch.compiler.is_compiling() or (torch.is_grad_enabled() and x.requires_grad):
            return None
        pending = self.pending
        if pending is not None:
            if pending.is_of(x) and layer in pending.parts:
                part = pending.parts.pop(layer)
                if not pending.parts:
                    self.pending = None
                return part
            self.pending, self.together = None, False
        few = 0 < x.numel() <= _ROWS * layer.in_features
        whole = self.whole() if few and self.together else None
        if whole is None:
            return None
        results = quantized_linear(x, whole, layer.type).split(self.rows, -1)
        parts = dict(zip(self.layers, results))
        part = parts.pop(layer)
        self.pending = _Product(x, _version(x), parts)
        return part


def join(model: torch.nn.Module) -> None:
    """Joins the model's layers that are given the same tensor, by their names, where their weights have one type."""
    groups: dict[tuple, list[QuantizedLinear]] = {}
    for name, layer in model.named_modules():
        name = name.removesuffix(".base_layer")  # in peft's adapters
        together = _TOGETHER.get(role_of(name))
        if together and type(layer) is QuantizedLinear and type(layer.packed) is Tensor and not layer.packed.is_meta:
            key = (name.rpartition(".")[0], together, layer.type, layer.in_features, layer.packed.device)
            groups.setdefault(key, []).append(layer)
    for layers in groups.values():
        before = layers[0].joined
        is_joined = before is not None and before.layers == layers and before.whole() is not None
        # Kernels read words of 16 bytes: a part that begins elsewhere would be copied wherever it is read alone.
        aligned = all(layer.packed.nbytes % 16 == 0 for layer in layers)
        if len(layers) > 1 and aligned and not is_joined:
            Joined(layers)
