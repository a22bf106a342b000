"""Modules that compute with metalcore's ops. Each replaces its namesake in torch.nn, and has the same arguments,
parameters and state_dict, except for those whose weights are packed."""

from __future__ import annotations

import torch

from ..activation import geglu, gelu, log_softmax, quick_gelu, relu, relu2, silu, softmax, swiglu
from ..normalization import add_layer_norm, add_rms_norm, group_norm, layer_norm, rms_norm
from ..quant._experts import QuantizedExperts
from ..quant._layers import QuantizedEmbedding, QuantizedLinear
from ._embeddings import Embedding, EmbeddingBag
from ._losses import CrossEntropyLoss, LinearCrossEntropyLoss

__all__ = [
    "GELU",
    "AddLayerNorm",
    "AddRMSNorm",
    "CrossEntropyLoss",
    "Embedding",
    "EmbeddingBag",
    "GeGLU",
    "GroupNorm",
    "LayerNorm",
    "LinearCrossEntropyLoss",
    "LogSoftmax",
    "QuantizedEmbedding",
    "QuantizedExperts",
    "QuantizedLinear",
    "QuickGELU",
    "RMSNorm",
    "ReLU",
    "ReLU2",
    "SiLU",
    "Softmax",
    "SwiGLU",
]


class SiLU(torch.nn.SiLU):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) if self.inplace else silu(input)


class GELU(torch.nn.GELU):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return gelu(input, self.approximate)


class ReLU(torch.nn.ReLU):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) if self.inplace else relu(input)


class ReLU2(torch.nn.Module):
    """The square of relu."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return relu2(input)


class QuickGELU(torch.nn.Module):
    """x * sigmoid(1.702 x)."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return quick_gelu(input)


class SwiGLU(torch.nn.Module):
    """silu(gate) * up."""

    def forward(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return swiglu(gate, up)


class GeGLU(torch.nn.Module):
    """gelu(gate) * up. `approximate` is "none" or "tanh"."""

    def __init__(self, approximate: str = "none"):
        super().__init__()
        self.approximate = approximate

    def forward(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return geglu(gate, up, self.approximate)

    def extra_repr(self) -> str:
        return f"approximate={self.approximate!r}"


class Softmax(torch.nn.Softmax):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) if self.dim is None else softmax(input, self.dim)


class LogSoftmax(torch.nn.LogSoftmax):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) if self.dim is None else log_softmax(input, self.dim)


class LayerNorm(torch.nn.LayerNorm):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


class GroupNorm(torch.nn.GroupNorm):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return group_norm(input, self.num_groups, self.weight, self.bias, self.eps)


class AddLayerNorm(torch.nn.LayerNorm):
    """A LayerNorm over the last dimension of x + residual. It returns the normalized sum and the sum."""

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]  (it shares only the parameters)
        self, x: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return add_layer_norm(x, residual, self.weight, self.bias, self.eps)


class RMSNorm(torch.nn.RMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.normalized_shape, self.weight, self.eps)


class AddRMSNorm(torch.nn.RMSNorm):
    """An RMSNorm over the last dimension of x + residual. It returns the normalized sum and the sum."""

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]  (it shares only the parameters)
        self, x: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return add_rms_norm(x, residual, self.weight, self.eps)
