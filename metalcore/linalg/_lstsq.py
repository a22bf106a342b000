"""Least squares."""

from __future__ import annotations

import torch

from .._core.operators import ops
from .._core.registry import Op, Sample, register
from .._core.routing import accelerated
from .._core.samples import well_conditioned
from ._by_torch import by_torch
from ._common import in_float32, without_autocast
from ._results import linalg_lstsq

_DRIVERS = ("gels", "gelsy", "gelsd", "gelss")


def lstsq(A: torch.Tensor, B: torch.Tensor, rcond: float | None = None, *, driver: str | None = None) -> linalg_lstsq:
    """The X with the least norm of A X - B, as torch.linalg.lstsq. If several X have it, the one of least norm.

    It is for matrices of full rank, and uses QR as LAPACK's gels does: A = Q R gives X = R⁻¹ Qᵀ B. With more unknowns
    than equations, Aᵀ = Q R gives X = Q R⁻ᵀ B (Golub and Van Loan, Matrix Computations, 5.3 and 5.6). The rank is not
    checked: a matrix of lower rank gives inf, nan or large numbers, as PyTorch's op does on CUDA. A may have norms
    above float32's range, because it is scaled first, as in gels.

    Args:
        A: (*, m, n), any strides. float32; float16 and bfloat16 are computed in float32, and the results are cast
            back.
            Other input goes to PyTorch's op.
        B: (*, m, k), or (*, m) with A's batch, of A's dtype. The batches of A and B broadcast.
        rcond: has no meaning for matrices of full rank.
        driver: "gels", "gelsy", "gelsd" or "gelss". The algorithm is the same for all of them.

    Returns:
        A torch.return_types.linalg_lstsq, as from the driver "gels": the solution (*, n, k), or (*, n); residuals (*,
        k), which are the sums of squares of A X - B if m > n, or else empty; rank and singular_values, which are empty.
        The solution and the residuals have gradients of any order.

    Raises:
        RuntimeError: shapes do not fit, or the driver is unknown. The messages are PyTorch's.
    """
    if (
        B is None
        or not accelerated(A, B)
        or A.dtype != B.dtype
        or driver is not None
        and type(driver) is not str
        or rcond is not None
        and not isinstance(rcond, (float, int))
        and not _is_number(rcond)
    ):
        return by_torch(torch.linalg.lstsq, A, B, rcond, driver=driver)
    is_vector = _check(A, B, driver)
    solution, residuals = in_float32(_least_squares, A, B.unsqueeze(-1) if is_vector else B)
    if is_vector:
        solution = solution.squeeze(-1)
    rank = torch.empty(0, dtype=torch.int64, device=A.device)
    return linalg_lstsq((solution, residuals, rank, A.new_empty(0)))


def _is_number(value):
    """Whether PyTorch takes a tensor in the place of a number."""
    return isinstance(value, torch.Tensor) and value.ndim == 0 and not value.is_complex() and not value.requires_grad


def _check(A, B, driver):
    """Raises PyTorch's errors. Returns whether B consists of vectors and not of matrices."""

    def check(condition, message):
        if not condition:
            raise RuntimeError(f"torch.linalg.lstsq: {message}")

    check(A.dim() >= 2, "input must have at least 2 dimensions.")
    check(B.dim() >= 1, "other must have at least 1 dimension.")
    check(
        0 <= A.dim() - B.dim() <= 1,
        "input.dim() must be greater or equal to other.dim() and (input.dim() - other.dim()) <= 1",
    )
    is_vector = B.shape == A.shape[:-1] or B.dim() == 1
    check(A.shape[-2] == B.shape[-1 if is_vector else -2], "input.size(-2) should match other.size(-2)")
    check(
        is_vector or A.dim() == B.dim(), f"a batch of vectors must have the shape {[*A.shape[:-1]]}, not {[*B.shape]}"
    )
    check(driver is None or driver in _DRIVERS, f"parameter `driver` should be one of ({', '.join(_DRIVERS)})")
    return is_vector


@without_autocast
def _least_squares(A, B):
    m, n = A.shape[-2:]
    if m < n:
        Q, R, scale = ops.qr_scaled(A.mT)
        return Q @ ops.solve_triangular(R.mT, B, False, True, False) * scale, A.new_empty(0)
    Q, R, scale = ops.qr_scaled(A)
    X = ops.solve_triangular(R, Q.mT @ B, True, True, False) * scale
    return X, (A @ X - B).square().sum(-2) if m > n else A.new_empty(0)


register(
    Op(
        "lstsq",
        lstsq,
        namesake="torch.linalg.lstsq",
        results=lambda found: [found.solution],
        operators=("qr_scaled", "solve_triangular"),
        samples=lambda: tuple(
            Sample(f"{m}x{n}", ((3, m, n), (3, m, 5)), prepare=(well_conditioned,), terms=max(m, n))
            for m, n in ((20, 12), (12, 20))
        ),
    )
)
