"""Products of Householder reflectors in the form I - V T Vᵀ, under LAPACK's names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .._core.registry import Op, Sample, register
from .._core.tensors import beside
from ._common import check_types, in_float32, without_autocast
from ._triangular import solve_triangular

__all__ = ["larfb", "larft"]


def larft(V: torch.Tensor, tau: torch.Tensor) -> torch.Tensor:
    """Computes the triangular factor of a block reflector: H_0 H_1 … H_{k-1} = I - V T Vᵀ, LAPACK's larft (forward,
    columnwise).

    T = (I + diag(tau) S)⁻¹ diag(tau), where S is VᴴV above its diagonal (Schreiber and Van Loan 1989; Puglisi 1992).

    Args:
        V: (*, m, k) with m >= k, of any floating-point dtype. It has reflectors below its diagonal, as geqrf returns
            them. The other entries are not read, and count as ones on the diagonal and zeros above it.
        tau: (*, k), the factors of the reflectors. Zero means H = I. Batches broadcast.

    Returns:
        T, (*, k, k), upper triangular. It has gradients of any order.

    Raises:
        TypeError: an argument is not a tensor.
        RuntimeError: V has fewer than two dimensions, or shapes do not fit each other.

    Example:
        >>> metalcore.larft(torch.eye(5, 2, device="mps"), torch.ones(2, device="mps")).tolist()
        [[1.0, 0.0], [0.0, 1.0]]
    """
    check_types("larft", ("V", V, torch.Tensor), ("tau", tau, torch.Tensor))
    _check_reflectors("larft", V, tau.shape[-1] if tau.ndim else -1)
    return in_float32_if_half(_larft, V, tau)


def larfb(
    V: torch.Tensor, T: torch.Tensor, C: torch.Tensor, left: bool = True, transpose: bool = False
) -> torch.Tensor:
    """Applies a block reflector H = I - V T Vᵀ to a matrix: LAPACK's larfb (forward, columnwise).

    Args:
        V: (*, m, k), as for larft.
        T: (*, k, k), as larft returns it. Batches broadcast.
        C: (*, m, n), or (*, n, m) without `left`.
        left: whether to compute H C or C H.
        transpose: whether to apply Hᵀ in the place of H.

    Returns:
        The product. It has gradients of any order.

    Raises:
        TypeError: an argument is not a tensor, or not a bool.
        RuntimeError: shapes do not fit each other.

    Example:
        >>> V, tau = torch.eye(5, 2, device="mps"), torch.zeros(2, device="mps")
        >>> metalcore.larfb(V, metalcore.larft(V, tau), torch.randn(5, 3, device="mps")).shape
        torch.Size([5, 3])
    """
    check_types(
        "larfb",
        ("V", V, torch.Tensor),
        ("T", T, torch.Tensor),
        ("C", C, torch.Tensor),
        ("left", left, bool),
        ("transpose", transpose, bool),
    )
    _check_reflectors("larfb", V, T.shape[-1] if T.ndim else -1)
    if C.ndim < 2 or T.ndim < 2 or T.shape[-2] != T.shape[-1] or C.shape[-2 if left else -1] != V.shape[-2]:
        shape = "(*, m, n)" if left else "(*, n, m)"
        raise RuntimeError(
            f"larfb: expected V (*, m, k), T (*, k, k) and C {shape}, but got {tuple(V.shape)}, "
            f"{tuple(T.shape)} and {tuple(C.shape)}"
        )
    return in_float32_if_half(lambda V, T, C: _larfb(unit_lower(V, V.shape[-1]), T, C, left, transpose), V, T, C)


def in_float32_if_half(call: Callable, *tensors: torch.Tensor) -> Any:
    """Wraps in_float32() for 16-bit tensors. Others keep their dtype."""
    return in_float32(call, *tensors) if tensors[0].dtype in (torch.float16, torch.bfloat16) else call(*tensors)


def _check_reflectors(name, V, count):
    if V.ndim < 2 or V.shape[-2] < V.shape[-1] or V.shape[-1] != count:
        raise RuntimeError(
            f"{name}: expected V (*, m, k) with m >= k, and as many factors, but got {tuple(V.shape)} "
            f"and {count} factors"
        )


@without_autocast
def _larft(V, tau):
    V = unit_lower(V, V.shape[-1])
    return solve_triangular(coupling(V, tau), torch.diag_embed(tau), upper=True, unitriangular=True)


def coupling(V, tau):
    """Computes I + diag(tau) S, where S is VᴴV above its diagonal."""
    eye = torch.eye(tau.shape[-1], dtype=V.dtype, device=V.device)
    return beside(V, eye) + tau[..., None] * (V.mH @ V).triu(1)


@without_autocast
def _larfb(V, T, C, left, transpose):
    factor = T.mH if transpose else T
    return C - V @ (factor @ (V.mH @ C)) if left else C - ((C @ V) @ factor) @ V.mH


def unit_lower(A, count):
    """Returns the first `count` reflectors of A, with their ones and zeros."""
    ones = torch.eye(A.shape[-2], count, dtype=A.dtype, device=A.device)
    return A[..., :count].tril(-1) + beside(A, ones)


def _larft_by_columns(V, tau):
    """Runs LAPACK's loop over the columns of T (dlarft, forward, columnwise)."""
    V, columns = unit_lower(V, V.shape[-1]), []
    for i in range(V.shape[-1]):
        column = torch.zeros_like(tau)
        if i:
            previous_columns = torch.stack(columns, -1)
            column = -tau[..., i, None] * (previous_columns @ (V[..., :i].mH @ V[..., i, None])).squeeze(-1)
        columns.append(column + tau * (torch.arange(V.shape[-1], device=tau.device) == i))
    return torch.stack(columns, -1)


def _larfb_as_a_whole(V, T, C, left=True, transpose=False):
    V = unit_lower(V, V.shape[-1])
    H = torch.eye(V.shape[-2], dtype=V.dtype, device=V.device) - V @ T @ V.mH
    H = H.mH if transpose else H
    return H @ C if left else C @ H


register(
    Op(
        "larft",
        larft,
        reference=_larft_by_columns,
        operators=("solve_triangular",),
        edge=tuple,  # reflectors have small numbers
        samples=lambda: (
            Sample("40x20", ((3, 40, 20), (3, 20)), arguments=lambda V, tau: (V / 16, tau / 4), terms=40),
        ),
    )
)
register(
    Op(
        "larfb",
        larfb,
        reference=_larfb_as_a_whole,
        samples=lambda: tuple(
            Sample(
                name,
                ((3, 40, 20), (3, 20, 20), C),
                {"left": left, "transpose": not left},
                arguments=lambda V, T, C: (V / 16, T / 4, C),
                terms=40,
            )
            for name, left, C in (("40x20", True, (3, 40, 30)), ("from the right", False, (3, 30, 40)))
        ),
    )
)
