"""Modules whose weights have 2 to 8 bits, in groups with scales and offsets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..activation import swiglu
from ._affine import affine_embedding, affine_linear, dequantize_affine, require_affine
from ._affine_experts import affine_linear_experts
from ._experts import QuantizedExperts

__all__ = ["AffineEmbedding", "AffineExperts", "AffineLinear", "ExactExperts", "PackedBuffers", "TiedAffineLinear"]


class PackedBuffers(torch.nn.Module):
    """A weight in buffers, of which some keep their digits whatever dtype the module is converted to."""

    packed: Tensor
    scales: Tensor
    dtype: torch.dtype  # of the weight's numbers
    _exact: tuple[str, ...]

    def reset_parameters(self) -> None:
        raise RuntimeError(f"the weight of {type(self).__name__} is packed, and has no initial numbers")

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        # model.half() converts weights that are numbers: these come out of scales that keep their digits.
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device=self.packed.device)).dtype
        exact = {name: self._buffers[name] for name in self._exact}
        super()._apply(fn, recurse)
        return _keep_dtypes(self, exact)


def _keep_dtypes(module: Any, exact: Mapping[str, Tensor | None]) -> Any:
    """Puts buffers that were converted back, on the device where they are now."""
    for name, before in exact.items():
        after = module._buffers[name]
        if before is not None and after is not None and after.dtype != before.dtype:
            module._buffers[name] = before.to(after.device)
    return module


class _Affine(PackedBuffers):
    """The buffers `packed`, `scales` and `offsets`, as `metalcore.dequantize_affine` takes them."""

    offsets: Tensor
    order: Tensor | None
    bits: int
    _exact = ("scales", "offsets")

    def _hold(self, packed, scales, offsets, bits, dtype):
        torch.nn.Module.__init__(self)
        length = require_affine(packed, scales, offsets, bits)
        self.bits, self.dtype = bits, dtype or scales.dtype
        for name, tensor in (("packed", packed), ("scales", scales), ("offsets", offsets)):
            self.register_buffer(name, tensor)
        return packed.shape[0], length

    @property
    def weight(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The weight as numbers, a new tensor each time."""
        numbers = dequantize_affine(self.packed, self.scales, self.offsets, self.bits, self.dtype)
        order = getattr(self, "order", None)
        return numbers if order is None else numbers.index_select(1, order.argsort())


class AffineLinear(_Affine, torch.nn.Linear):  # pyright: ignore[reportIncompatibleVariableOverride]
    """As torch.nn.Linear, with a weight of 2 to 8 bits in groups, as GPTQ's, AWQ's and MLX's files have it. It is not
    trained. Other code takes it for a torch.nn.Linear, whose `weight` is unpacked where it is read.

    Args:
        packed, scales, offsets, bits: as `metalcore.dequantize_affine` has them. They become buffers.
        bias: a parameter, or None.
        order: which column of x each weight of a row is for, int64, or None where they are in x's order. GPTQ's files
            have one where columns were packed by their size ("act-order").
        dtype: of `weight` and of the model, by default the scales'. The result has x's.

    Raises:
        RuntimeError: shapes or dtypes do not go together, or there are no such bits.

    Example:
        >>> packed, zeros = torch.full((4, 16), 0x33, dtype=torch.uint8), torch.ones(4, 1, dtype=torch.uint8)
        >>> layer = metalcore.nn.AffineLinear(packed, torch.ones(4, 1), zeros, 4).to("mps")
        >>> layer(torch.ones(1, 32, device="mps")).tolist()
        [[64.0, 64.0, 64.0, 64.0]]
    """

    bias: torch.nn.Parameter | None  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(
        self,
        packed: Tensor,
        scales: Tensor,
        offsets: Tensor,
        bits: int,
        bias: torch.nn.Parameter | None = None,
        order: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ):
        self.out_features, self.in_features = self._hold(packed, scales, offsets, bits, dtype)
        self.bias = bias
        self.register_buffer("order", order)

    def forward(self, input: Tensor) -> Tensor:
        x = input if self.order is None else input.index_select(-1, self.order)
        return affine_linear(x, self.packed, self.scales, self.offsets, self.bits, self.bias)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bits={self.bits}, "
            f"group_size={self.in_features // max(self.scales.shape[1], 1)}, bias={self.bias is not None}"
        )


class TiedAffineLinear(AffineLinear):
    """A linear layer with an embedding's packed weight, wherever that moves. It has no weight in the state_dict."""

    def __init__(self, embedding: AffineEmbedding, bias: torch.nn.Parameter | None = None):
        torch.nn.Module.__init__(self)
        self.in_features, self.out_features = embedding.embedding_dim, embedding.num_embeddings
        self.bias, self.order = bias, None
        self._embedding = (embedding,)  # not a child of this module

    def __getattr__(self, name: str) -> Any:
        if name in ("packed", "scales", "offsets", "bits", "dtype"):
            return getattr(self._embedding[0], name)
        return super().__getattr__(name)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        return torch.nn.Module._apply(self, fn, recurse)


class AffineEmbedding(_Affine, torch.nn.Embedding):  # pyright: ignore[reportIncompatibleVariableOverride]
    """As torch.nn.Embedding, with a weight of 2 to 8 bits in groups, which is not trained.

    Args:
        packed, scales, offsets, bits: as `metalcore.dequantize_affine` has them. They become buffers.
        dtype: of the result, by default the scales'. Conversions of the module, as half(), change it.
        scale: what the rows are multiplied by, rounded to dtype, as Gemma's embeddings are.

    Raises:
        RuntimeError: shapes or dtypes do not go together, or there are no such bits.

    Example:
        >>> packed, zeros = torch.full((4, 16), 0x33, dtype=torch.uint8), torch.ones(4, 1, dtype=torch.uint8)
        >>> table = metalcore.nn.AffineEmbedding(packed, torch.ones(4, 1), zeros, 4).to("mps")
        >>> table(torch.tensor([3, 1], device="mps"))[:, 0].tolist()
        [2.0, 2.0]
    """

    def __init__(
        self,
        packed: Tensor,
        scales: Tensor,
        offsets: Tensor,
        bits: int,
        dtype: torch.dtype | None = None,
        scale: float = 1.0,
    ):
        self.num_embeddings, self.embedding_dim = self._hold(packed, scales, offsets, bits, dtype)
        self.scale = scale
        self.padding_idx, self.max_norm, self.norm_type = None, None, 2.0  # as torch.nn.Embedding has them
        self.scale_grad_by_freq, self.sparse = False, False

    def forward(self, input: Tensor) -> Tensor:
        rows = affine_embedding(input, self.packed, self.scales, self.offsets, self.bits, self.dtype)
        return rows if self.scale == 1 else rows * torch.tensor(self.scale, dtype=self.dtype, device="cpu").item()

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, bits={self.bits}" + (
            f", scale={self.scale}" if self.scale != 1 else ""
        )


class ExactExperts(QuantizedExperts):
    """Experts whose buffers keep their dtypes, and whose state holds them alone."""

    get_extra_state = torch.nn.Module.get_extra_state
    set_extra_state = torch.nn.Module.set_extra_state

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        return _keep_dtypes(self, before)


class AffineExperts(ExactExperts):
    """The experts of a transformer's layer, as `metalcore.nn.QuantizedExperts`, with weights of 2 to 8 bits in groups
    that are not trained, as MLX's files have them.

    Args:
        gate, up, down: each the packed weights, scales, offsets and bits of `metalcore.dequantize_affine`, with the
            expert as a dimension before. The tensors become buffers.
        biases: of gate, up and down, parameters (experts, rows), or None.
        activation: of gate and up, (tokens, experts of a token, intermediate_size).

    Raises:
        RuntimeError: shapes or dtypes do not go together, or there are no such bits.

    Example:
        >>> packed, scales = torch.full((2, 32, 16), 0x11, dtype=torch.uint8), torch.ones(2, 32, 1)
        >>> weight = packed, scales, torch.zeros_like(scales), 4
        >>> experts = metalcore.nn.AffineExperts(weight, weight, weight).to("mps")
        >>> chosen, weights = torch.zeros(2, 1, dtype=torch.int64, device="mps"), torch.ones(2, 1, device="mps")
        >>> experts(torch.zeros(2, 32, device="mps"), chosen, weights).shape
        torch.Size([2, 32])
    """

    def __init__(
        self,
        gate: tuple[Tensor, Tensor, Tensor, int],
        up: tuple[Tensor, Tensor, Tensor, int],
        down: tuple[Tensor, Tensor, Tensor, int],
        biases: tuple[torch.nn.Parameter, torch.nn.Parameter, torch.nn.Parameter] | None = None,
        activation: Callable[[Tensor, Tensor], Tensor] = swiglu,
    ):
        torch.nn.Module.__init__(self)
        self.activation = activation
        self.bits = gate[3], up[3], down[3]
        lengths = []
        for number, (part, weight) in enumerate(zip(self.parts, (gate, up, down))):
            lengths.append(require_affine(*weight, 3))
            for leaf, tensor in zip(("", "_scales", "_offsets"), weight[:3]):
                self.register_buffer(part + leaf, tensor)
            self.register_parameter(f"{part}_bias", None if biases is None else biases[number])
        self.num_experts, self.hidden_size = down[0].shape[:2]
        self.intermediate_size = lengths[2]
        shape = (self.num_experts, self.intermediate_size)
        if lengths[:2] != [self.hidden_size] * 2 or gate[0].shape[:2] != shape or up[0].shape[:2] != shape:
            raise RuntimeError("AffineExperts: gate, up and down do not go together")

    def _part(self, part, x, experts):
        packed, scales, offsets = (getattr(self, part + leaf) for leaf in ("", "_scales", "_offsets"))
        result = affine_linear_experts(x, packed, scales, offsets, self.bits[self.parts.index(part)], experts)
        bias = getattr(self, f"{part}_bias")
        return result if bias is None else result + bias[experts]

    def extra_repr(self) -> str:
        bits = ", ".join(map(str, dict.fromkeys(self.bits)))
        return f"{self.num_experts}, {self.hidden_size}, {self.intermediate_size}, bits={bits}"
