"""Packed weights as numbers: all of them, or some rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._core.operators import cpu_kernel, fake_kernel, ops
from .._core.registry import Op, Sample, register
from .._core.routing import FLOAT_DTYPES, accelerated, require_tensors
from ._types import BY_NUMBER, KERNELS, packed_sample, type_of
from ._unpack import unpack

__all__ = ["dequantize", "quantized_embedding"]

_UINT8 = frozenset({torch.uint8})


def dequantize(
    packed: Tensor, type: Any, shape: Sequence[int] | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Returns packed weights as numbers.

    Args:
        packed: uint8, (*, bytes of a row), or with `shape` any shape with as many bytes.
        type: GGML's type, by name ("Q4_K") or number.
        shape: the result's shape, if packed does not tell it.
        dtype: of the result. In float32 it equals gguf-py's bit for bit. 16-bit results are rounded from float32.

    Returns:
        (*, weights of a row), or `shape`. It has no derivative.

    Raises:
        ValueError: the type is unknown, or the bytes are not rows of whole blocks.
        TypeError: packed is no tensor, or dtype no floating-point torch.dtype.
        RuntimeError: a type without a kernel (IQ1 to IQ3, TQ) needs the package gguf, which is not installed.

    Example:
        >>> packed = metalcore.quant.quantize(torch.ones(2, 32, device="mps"), "Q8_0")
        >>> metalcore.dequantize(packed, "Q8_0").shape
        torch.Size([2, 32])
    """
    type = type_of(type)
    fits = _takes(packed, type, dtype)
    if not fits:
        _require("dequantize", dtype, packed=packed)
    packed = _as_rows(packed, type, shape)
    lead = packed.shape[:-1]
    if not fits:
        return unpack(packed, type).to(dtype)
    numbers = ops.quant_rows(packed.reshape(math.prod(lead), packed.shape[-1]), None, type.number, dtype)
    return numbers.view(*lead, numbers.shape[-1])


def quantized_embedding(indices: Tensor, packed: Tensor, type: Any, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns rows of packed weights as numbers, as torch.nn.functional.embedding(indices, dequantize(packed, type)).

    Args:
        indices: integers of any shape. A row that does not exist is NaN on a GPU, and an error on the CPU.
        packed: uint8, (rows, bytes of a row).
        type: GGML's type, by name or number.
        dtype: of the result.

    Returns:
        (*indices.shape, weights of a row). It has no derivative.

    Raises:
        ValueError: the type is unknown, or the bytes are not rows of whole blocks.
        TypeError: indices are no tensor of integers, packed is no tensor, or dtype no floating-point torch.dtype.
        RuntimeError: packed does not have 2 dimensions.

    Example:
        >>> packed = metalcore.quant.quantize(torch.ones(4, 32, device="mps"), "Q8_0")
        >>> metalcore.quantized_embedding(torch.tensor([3, 1], device="mps"), packed, "Q8_0").shape
        torch.Size([2, 32])
    """
    type = type_of(type)
    fits = _takes(packed, type, dtype) and isinstance(indices, Tensor)
    if not fits:
        _require("quantized_embedding", dtype, indices=indices, packed=packed)
    _as_rows(packed, type, None)
    require_integers("quantized_embedding", indices=indices)
    indices = indices.long()
    if not fits:
        require_dim("quantized_embedding", 2, packed=packed)
        return unpack(rows_of(packed, indices), type).to(dtype)
    return ops.quant_rows(packed, indices, type.number, dtype)


def _takes(packed, type, dtype):
    return (
        type.name in KERNELS
        and isinstance(dtype, torch.dtype)
        and dtype in FLOAT_DTYPES
        and accelerated(packed, dtypes=_UINT8)
    )


def _require(op, dtype, **tensors):
    require_tensors(op, **tensors)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{op}: dtype must be a torch.dtype, not {type(dtype).__name__}")
    if not dtype.is_floating_point:
        raise TypeError(f"{op}: dtype must be a floating-point one, not {dtype}")


def require_integers(op, **tensors) -> None:
    """Raises a TypeError that names an argument which is no tensor of integers."""
    for name, tensor in tensors.items():
        if tensor.dtype == torch.bool or tensor.is_floating_point() or tensor.is_complex():
            raise TypeError(f"{op}: {name} must be integers, not {tensor.dtype}")


def require_dim(op, dim, **tensors) -> None:
    """Raises a RuntimeError that names an argument with another number of dimensions."""
    for name, tensor in tensors.items():
        if tensor.dim() != dim:
            raise RuntimeError(f"{op}: {name} must have {dim} dimensions, not {tensor.dim()}")


def rows_of(x: Tensor, indices: Tensor) -> Tensor:
    """Returns x[indices], where a negative index is an error on the CPU, as in torch.nn.functional.embedding."""
    return x.index_select(0, indices.flatten()).view(*indices.shape, *x.shape[1:])


def _as_rows(packed, type, shape):
    if packed.dtype != torch.uint8:
        raise ValueError(f"packed weights are uint8, not {packed.dtype}")
    if shape is None:
        if packed.dim() == 0 or packed.shape[-1] % type.nbytes:
            raise ValueError(f"{tuple(packed.shape)} bytes are not rows of {type.name}'s blocks of {type.nbytes}")
        return packed
    *lead, length = shape
    if length % type.block or packed.numel() != math.prod(lead) * (length // type.block) * type.nbytes:
        raise ValueError(f"{packed.numel()} bytes of {type.name} are not weights of shape {tuple(shape)}")
    return packed.reshape(*lead, length // type.block * type.nbytes)


@cpu_kernel("quant_rows")
def _(packed, rows, type, dtype):
    return unpack(packed if rows is None else rows_of(packed, rows), BY_NUMBER[type]).to(dtype)


@fake_kernel("quant_rows")
def _(packed, rows, type, dtype):
    lead = packed.shape[:1] if rows is None else rows.shape
    type = BY_NUMBER[type]
    return packed.new_empty([*lead, packed.shape[-1] // type.nbytes * type.block], dtype=dtype)


# The samples' tensor gives only the device and the dtype.
_TYPES = ("Q4_K", "Q6_K", "Q8_0", "MXFP4")


def _samples(arguments):
    return tuple(Sample(type, ((1,),), {"type": type}, arguments=arguments(type)) for type in _TYPES)


register(
    Op(
        "dequantize",
        dequantize,
        reference=lambda packed, type: unpack(packed, type_of(type)),
        operators=("quant_rows",),
        samples=lambda: _samples(lambda type: lambda x: (packed_sample(type, 6, 512, device=x.device),)),
        backward=False,
    )
)
register(
    Op(
        "quantized_embedding",
        quantized_embedding,
        reference=lambda indices, packed, type: unpack(packed[indices], type_of(type)),
        operators=("quant_rows",),
        samples=lambda: _samples(
            lambda type: (
                lambda x: (
                    torch.arange(8, device=x.device).view(2, 4) % 6,
                    packed_sample(type, 6, 512, device=x.device),
                )
            )
        ),
        backward=False,
    )
)
