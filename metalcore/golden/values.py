"""Numbers that are the same on every machine, for every version of PyTorch.

Philox4x32-10 of Salmon, Moraes, Dror and Shaw ("Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011) makes integers
from a key and a counter. Sums of four 16-bit integers, centred, are normal enough, and float32 holds them exactly.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .._core.registry import Sample, Shape

__all__ = ["digest", "inputs", "memory", "normal", "philox"]

_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10
_LOW = 0xFFFFFFFF


def _product(a: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """Returns the high and the low 32 bits of a product of 32-bit numbers, which int64 alone cannot hold."""
    low = (a & 0xFFFF) * multiplier
    high = (a >> 16) * multiplier + (low >> 16)
    return high >> 16, (high & 0xFFFF) << 16 | low & 0xFFFF


def philox(key: tuple[int, int], counters: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns four 32-bit numbers, as int64, for each counter below 2^63."""
    a, b = counters & _LOW, counters >> 32
    c, d = torch.zeros_like(a), torch.zeros_like(a)
    first, second = key
    for _ in range(_ROUNDS):
        high_a, low_a = _product(a, _MULTIPLIERS[0])
        high_c, low_c = _product(c, _MULTIPLIERS[1])
        a, b, c, d = high_c ^ b ^ first, low_c, high_a ^ d ^ second, low_a
        first, second = (first + _WEYL[0]) & _LOW, (second + _WEYL[1]) & _LOW
    return a, b, c, d


@functools.lru_cache(maxsize=4)  # for the dtypes of a case
def normal(shape: Shape, seed: int) -> Tensor:
    """Returns nearly normal float32 numbers on the CPU, of mean 0 and deviation 1.15: at most 4 in magnitude."""
    count = math.prod(shape)
    words = torch.stack(philox((seed & _LOW, seed >> 32), torch.arange(-(-count // 2))), -1).view(-1, 2, 2)
    sums = (words & 0xFFFF).sum(-1) + (words >> 16).sum(-1) - 2 * 0xFFFF
    return (sums.flatten()[:count].to(torch.float32) / 2**15).view(shape)


# What is computed from random numbers has other last bits on other machines. On a grid it is the same again.
_GRID = 2.0**-14


def _on_grid(value: Tensor) -> Tensor:
    scale = torch.ldexp(torch.tensor(_GRID, dtype=torch.float64), torch.frexp(value.abs().amax()).exponent)
    return (torch.round(value / scale) * scale).float() if value.numel() and value.isfinite().all() else value.float()


def inputs(sample: Sample, dtype: torch.dtype, seed: int) -> list[Tensor]:
    """Returns the tensors of a sample, on the CPU."""
    values = [normal(shape, 100 * seed + index) for index, shape in enumerate(sample.shapes)]
    prepared = [_on_grid(prepare(value.double())) for prepare, value in zip(sample.prepare, values)]
    return [value.to(dtype) for value in (*prepared, *values[len(prepared) :])]


def digest(tensors: Sequence[Tensor]) -> str:
    """Computes SHA-256 of the tensors' dtypes, shapes and bytes."""
    hasher = hashlib.sha256()
    for tensor in tensors:
        hasher.update(f"{tensor.dtype} {tuple(tensor.shape)};".encode())
        hasher.update(memory(tensor))
    return hasher.hexdigest()


def memory(tensor: Tensor) -> bytes:
    """Returns the bytes of a tensor on the CPU, in row-major order."""
    tensor = tensor.contiguous()  # without NumPy, PyTorch would make a list of numbers
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes) if tensor.nbytes else b""
