"""Modules that compute with metalcore's ops. Each replaces its namesake in torch.nn, and has the same arguments,
parameters and state_dict, except for those whose weights are packed."""

from __future__ import annotations

import torch

from ..activation import geglu, gelu, log_softmax, quick_gelu, relu, relu2, silu, softmax, swiglu
from ..normalization import add_layer_norm, add_rms_norm, group_norm, layer_norm, rms_norm
from ..quant._affine_layers import AffineEmbedding, AffineExperts, AffineLinear
from ..quant._eight_bits_layers import Linear8bitLt
from ..quant._experts import QuantizedExperts
from ..quant._four_bits_layers import Linear4bit
from ..quant._layers import QuantizedEmbedding, QuantizedLinear
from ..quant._scaled_layers import ScaledEmbedding, ScaledExperts, ScaledLinear
from ._embeddings import Embedding, EmbeddingBag
from ._losses import CrossEntropyLoss, LinearCrossEntropyLoss

__all__ = [
    "GELU",
    "AddLayerNorm",
    "AddRMSNorm",
    "AffineEmbedding",
    "AffineExperts",
    "AffineLinear",
    "CrossEntropyLoss",
    "Embedding",
    "EmbeddingBag",
    "GeGLU",
    "GroupNorm",
    "LayerNorm",
    "Linear4bit",
    "Linear8bitLt",
    "LinearCrossEntropyLoss",
    "LogSoftmax",
    "QuantizedEmbedding",
    "QuantizedExperts",
    "QuantizedLinear",
    "QuickGELU",
    "RMSNorm",
    "ReLU",
    "ReLU2",
    "ScaledEmbedding",
    "ScaledExperts",
    "ScaledLinear",
    "SiLU",
    "Softmax",
    "SwiGLU",
]


class SiLU(torch.nn.SiLU):
    """torch.nn.SiLU on `metalcore.silu`. In place it is PyTorch's.

    Example:
        >>> metalcore.nn.SiLU()(torch.zeros(3, device="mps")).tolist()
        [0.0, 0.0, 0.0]
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) if self.inplace else silu(input)


class GELU(torch.nn.GELU):
    """torch.nn.GELU on `metalcore.gelu`.

    Example:
        >>> metalcore.nn.GELU()(torch.zeros(3, device="mps")).tolist()
        [0.0, 0.0, 0.0]
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return gelu(input, self.approximate)


class ReLU(torch.nn.ReLU):
    """torch.nn.ReLU on `metalcore.relu`. In place it is PyTorch's.

    Example:
        >>> metalcore.nn.ReLU()(torch.tensor([-1.0, 2.0], device="mps")).tolist()
        [0.0, 2.0]
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) if self.inplace else relu(input)


class ReLU2(torch.nn.Module):
    """A module that computes the square of relu, by `metalcore.relu2`.

    Example:
        >>> metalcore.nn.ReLU2()(torch.tensor([-1.0, 2.0], device="mps")).tolist()
        [0.0, 4.0]
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return relu2(input)


class QuickGELU(torch.nn.Module):
    """A module that computes x * sigmoid(1.702 x), by `metalcore.quick_gelu`.

    Example:
        >>> metalcore.nn.QuickGELU()(torch.zeros(3, device="mps")).tolist()
        [0.0, 0.0, 0.0]
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return quick_gelu(input)


class SwiGLU(torch.nn.Module):
    """A module that computes silu(gate) * up, by `metalcore.swiglu`.

    Example:
        >>> gate, up = torch.randn(2, 2, 4, device="mps")
        >>> metalcore.nn.SwiGLU()(gate, up).shape
        torch.Size([2, 4])
    """

    def forward(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return swiglu(gate, up)


class GeGLU(torch.nn.Module):
    """A module that computes gelu(gate) * up, by `metalcore.geglu`. `approximate` is "none" or "tanh".

    Example:
        >>> gate, up = torch.randn(2, 2, 4, device="mps")
        >>> metalcore.nn.GeGLU(approximate="tanh")(gate, up).shape
        torch.Size([2, 4])
    """

    def __init__(self, approximate: str = "none"):
        super().__init__()
        self.approximate = approximate

    def forward(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return geglu(gate, up, self.approximate)

    def extra_repr(self) -> str:
        return f"approximate={self.approximate!r}"


class Softmax(torch.nn.Softmax):
    """torch.nn.Softmax on `metalcore.softmax`.

    Example:
        >>> metalcore.nn.Softmax(dim=-1)(torch.zeros(4, device="mps")).tolist()
        [0.25, 0.25, 0.25, 0.25]
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) if self.dim is None else softmax(input, self.dim)


class LogSoftmax(torch.nn.LogSoftmax):
    """torch.nn.LogSoftmax on `metalcore.log_softmax`.

    Example:
        >>> metalcore.nn.LogSoftmax(dim=-1)(torch.randn(3, 5, device="mps")).shape
        torch.Size([3, 5])
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) if self.dim is None else log_softmax(input, self.dim)


class LayerNorm(torch.nn.LayerNorm):
    """torch.nn.LayerNorm on `metalcore.layer_norm`.

    Example:
        >>> norm = metalcore.nn.LayerNorm(2, eps=0.0, device="mps")
        >>> norm(torch.tensor([[1.0, -1.0], [3.0, 5.0]], device="mps")).tolist()
        [[1.0, -1.0], [-1.0, 1.0]]
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


class GroupNorm(torch.nn.GroupNorm):
    """torch.nn.GroupNorm on `metalcore.group_norm`.

    Example:
        >>> norm = metalcore.nn.GroupNorm(num_groups=3, num_channels=6, device="mps")
        >>> norm(torch.randn(2, 6, 4, 4, device="mps")).shape
        torch.Size([2, 6, 4, 4])
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return group_norm(input, self.num_groups, self.weight, self.bias, self.eps)


class AddLayerNorm(torch.nn.LayerNorm):
    """A LayerNorm over the last dimension of x + residual. It returns the normalized sum and the sum.

    Example:
        >>> norm, x = metalcore.nn.AddLayerNorm(8, device="mps"), torch.randn(2, 8, device="mps")
        >>> normalized, total = norm(x, x)
        >>> torch.equal(total, x + x)
        True
    """

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]  (it shares only the parameters)
        self, x: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return add_layer_norm(x, residual, self.weight, self.bias, self.eps)


class RMSNorm(torch.nn.RMSNorm):
    """torch.nn.RMSNorm on `metalcore.rms_norm`.

    Example:
        >>> norm = metalcore.nn.RMSNorm(8, device="mps")
        >>> norm(torch.randn(2, 8, device="mps")).shape
        torch.Size([2, 8])
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.normalized_shape, self.weight, self.eps)


class AddRMSNorm(torch.nn.RMSNorm):
    """An RMSNorm over the last dimension of x + residual. It returns the normalized sum and the sum.

    Example:
        >>> norm, x = metalcore.nn.AddRMSNorm(8, device="mps"), torch.randn(2, 8, device="mps")
        >>> normalized, total = norm(x, x)
        >>> torch.equal(total, x + x)
        True
    """

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]  (it shares only the parameters)
        self, x: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return add_rms_norm(x, residual, self.weight, self.eps)
