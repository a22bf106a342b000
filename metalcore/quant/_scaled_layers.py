"""Modules whose weights are floating-point numbers of 8 or 4 bits with scales."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..activation import swiglu
from ._affine_layers import ExactExperts, PackedBuffers
from ._scaled import dequantize_scaled, scaled_embedding, scaled_linear
from ._scaled_experts import scaled_linear_experts
from ._scaled_weight import ScaledWeight, require_scaled

__all__ = ["ScaledEmbedding", "ScaledExperts", "ScaledLinear", "TiedScaledLinear"]


class _Scaled(PackedBuffers):
    """The buffers `packed`, `scales` and `factor` of a ScaledWeight."""

    factor: Tensor | None
    format: str
    block: tuple[int, ...]
    _exact = ("scales", "factor")

    def _hold(self, weight: ScaledWeight, dtype: torch.dtype | None) -> tuple[int, int]:
        torch.nn.Module.__init__(self)
        packed, scales, self.format, self.block, factor = weight
        length = require_scaled(packed, scales, factor, self.format, self.block)
        self.dtype = dtype or torch.get_default_dtype()
        for name, tensor in (("packed", packed), ("scales", scales), ("factor", factor)):
            self.register_buffer(name, tensor)
        return packed.shape[0], length

    @property
    def scaled_weight(self) -> ScaledWeight:
        """The weight as functions take it."""
        return ScaledWeight(self.packed, self.scales, self.format, self.block, self.factor)

    @property
    def weight(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The weight as numbers, a new tensor each time."""
        return dequantize_scaled(self.scaled_weight, self.dtype)


class ScaledLinear(_Scaled, torch.nn.Linear):  # pyright: ignore[reportIncompatibleVariableOverride]
    """As torch.nn.Linear, with a weight of 8 or 4 bits with scales: fp8, MXFP8, MXFP4 or NVFP4. It is not trained.
    Other code takes it for a torch.nn.Linear, whose `weight` is unpacked where it is read.

    Args:
        weight: a `metalcore.quant.ScaledWeight`, whose tensors become buffers.
        bias: a parameter, or None.
        dtype: of `weight` and of the model, by default PyTorch's default. The result has x's.

    Raises:
        RuntimeError: shapes or dtypes do not go together, or there is no such format.

    Example:
        >>> layer = metalcore.nn.ScaledLinear(metalcore.quantize_scaled(torch.ones(4, 32), "mxfp4")).to("mps")
        >>> layer(torch.ones(1, 32, device="mps")).tolist()
        [[32.0, 32.0, 32.0, 32.0]]
    """

    bias: torch.nn.Parameter | None  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, weight: ScaledWeight, bias: torch.nn.Parameter | None = None, dtype: torch.dtype | None = None):
        self.out_features, self.in_features = self._hold(weight, dtype)
        self.bias = bias

    def forward(self, input: Tensor) -> Tensor:
        return scaled_linear(input, self.scaled_weight, self.bias)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, format={self.format}, "
            f"bias={self.bias is not None}"
        )


class TiedScaledLinear(ScaledLinear):
    """A linear layer with an embedding's packed weight, wherever that moves. It has no weight in the state_dict."""

    def __init__(self, embedding: ScaledEmbedding, bias: torch.nn.Parameter | None = None):
        torch.nn.Module.__init__(self)
        self.in_features, self.out_features = embedding.embedding_dim, embedding.num_embeddings
        self.bias = bias
        self._embedding = (embedding,)  # not a child of this module

    def __getattr__(self, name: str) -> Any:
        if name in ("packed", "scales", "factor", "format", "block", "dtype"):
            return getattr(self._embedding[0], name)
        return super().__getattr__(name)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        return torch.nn.Module._apply(self, fn, recurse)


class ScaledEmbedding(_Scaled, torch.nn.Embedding):  # pyright: ignore[reportIncompatibleVariableOverride]
    """As torch.nn.Embedding, with a weight of 8 or 4 bits with scales, which is not trained.

    Args:
        weight: a `metalcore.quant.ScaledWeight`, whose tensors become buffers.
        dtype: of the result, by default PyTorch's default. Conversions of the module, as half(), change it.
        scale: what the rows are multiplied by, rounded to dtype, as Gemma's embeddings are.

    Raises:
        RuntimeError: shapes or dtypes do not go together, or there is no such format.

    Example:
        >>> table = metalcore.nn.ScaledEmbedding(metalcore.quantize_scaled(torch.ones(4, 32), "mxfp8")).to("mps")
        >>> table(torch.tensor([3, 1], device="mps"))[:, 0].tolist()
        [1.0, 1.0]
    """

    def __init__(self, weight: ScaledWeight, dtype: torch.dtype | None = None, scale: float = 1.0):
        self.num_embeddings, self.embedding_dim = self._hold(weight, dtype)
        self.scale = scale
        self.padding_idx, self.max_norm, self.norm_type = None, None, 2.0  # as torch.nn.Embedding has them
        self.scale_grad_by_freq, self.sparse = False, False

    def forward(self, input: Tensor) -> Tensor:
        rows = scaled_embedding(input, self.scaled_weight, self.dtype)
        return rows if self.scale == 1 else rows * torch.tensor(self.scale, dtype=self.dtype, device="cpu").item()

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, format={self.format}"


class ScaledExperts(ExactExperts):
    """The experts of a transformer's layer, as `metalcore.nn.QuantizedExperts`, with weights of fp8, MXFP8, MXFP4 or
    NVFP4 that are not trained.

    Args:
        gate, up, down: each a `metalcore.quant.ScaledWeight` whose tensors have 3 dimensions, of which the first is
            the expert. Their tensors become buffers.
        activation: of gate and up, (tokens, experts of a token, intermediate_size).

    Raises:
        RuntimeError: shapes or dtypes do not go together, or there is no such format.

    Example:
        >>> one = metalcore.quantize_scaled(torch.eye(32), "mxfp4")
        >>> weight = one._replace(packed=one.packed[None], scales=one.scales[None])
        >>> experts = metalcore.nn.ScaledExperts(weight, weight, weight).to("mps")
        >>> chosen, weights = torch.zeros(2, 1, dtype=torch.int64, device="mps"), torch.ones(2, 1, device="mps")
        >>> experts(torch.zeros(2, 32, device="mps"), chosen, weights).shape
        torch.Size([2, 32])
    """

    def __init__(
        self,
        gate: ScaledWeight,
        up: ScaledWeight,
        down: ScaledWeight,
        activation: Callable[[Tensor, Tensor], Tensor] = swiglu,
    ):
        torch.nn.Module.__init__(self)
        self.activation = activation
        self.formats, lengths = [], []
        for part, weight in zip(self.parts, (gate, up, down)):
            block = weight.block
            lengths.append(require_scaled(weight.packed, weight.scales, weight.factor, weight.format, block, 3))
            self.formats.append((weight.format, weight.block))
            self.register_buffer(part, weight.packed)
            self.register_buffer(f"{part}_scales", weight.scales)
            self.register_buffer(f"{part}_factor", weight.factor)
        self.num_experts, self.hidden_size = down.packed.shape[:2]
        self.intermediate_size, shape = lengths[2], (self.num_experts, lengths[2])
        if lengths[:2] != [self.hidden_size] * 2 or gate.packed.shape[:2] != shape or up.packed.shape[:2] != shape:
            raise RuntimeError("ScaledExperts: gate, up and down do not go together")

    def _part(self, part, x, experts):
        format, block = self.formats[self.parts.index(part)]
        packed, scales, factor = (getattr(self, part + leaf) for leaf in ("", "_scales", "_factor"))
        return scaled_linear_experts(x, ScaledWeight(packed, scales, format, block, factor), experts)

    def extra_repr(self) -> str:
        names = ", ".join(dict.fromkeys(format for format, _ in self.formats))
        return f"{self.num_experts}, {self.hidden_size}, {self.intermediate_size}, formats={names}"
