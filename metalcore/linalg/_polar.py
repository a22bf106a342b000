"""The polar decomposition."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .._core.operators import needs_gradient
from .._core.registry import Op, Sample, register
from .._core.routing import FLOAT_DTYPES
from .._core.samples import turned, well_conditioned
from ._common import check_types, in_float32, without_autocast
from ._svd import svd

__all__ = ["Polar", "polar"]


class Polar(NamedTuple):
    """What `polar` returns."""

    U: torch.Tensor
    P: torch.Tensor


def polar(A: torch.Tensor, *, side: str = "right") -> Polar:
    """Computes the polar decomposition A = U P of matrices, or A = P U with side="left", as scipy.linalg.polar: P is
    symmetric, or Hermitian, and positive semidefinite. U has orthonormal columns, or orthonormal rows where A has more
    columns than rows.

    It is made of `svd`, whose kernels and limits it has: A = W S Vᴴ gives U = W Vᴴ, and P = V S Vᴴ or W S Wᴴ. The
    16-bit dtypes are computed in float32. float64 and complex128 matrices, and those on other devices, go through
    torch.linalg.svd.

    Args:
        A: (*, m, n).
        side: "right" for A = U P, "left" for A = P U.

    Returns:
        A named tuple of U, (*, m, n), the nearest matrix with orthonormal columns (rows) to A, and P, (*, n, n) or
        (*, m, m). Where A's rank is less than min(m, n), U is one of many.
        Both have gradients of any order with respect to A. The gradient of U divides by sums of singular values, and so
        is infinite or NaN where two of them are zero, or for rectangular matrices one. It does not divide by their
        differences: equal singular values do no harm, except to derivatives of second and higher order.

    Raises:
        RuntimeError: A has fewer than two dimensions.
        ValueError: `side` is another value.

    Source: Higham, "Functions of Matrices: Theory and Computation", 2008, chapter 8.

    Example:
        >>> U, P = metalcore.polar(torch.randn(5, 3, device="mps"))
        >>> U.shape, P.shape
        (torch.Size([5, 3]), torch.Size([3, 3]))
    """
    check_types("linalg.polar", ("A", A, torch.Tensor))
    if side not in ("left", "right"):
        raise ValueError(f"linalg.polar: side must be 'left' or 'right', not {side!r}")
    if A.dim() < 2:
        raise RuntimeError(f"linalg.polar: A must have at least 2 dimensions, not {A.dim()}")
    if side == "left":
        U, P = polar(A.mH)
        return Polar(U.mH.contiguous(), P)
    parts = _Polar.apply if needs_gradient(A) else _polar
    compute = without_autocast(lambda A: parts(A)[:2])
    return Polar(*(in_float32(compute, A) if A.dtype in FLOAT_DTYPES else compute(A)))


def _polar(A):
    W, S, Vh = svd(A, full_matrices=False)
    P = (Vh.mH * S.unsqueeze(-2)) @ Vh
    return W @ Vh, (P + P.mH) / 2, W, S, Vh


class _Polar(torch.autograd.Function):
    @staticmethod
    def forward(A):
        return _polar(A)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0], *output[2:])
        ctx.mark_non_differentiable(*output[2:])

    @staticmethod
    def backward(ctx, grad_u, grad_p, *_):  # pyright: ignore[reportIncompatibleMethodOverride]
        A, W, S, Vh = ctx.saved_tensors
        if needs_gradient(A):  # for a second derivative, in which W, S and V depend on A
            W, S, Vh = svd(A, full_matrices=False)
        return _gradient(W, S, Vh, grad_u, grad_p)


@without_autocast
def _gradient(W, S, Vh, grad_u, grad_p):
    """Returns W X Vᴴ, with H = Wᴴ dU V, K = Vᴴ dP V and X = ((H - Hᴴ) + S (K + Kᴴ)) / (s_i + s_j), elementwise, and
    adds what leaves the ranges of W and V."""
    V, Wh = Vh.mH, W.mH
    H, symmetric = Wh @ grad_u @ V, grad_p + grad_p.mH
    columns = S.unsqueeze(-1).to(W.dtype)
    X = (H - H.mH + columns * (Vh @ symmetric @ V)) / (columns + columns.mT)
    gradient = W @ X @ Vh
    m, n, k = W.shape[-2], V.shape[-2], S.shape[-1]
    if m > k:
        outside = (grad_u @ V) / columns.mT
        gradient = gradient + (outside - W @ (Wh @ outside)) @ Vh
    if n > k:
        outside = (Wh @ grad_u) / columns + Vh @ symmetric
        gradient = gradient + W @ (outside - (outside @ V) @ Vh)
    return gradient


def _reference(A, *, side="right"):
    """Computes it by an eigendecomposition of A's Gram matrix, for matrices of full rank."""
    if side == "left":
        U, P = _reference(A.mH)
        return U.mH, P
    if A.shape[-2] >= A.shape[-1]:
        values, vectors = torch.linalg.eigh(A.mH @ A)
        P = (vectors * values.sqrt().unsqueeze(-2)) @ vectors.mH
        return torch.linalg.solve(P, A, left=False), P
    U = _reference(A.mH)[0].mH
    P = U.mH @ A
    return U, (P + P.mH) / 2


register(
    Op(
        "polar",
        polar,
        reference=_reference,
        operators=("svd",),
        samples=lambda: (
            Sample("square", ((7, 12, 12),), prepare=(well_conditioned,), terms=12, roundings=2),
            Sample("tall", ((5, 20, 12),), prepare=(well_conditioned,), terms=20, roundings=2),
            Sample("wide, left", ((5, 12, 20),), {"side": "left"}, prepare=(well_conditioned,), terms=20, roundings=2),
            Sample("complex", ((9, 12, 12),), prepare=(well_conditioned,), terms=12, roundings=2, arguments=turned),
        ),
    )
)
