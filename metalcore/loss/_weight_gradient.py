"""The gradient of a linear layer's weight, summed over chunks of rows."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["WeightGradient", "accumulation"]

_PART_BYTES = 64 << 20
# So many chunks of bfloat16 add less than a tenth to the error of one. 16 double it, and 1024 make it ten times.
_FEW = 4


class WeightGradient:
    """The sum of y.T @ x over the chunks (x, y) that `add` gets.

    A sum of many chunks in 16 bits loses what is smaller than half a unit of the last place of the sum. In float32 each
    product is rounded once. On NVIDIA GPUs the products are float32 too; elsewhere they have 16 bits for as many
    classes at a time as take 64 MiB.
    """

    def __init__(self, weight: Tensor, dtype: torch.dtype):
        self.weight = weight
        self.sum = torch.empty_like(weight, dtype=dtype, memory_format=torch.contiguous_format)
        self.is_first = True
        self.has_wide_products = weight.is_cuda and torch.cuda.get_device_capability(weight.device)[0] >= 8

    def add(self, x: Tensor, y: Tensor) -> None:
        first, self.is_first = self.is_first, False
        if self.sum.dtype == y.dtype:
            torch.mm(y.t(), x, out=self.sum) if first else self.sum.addmm_(y.t(), x)
        elif self.has_wide_products and first:
            torch.mm(y.t(), x, out_dtype=self.sum.dtype, out=self.sum)
        elif self.has_wide_products:
            torch.addmm(self.sum, y.t(), x, out_dtype=self.sum.dtype, out=self.sum)
        else:
            part = max(1, _PART_BYTES // (x.shape[1] * x.element_size()))
            for begin in range(0, len(self.sum), part):
                classes = slice(begin, begin + part)
                product = torch.mm(y[:, classes].t(), x)
                self.sum[classes].copy_(product) if first else self.sum[classes].add_(product)

    def result(self) -> Tensor:
        return self.sum.to(self.weight.dtype)


def accumulation(weight: Tensor, rows: int, chunk: int, dtype: torch.dtype | None) -> torch.dtype:
    """Returns the dtype of the sum: `dtype`, or for None float32 if there are more chunks than _FEW, and the weight's
    dtype otherwise. One chunk has no sum."""
    chunks = -(-rows // chunk)
    if dtype is None:
        dtype = torch.float32 if chunks > _FEW else weight.dtype
    return dtype if chunks > 1 else weight.dtype
