"""Modules that compute with metalcore's ops. Each replaces its namesake in torch.nn, and has the same arguments,
parameters and state_dict, except for those whose weights are packed."""

from __future__ import annotations

import torch

from ..activation import gelu, log_softmax, silu, softmax
from ..normalization import add_rms_norm, rms_norm
from ._quantized import QuantizedEmbedding, QuantizedLinear

__all__ = ["GELU", "AddRMSNorm", "LogSoftmax", "QuantizedEmbedding", "QuantizedLinear", "RMSNorm", "SiLU", "Softmax"]


class SiLU(torch.nn.SiLU):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) if self.inplace else silu(input)


class GELU(torch.nn.GELU):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return gelu(input, self.approximate)


class Softmax(torch.nn.Softmax):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) if self.dim is None else softmax(input, self.dim)


class LogSoftmax(torch.nn.LogSoftmax):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) if self.dim is None else log_softmax(input, self.dim)


class RMSNorm(torch.nn.RMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.normalized_shape, self.weight, self.eps)


class AddRMSNorm(torch.nn.RMSNorm):
    """An RMSNorm over the last dimension of x + residual. It returns the normalized sum and the sum."""

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]  (it shares only the parameters)
        self, x: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return add_rms_norm(x, residual, self.weight, self.eps)
