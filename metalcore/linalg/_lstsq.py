"""Least squares."""

from __future__ import annotations

import torch

from .._core.operators import autograd, cpu_kernel, fake_kernel, needs_gradient, ops
from .._core.registry import Op, Sample, register
from .._core.routing import accelerated
from .._core.samples import turned, well_conditioned
from ._common import NUMBERS, in_float32, without_autocast
from ._pytorch import DTYPES, by_torch, override, takes
from ._rank import by_pseudoinverse
from ._results import linalg_lstsq

_DRIVERS = ("gels", "gelsy", "gelsd", "gelss")


def lstsq(A: torch.Tensor, B: torch.Tensor, rcond: float | None = None, *, driver: str | None = None) -> linalg_lstsq:
    """Finds the X with the least norm of A X - B, as torch.linalg.lstsq. If several X have it, the one of least norm.

    The driver says what is known about A's rank.
    "gels", the default as in PyTorch on GPUs, is for matrices of full rank. It uses QR: A = Q R gives X = R⁻¹ Qᴴ B.
    With more unknowns than equations, Aᴴ = Q R gives X = Q R⁻ᴴ B (Golub and Van Loan, Matrix Computations, 5.3 and
    5.6). The rank is not checked: a matrix of lower rank gives inf, nan or large numbers. Where no gradient is asked, A
    and B have up to 128 columns together and A is not wider than a tree of blocks takes, one walk over A and B
    gives R, Qᵀ B and the residuals of real matrices, and Q is never formed (TSQR, Demmel et al. 2012).
    "gelsy" finds the rank by QR with column pivoting and an estimate of the condition number after each column (Bischof
    1990), and solves by a complete orthogonal decomposition (Golub and Van Loan, 5.5).
    "gelsd" and "gelss" find it by the singular values, X = V diag(1 / S) Uᴴ B, and are the same here. For
    complex matrices "gelsy" finds it so too.

    A may have norms above float32's range, because it is scaled first.

    Args:
        A: (*, m, n), any strides. float32 or complex64; float16 and bfloat16 are computed in float32, and the results
            are cast back. Other input goes to PyTorch's op.
        B: (*, m, k), or (*, m) with A's batch, of A's dtype. The batches of A and B broadcast.
        rcond: for "gelsd" and "gelss", singular values of at most rcond times the largest count as zero; for "gelsy",
            columns of R count until its estimated condition number exceeds 1 / rcond. By default max(m, n) * eps of
            float32, also for the 16-bit dtypes; below 0, eps ("gelsd", "gelss"). It has no meaning for "gels".
        driver: None, "gels", "gelsy", "gelsd" or "gelss".

    Returns:
        A torch.return_types.linalg_lstsq, as PyTorch's on the CPU: the solution (*, n, k), or (*, n); residuals (*, k),
        which are the sums of squares of A X - B if m > n, or else empty; rank, of A's batch, int64, and empty for
        "gels"; singular_values (*, min(m, n)) in descending order, of A's batch, for "gelsd" and "gelss". "gelsy" has
        no residuals, and "gelsd" and "gelss" have some only if all matrices have rank n: the host waits to know it. The
        solution and the residuals have gradients of any order; where A lacks rank, those of a constant rank (Golub and
        Pereyra 1973).

    Raises:
        RuntimeError: shapes do not fit, or the driver is unknown. The messages are PyTorch's.

    Example:
        >>> A, B = torch.randn(5, 2, device="mps"), torch.randn(5, 3, device="mps")
        >>> metalcore.lstsq(A, B).solution.shape
        torch.Size([2, 3])
    """
    if (
        B is None
        or not accelerated(A, B, dtypes=NUMBERS)
        or A.dtype != B.dtype
        or driver is not None
        and type(driver) is not str
        or rcond is not None
        and not isinstance(rcond, (float, int))
        and not _is_number(rcond)
    ):
        return by_torch(torch.linalg.lstsq, A, B, rcond, driver=driver)
    is_vector = _check(A, B, driver)
    if driver in (None, "gels"):
        solve = _of_full_rank
    else:
        tolerance = max(1, *A.shape[-2:]) * _EPS if rcond is None else float(rcond)
        tolerance = _EPS if tolerance < 0 and driver != "gelsy" else tolerance

        def solve(A, B):
            return _by_rank(A, B, tolerance, driver)

    results = in_float32(without_autocast(solve), A, B.unsqueeze(-1) if is_vector else B)
    if is_vector:
        results[0] = results[0].squeeze(-1)
    return linalg_lstsq(results)


_EPS = torch.finfo(torch.float32).eps


def _is_number(value):
    """Returns whether PyTorch takes a tensor in the place of a number."""
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


def _of_full_rank(A, B):
    X, residuals = _least_squares(A, B)
    return [X, residuals, torch.empty(0, dtype=torch.int64, device=A.device), _empty(A)]


def _least_squares(A, B):
    m, n = A.shape[-2:]
    if m < n:
        Q, R, scale = ops.qr_scaled(A.mH)
        return Q @ ops.solve_triangular(R.mH, B, False, True, False) * scale, _empty(A)
    if not A.is_complex() and not needs_gradient(A) and not needs_gradient(B):
        if A.shape[:-2] != B.shape[:-2]:
            batch = torch.broadcast_shapes(A.shape[:-2], B.shape[:-2])
            A, B = A.expand(*batch, -1, -1), B.expand(*batch, -1, -1)
        X, residuals = ops.lstsq(A, B)
        return X, residuals if m > n else _empty(A)
    X = _by_qr(A, B)
    return X, _squares(A @ X - B) if m > n else _empty(A)


def _empty(A, *shape):
    """Returns the result that is not there, whose numbers are real also where A is complex."""
    return A.new_empty(shape or 0, dtype=A.real.dtype)


def _squares(rest):
    """Returns the sums of the squares of the columns' magnitudes."""
    return torch.view_as_real(rest).square().sum((-3, -1)) if rest.is_complex() else rest.square().sum(-2)


def _by_qr(A, B):
    Q, R, scale = ops.qr_scaled(A)
    return ops.solve_triangular(R, Q.mH @ B, True, True, False) * scale


@cpu_kernel("lstsq")
def _(A, B):
    X = _by_qr(A, B).contiguous()
    return X, (A @ X - B).square().sum(-2)


@fake_kernel("lstsq")
def _(A, B):
    *batch, _, n = A.shape
    sides = B.shape[-1]
    return A.new_empty([*batch, n, sides]), A.new_empty([*batch, sides])


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs, output[0])


def _backward(ctx, grad_X, grad_residuals):
    """Returns the gradients of X = pinv(A) B and of the sums of squares, whose derivative by X is 0, since they are
    the least."""
    A, B, X = ctx.saved_tensors
    by_A, by_B = by_pseudoinverse(A, B, grad_X, 0.0)
    rest = 2 * (A @ X - B) * grad_residuals[..., None, :]
    return by_A + rest @ X.mT, by_B - rest


autograd("lstsq", _backward, _save)


# Matrices that may lack rank


def _by_rank(A, B, rcond, driver):
    call = _ByRank.apply if needs_gradient(A) or needs_gradient(B) else _solve_by_rank
    X, rank, S = call(A, B, rcond, driver)
    m, n = A.shape[-2:]
    residuals = _empty(A)
    if m > n and driver != "gelsy" and (rank.is_meta or bool((rank == n).all())):
        residuals = _squares(A @ X - B)
    return [X, residuals, rank, S]


def _solve_by_rank(A, B, rcond, driver):
    *batch, m, n = A.shape
    if 0 in (m, n):
        shape = (*torch.broadcast_shapes(A.shape[:-2], B.shape[:-2]), n, B.shape[-1])
        rank = torch.zeros(batch, dtype=torch.int64, device=A.device)
        # PyTorch's singular values of a matrix without entries have the batch's shape only where there is a batch.
        return A.new_zeros(shape), rank, _empty(A) if driver == "gelsy" else _empty(A, *batch, 0)
    if driver == "gelsy" and not A.is_complex():
        return *_by_pivots(A, B, rcond), _empty(A)
    U, S, Vh = ops.svd(A, False, True)
    counted = ~(rcond * S[..., :1] >= S)  # NaN counts, so that it reaches the solution
    inverse = S.reciprocal().where(counted, 0.0)[..., None]
    X = Vh.mH @ (inverse * (U.mH @ B))
    return X, counted.sum(-1), _empty(A) if driver == "gelsy" else S


def _by_pivots(A, B, rcond):
    """Returns A P = Q R of a first QR, which brings all that follows to min(m, n) rows, and one with pivots. Then R's
    independent rows are Tᵀ Zᵀ, and X = P Z T⁻ᵀ Qᵀ B has the least norm."""
    n = A.shape[-1]
    Q, R, scale = ops.qr_scaled(A)
    k = R.shape[-2]
    identity = torch.eye(k, device=A.device).expand(*R.shape[:-1], k)
    W, order, rank = ops.qr_pivoted(torch.cat([R, identity], -1), n, rcond)
    independent = torch.arange(k, device=A.device) < rank[..., None]
    rows = W.mT.where(independent[..., None], 0.0)
    Z, T = ops.qr(rows[..., :n].triu().mT, "reduced")
    T = T + (~independent).to(T.dtype).diag_embed()  # its rows and columns there are zeros
    right = rows[..., n:] @ (Q.mT @ B)
    X = Z @ ops.solve_triangular(T.mT, right, False, True, False) * scale
    places = order[..., None].expand(X.shape)
    return torch.empty_like(X).scatter(-2, places, X), rank


class _ByRank(torch.autograd.Function):
    forward = staticmethod(_solve_by_rank)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:2])
        ctx.rcond = inputs[2]
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, grad, *_):  # pyright: ignore[reportIncompatibleMethodOverride]
        if grad is None:
            return None, None, None, None
        A, B = ctx.saved_tensors
        return *by_pseudoinverse(A, B, grad, ctx.rcond), None, None


# The override of PyTorch's kernel


def _override(A, B, *, rcond=None, driver=None):
    # PyTorch's devices have "gels" or a default of their own, which may find the rank, and refuse the other drivers.
    if driver in (None, "gels") or not takes(A) or not accelerated(B, dtypes=DTYPES):
        return None
    return tuple(lstsq(A, B, rcond, driver=driver))


register(
    Op(
        "lstsq",
        lstsq,
        namesake="torch.linalg.lstsq",
        results=lambda lstsq: [lstsq.solution],
        override=(override("linalg_lstsq", _override),),
        operators=("lstsq", "qr_pivoted", "qr", "qr_scaled", "solve_triangular", "svd"),
        samples=lambda: tuple(
            Sample(
                f"{driver}{m}x{n}" + (", complex" if is_complex else ""),
                ((batch, m, n), (batch, m, sides)),
                {"driver": driver[:-2]} if driver else {},
                prepare=(well_conditioned,),
                terms=max(m, n),
                backward=m < 400,  # calls without gradients have kernels of their own
                arguments=turned if is_complex else lambda *tensors: tensors,
            )
            for is_complex, driver, batch, m, n, sides in (
                (False, "", 3, 20, 12, 5),
                (False, "", 3, 12, 20, 5),
                (False, "", 2, 100, 12, 5),
                (False, "", 2, 200, 40, 5),
                (False, "", 2, 400, 12, 5),
                (False, "", 1, 2500, 6, 3),
                (False, "gelsy, ", 3, 20, 12, 5),
                (False, "gelsy, ", 1, 200, 200, 2),
                (False, "gelsd, ", 3, 12, 20, 5),
                (True, "", 4, 20, 12, 5),
                (True, "gelsd, ", 4, 12, 20, 5),
            )
        ),
    )
)
