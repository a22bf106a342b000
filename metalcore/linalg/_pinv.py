"""The Moore-Penrose inverse."""

from __future__ import annotations

import torch

from .._core.operators import needs_gradient
from .._core.registry import Op, Sample, register
from .._core.samples import well_conditioned
from ._common import cast_out, in_float32, without_autocast
from ._eigh import _eigh
from ._pytorch import by_torch
from ._rank import chosen_tolerances, threshold, without_defaults
from ._svd import _svd


def pinv(
    A: torch.Tensor,
    rcond: float | torch.Tensor | None = None,
    hermitian: bool = False,
    *,
    atol: float | torch.Tensor | None = None,
    rtol: float | torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes the pseudoinverse V diag(1 / S) Uᵀ of matrices, as torch.linalg.pinv. Singular values of at most
    max(atol, rtol * the largest) count as zero.

    Args:
        A: (*, m, n), as for `svd`.
        rcond: as rtol, with an atol of 0.
        hermitian: whether A is symmetric. Then it uses `eigh`, which reads the lower triangle.
        atol, rtol: numbers, or tensors that broadcast with A's batch. Without both, atol is 0 and rtol
            is max(m, n) * eps of float32, also for the 16-bit dtypes. With only an atol above 0, rtol is 0.
        out: a tensor to write to.

    Returns:
        (*, n, m). It has gradients of any order with respect to A, by the formula of Golub and Pereyra (1973). The
        formula holds where the rank is constant, full or not, and does not divide by differences of singular values.

    Raises:
        RuntimeError: A has fewer than two dimensions, or with `hermitian` its matrices are not square; a tolerance is
            complex; or `out` does not fit.

    Example:
        >>> metalcore.pinv(torch.randn(5, 3, device="mps")).shape
        torch.Size([3, 5])
    """
    if type(hermitian) is not bool:
        return by_torch(
            torch.linalg.pinv, A, hermitian=hermitian, **without_defaults(rcond=rcond, atol=atol, rtol=rtol, out=out)
        )
    tolerances = chosen_tolerances(A, rcond, atol, rtol)
    if tolerances is None or any(isinstance(x, torch.Tensor) and x.requires_grad for x in tolerances):
        return by_torch(
            torch.linalg.pinv, A, **without_defaults(rcond=rcond, hermitian=hermitian, atol=atol, rtol=rtol, out=out)
        )
    atol, rtol = tolerances if rcond is None else (0.0, rcond)
    # A call through autograd.Function takes the host longer than small matrices take the GPU.
    pseudoinverse = _Pinv.apply if needs_gradient(A) else _pinv
    invert = without_autocast(lambda A: pseudoinverse(A, atol, rtol, hermitian))
    return cast_out("linalg.pinv", out, lambda: in_float32(invert, A), A, dtype=A.dtype)


def _pinv(A, atol, rtol, hermitian):
    if A.numel() == 0:
        return A.new_empty(A.mT.shape)
    if hermitian:
        values, V = _eigh(A, "L", True)
        U, magnitudes = V, values.abs()
        largest = magnitudes.amax(-1, keepdim=True)
    else:
        U, values, Vh = _svd(A, False, True)
        V, magnitudes = Vh.mT, values
        largest = values[..., :1]
    inverse = torch.where(magnitudes > threshold(largest, atol, rtol), values.reciprocal(), 0)
    return (V * inverse.unsqueeze(-2)) @ U.mT


class _Pinv(torch.autograd.Function):
    forward = staticmethod(_pinv)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0], output)

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]  (it has one output)
        A, P = ctx.saved_tensors
        wide = A.shape[-2] <= A.shape[-1]
        gradient = _gradient(A, P, grad) if wide else _gradient(A.mT, P.mT, grad.mT).mT
        return gradient.sum_to_size(A.shape), None, None, None  # tolerances may have more batches than A


@without_autocast
def _gradient(A, P, G):
    """Computes -Pᵀ G Pᵀ + (I - A P) Gᵀ P Pᵀ + Pᵀ P Gᵀ (I - P A). The order of the products is fast for m x n matrices
    with m <= n."""
    Gt, Pt = G.mT, P.mT
    K = Gt @ P
    KPt = K @ Pt
    return KPt - (P @ K).mT - (A @ P) @ KPt + (Pt @ P) @ (Gt - K @ A)


def by_pseudoinverse(A, B, grad, rcond):
    """Returns the gradients of X = pinv(A) B by A and B, where singular values of at most rcond times the largest are
    zeros."""
    P = _Pinv.apply(A, 0.0, rcond, False) if needs_gradient(A) else _pinv(A, 0.0, rcond, False)
    by_P = grad @ B.mT
    wide = A.shape[-2] <= A.shape[-1]
    by_A = _gradient(A, P, by_P) if wide else _gradient(A.mT, P.mT, by_P.mT).mT
    return by_A.sum_to_size(A.shape), (P.mT @ grad).sum_to_size(B.shape)


register(
    Op(
        "pinv",
        pinv,
        namesake="torch.linalg.pinv",
        operators=("eigh", "svd"),
        samples=lambda: (
            Sample("20x12", ((7, 20, 12),), prepare=(well_conditioned,), terms=20),
            Sample(
                "hermitian",
                ((7, 12, 12),),
                {"hermitian": True},
                arguments=lambda a: (a + a.mT,),
                prepare=(lambda a: well_conditioned(a) + 2 * torch.eye(12),),
                terms=12,
            ),
        ),
    )
)
