"""Integers of 8 bits with a scale for each row, and products of them as LLM.int8 has them.

Source: Dettmers, Lewis, Belkada and Zettlemoyer, "LLM.int8(): 8-bit Matrix Multiplication for Transformers at Scale",
2022. Each step rounds as bitsandbytes' implementation in PyTorch, so that results are the same, bit for bit.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

__all__ = ["int8_linear", "int8_product", "numbers_of_int8", "rows_in_int8"]

_EXACT = 1024  # terms of products of int8 whose sum float32 holds exactly, in any order: 1024 * 128 * 128 is 2^24
_UNIT, _SQUARE = 0.007874015718698502, 6.200124e-05  # 1 / 127 and its square, as bitsandbytes has them


def int8_product(a: Tensor, b: Tensor) -> Tensor:
    """Returns a bᵀ for int8 (*, K) and (N, K), int32 (*, N), exact. PyTorch multiplies 1,024 terms at a time in
    float32, and integers on NVIDIA GPUs where its operator takes them: more than 16 rows, and sizes that 8 divides."""
    count, (columns, length) = math.prod(a.shape[:-1]), b.shape
    if a.is_cuda and count > 16 and length and length % 8 == columns % 8 == 0:
        product = torch._int_mm(a.reshape(count, length), b.T)  # pyright: ignore[reportPrivateImportUsage]
        return product.view(*a.shape[:-1], columns)
    total = torch.zeros(*a.shape[:-1], b.shape[0], dtype=torch.int32, device=a.device)
    for begin in range(0, a.shape[-1], _EXACT):
        part = slice(begin, begin + _EXACT)
        total += (a[..., part].float() @ b[:, part].float().T).to(torch.int32)
    return total


def rows_in_int8(numbers: Tensor, threshold: float = 0.0) -> tuple[Tensor, Tensor, Tensor | None]:
    """Packs each row of a matrix of float16 by its largest absolute value.

    Returns:
        packed: int8.
        scales: float32, (rows,), what 127 stands for.
        columns: those with a number of at least the threshold, which are left out; None without a threshold.
    """
    columns = None
    if threshold > 0:
        outliers = numbers.abs() >= threshold
        columns = outliers.any(0).nonzero().view(-1)
        numbers = numbers.masked_fill(outliers, 0)
    scales = numbers.abs().amax(1).float() if numbers.shape[1] else numbers.new_zeros(len(numbers), dtype=torch.float32)
    packed = torch.round(numbers * (127.0 / scales[:, None])).nan_to_num(0).to(torch.int8)
    if columns is not None and len(packed) > 1:
        packed[:, columns] = 0
    return packed, scales, columns


def numbers_of_int8(packed: Tensor, scales: Tensor) -> Tensor:
    """Returns rows of int8 as numbers, float32."""
    return packed * scales.view(-1, 1) * _UNIT


def int8_linear(x: Tensor, packed: Tensor, scales: Tensor, bias: Tensor | None, threshold: float) -> Tensor:
    """Computes x Wᵀ + bias by integers: rows of x have 8 bits, too, except for columns with numbers of at least
    `threshold` (0: none), which are multiplied as numbers. It has derivatives with respect to x and the bias."""
    result = _Product.apply(x.reshape(-1, x.shape[-1]), packed, scales, bias, threshold)
    return result.view(*x.shape[:-1], len(packed))


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(x, packed, scales, bias, threshold):
        in_int8, of_rows, columns = rows_in_int8(x.to(torch.float16), threshold)
        result = int8_product(in_int8, packed) * (of_rows[:, None] * scales[None]) * _SQUARE
        if bias is not None:
            result = result + bias
        result = result.to(x.dtype)
        if columns is not None and columns.numel():
            result = result.addmm(x[:, columns], numbers_of_int8(packed[:, columns], scales).to(x.dtype).T)
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, packed, scales, bias, _ = inputs
        ctx.save_for_backward(packed, scales)
        ctx.dtype, ctx.bias_dtype = x.dtype, None if bias is None else bias.dtype

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        packed, scales = ctx.saved_tensors
        of_x = of_bias = None
        if ctx.needs_input_grad[0]:
            of_x = grad.to(ctx.dtype) @ (packed * (scales[:, None] * (1.0 / 127.0))).to(ctx.dtype)
        if ctx.needs_input_grad[3]:
            of_bias = grad.sum(0, dtype=ctx.bias_dtype)
        return of_x, None, None, of_bias, None
