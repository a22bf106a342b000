"""Values and samples that several ops use as their sample inputs."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from .registry import Sample

__all__ = [
    "elementwise",
    "hidden_states",
    "integers",
    "low_rank",
    "positive_definite",
    "rows",
    "separated",
    "well_conditioned",
]


def elementwise(name: str = "", **options) -> tuple[Sample, ...]:
    """Returns samples of a function of one tensor: whole vectors, a length that vectors do not divide, no alignment,
    strides."""
    return (
        Sample(f"{name}rows", ((64, 1000),), options),
        Sample(f"{name}with a rest", ((1027,),), options),
        Sample(f"{name}not aligned", ((1003,),), options, arguments=lambda x: (x[1:],)),
        Sample(f"{name}strided", ((64, 1000),), options, arguments=lambda x: (x.mT[3::2, 1:],)),
        Sample(f"{name}empty", ((0, 8),), options),
    )


def hidden_states(**options):
    """Returns the hidden states of a language model: what `production` of an elementwise op returns."""

    def production(batch_size=2, sequence_length=128, hidden_size=1024):
        return Sample("", ((batch_size, sequence_length, hidden_size),), options)

    return production


def integers(numbers: Iterable[int], like: Tensor, dtype: torch.dtype = torch.int64) -> Tensor:
    """Returns a vector of integers on the device of `like`, for a sample's `arguments`. The device writes them itself:
    a CUDA graph cannot capture a copy from the host's memory."""
    return torch.stack([torch.full((), number, dtype=dtype, device=like.device) for number in numbers])


# One shape for each way in which kernels share out rows: a row goes to a thread, a simdgroup, a threadgroup (in
# registers or in loops), or several threadgroups.
_ROWS = {
    "rows": (64, 1000),
    "a thread's rows": (300, 12),
    "short rows of a simdgroup": (40, 100),
    "rows of a simdgroup": (40, 500),
    "long rows": (40, 16500),
    "few long rows": (3, 20000),
}


def rows(sample) -> tuple[Sample, ...]:
    """Returns `sample(name, rows, length)` for every way in which kernels share out rows."""
    return tuple(sample(name, count, length) for name, (count, length) in _ROWS.items())


def well_conditioned(a: Tensor) -> Tensor:
    """Returns matrices whose singular values differ by a small factor, so that Q, R, L and U hardly amplify errors."""
    return a / a.shape[-2] ** 0.5 + 2 * torch.eye(*a.shape[-2:])


def positive_definite(a: Tensor) -> Tensor:
    """Returns well-conditioned symmetric positive-definite matrices."""
    return a @ a.mT / a.shape[-1] + torch.eye(a.shape[-1])


def turned(a: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    """Returns complex matrices D A Dᴴ and D B, where D is diagonal, with numbers of magnitude one: singular values, and
    what is symmetric or triangular, stay so."""
    if a.is_complex():
        return a, *others
    dtype = a.dtype if a.dtype == torch.float64 else torch.float32
    m, n = a.shape[-2:]
    angles = torch.arange(max(m, n), dtype=dtype, device=a.device)
    turns = torch.polar(torch.ones_like(angles), angles)
    rows = turns[:m, None]
    return a.to(dtype) * rows * turns[:n].conj(), *(b.to(dtype) * rows for b in others)


def separated(a: Tensor) -> Tensor:
    """Returns matrices whose singular values, or their symmetric part's eigenvalues, are about one apart. Errors of
    their vectors grow by the largest value over that distance, which is n."""
    m, n = a.shape[-2:]
    return a / (10 * min(m, n)) + torch.diag(torch.arange(1.0, max(m, n) + 1))[:m, :n]


def low_rank(u: Tensor, s: Tensor, vh: Tensor) -> Tensor:
    """Returns the best approximation of rank 3. It depends on the vectors, but not on their signs."""
    return (u[..., :3] * s[..., None, :3]) @ vh[..., :3, :]
