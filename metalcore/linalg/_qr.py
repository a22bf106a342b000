"""The QR decomposition, and the operator of QR with column pivoting, for matrices that may lack rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._core.operators import autograd, cpu_kernel, fake_kernel, ops
from .._core.registry import Op, Sample, register
from .._core.routing import accelerated
from .._core.samples import turned, well_conditioned
from ._common import NUMBERS, Tensors, complex_by_torch, in_float32, write_out
from ._pytorch import by_torch, override, takes
from ._results import linalg_qr
from ._triangular import solve_triangular


def qr(A: torch.Tensor, mode: str = "reduced", *, out: Tensors | None = None) -> linalg_qr:
    """Computes the QR decomposition A = Q R of matrices, as torch.linalg.qr: Q has orthonormal columns, R is upper
    triangular.

    The method is Householder reflections with LAPACK's conventions (geqrf, orgqr), so R's diagonal has the same signs
    as PyTorch's on the CPU. A simdgroup or a threadgroup takes each small matrix. Large matrices take blocks in compact
    WY form (Schreiber and Van Loan 1989), and tall ones TSQR (Demmel et al. 2012).
    `metalcore.explain("qr", A.shape, mode=mode)` tells which kernels a call runs.

    Args:
        A: (*, m, n), any strides. float32 or complex64; float16 and bfloat16 are computed in float32, and Q and R are
            cast back. Other input goes to PyTorch's op.
        mode: with k = min(m, n), "reduced" gives Q (*, m, k) and R (*, k, n); "complete" gives Q (*, m, m) and R (*, m,
            n); "r" gives an empty Q and R (*, k, n).
        out: a pair of tensors to write Q and R to.

    Returns:
        A torch.return_types.linalg_qr: the named tuple (Q, R). They have gradients of any order, except in mode "r",
        and in mode "complete" if m > n, where Q is not unique.

    Raises:
        RuntimeError: the mode is unknown, A has fewer than two dimensions, or `out` does not fit.

    Example:
        >>> Q, R = metalcore.qr(torch.randn(5, 3, device="mps"))
        >>> Q.shape, R.shape
        (torch.Size([5, 3]), torch.Size([3, 3]))
    """
    if not accelerated(A, dtypes=NUMBERS) or type(mode) is not str or complex_by_torch("qr", ("mode", mode), A):
        return by_torch(torch.linalg.qr, A, mode, out=out)
    return _named(write_out("linalg_qr", out, lambda: in_float32(lambda A: ops.qr(A, mode), A), A))


def _named(results):
    return linalg_qr(tuple(results))


@cpu_kernel("qr")
def _(A, mode):
    Q, R = torch.linalg.qr(A, mode)
    return Q.contiguous(), R.contiguous()


@fake_kernel("qr")
def _(A, mode):
    *batch, m, n = A.shape
    k = min(m, n)
    Q = A.new_empty([0] if mode == "r" else [*batch, m, m if mode == "complete" else k])
    return Q, A.new_empty([*batch, m if mode == "complete" else k, n])


def _save(ctx, inputs, output):
    ctx.mode = inputs[1]
    ctx.save_for_backward(*output)
    ctx.set_materialize_grads(False)


def _backward(ctx, grad_Q, grad_R):
    Q, R = ctx.saved_tensors
    if ctx.mode == "r":
        raise RuntimeError(
            "The derivative of linalg.qr depends on Q, which is not computed when mode='r'. Please use "
            "linalg.qr(A, mode='reduced') if you are going to differentiate through linalg.qr."
        )
    if ctx.mode == "complete" and Q.shape[-2] > R.shape[-1]:
        raise RuntimeError("The QR decomposition is not differentiable when mode='complete' and nrows > ncols.")
    return _gradient(Q, R, grad_Q, grad_R), None


def _gradient(Q, R, grad_Q, grad_R):
    m, n = Q.shape[-2], R.shape[-1]
    if grad_Q is None and grad_R is None:
        return None
    if m >= n:
        return _backward_tall(Q, R, grad_Q, grad_R)
    # A = (A1, A2) = (Q R1, Q R2). R2 = Qᴴ A2 adds A2 grad_R2ᴴ to the gradient of Q.
    R1, R2 = R[..., :m], R[..., m:]
    if grad_R is None:
        return torch.cat([_backward_tall(Q, R1, grad_Q, None), torch.zeros_like(R2)], dim=-1)
    grad_R1, grad_R2 = grad_R[..., :m], grad_R[..., m:]
    through_Q = Q @ (R2 @ grad_R2.mH)
    grad_Q = through_Q if grad_Q is None else grad_Q + through_Q
    return torch.cat([_backward_tall(Q, R1, grad_Q, grad_R1), Q @ grad_R2], dim=-1)


def _backward_tall(Q, R, grad_Q, grad_R):
    """Returns (grad_Q + Q copyltu(R grad_Rᴴ - grad_Qᴴ Q)) R⁻ᴴ, where copyltu(M) is the Hermitian matrix with M's lower
    triangle and the real part of its diagonal (Walter and Lehmann 2010)."""
    M: Any = 0 if grad_R is None else R @ grad_R.mH
    if grad_Q is not None:
        M = M - grad_Q.mH @ Q
    copied = M.tril() + M.tril(-1).mH
    B = Q @ (0.5 * (copied + copied.mH) if copied.is_complex() else copied)
    if grad_Q is not None:
        B = B + grad_Q
    return solve_triangular(R.mH, B, upper=False, left=False)


autograd("qr", _backward, _save)


# qr_scaled(A) returns the reduced Q and R of A times `scale`, and scale (*, 1, 1). A matrix's scale is the power of two
# that brings its largest entry to about one, so that R is in range where the norms of A's columns are not.


@cpu_kernel("qr_scaled")
def _(A):
    if A.numel() == 0:
        scale = A.new_ones([*A.shape[:-2], 1, 1], dtype=A.dtype.to_real())
    else:
        largest = A.abs().amax((-2, -1), keepdim=True)
        scale = torch.ldexp(torch.ones_like(largest), (1 - torch.frexp(largest).exponent).clamp(-126, 126))
    Q, R = torch.linalg.qr(A * scale)
    return Q.contiguous(), R.contiguous(), scale


@fake_kernel("qr_scaled")
def _(A):
    *batch, m, n = A.shape
    k = min(m, n)
    return (
        A.new_empty([*batch, m, k]),
        A.new_empty([*batch, k, n]),
        A.new_empty([*batch, 1, 1], dtype=A.dtype.to_real()),
    )


def _save_scaled(ctx, inputs, output):
    ctx.save_for_backward(*output)
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)


def _backward_scaled(ctx, grad_Q, grad_R, _):
    Q, R, scale = ctx.saved_tensors
    grad = _gradient(Q, R, grad_Q, grad_R)
    return None if grad is None else grad * scale


autograd("qr_scaled", _backward_scaled, _save_scaled)


# The override of PyTorch's kernel


def _override(A, mode="reduced"):
    return ops.qr(A, mode) if takes(A) and mode in ("reduced", "complete", "r") else None


def _sample(batch, m, n, name="", mode="reduced", **more):
    return Sample(
        f"{name}{m}x{n}",
        ((batch, m, n),),
        {"mode": mode},
        prepare=(well_conditioned,),
        terms=max(m, n),
        backward=mode == "reduced",
        **more,
    )


register(
    Op(
        "qr",
        qr,
        namesake="torch.linalg.qr",
        operators=("qr", "qr_scaled", "solve_triangular"),
        override=(override("linalg_qr", _override),),
        samples=lambda: (
            _sample(40, 16, 12),
            _sample(3, 100, 40),
            _sample(1, 1200, 20),
            _sample(1, 2100, 12),
            _sample(1, 160, 140),
            _sample(3, 12, 20),
            _sample(3, 20, 12, "complex, ", arguments=turned),
            _sample(3, 20, 12, "complete, ", "complete"),
            _sample(3, 100, 40, "R alone, ", "r"),
        ),
    )
)


# qr_pivoted(A, columns, rcond) pivots A's first `columns` columns and applies the reflectors to all. It returns
# - W, the transpose of the result: R, the reflectors below its diagonal, and Qᵀ times the other columns. Rows of a
#   number at or above the rank mean nothing;
# - order: column j of R is column order[j] of A;
# - rank: how many steps it took until R's estimated condition number exceeded 1 / rcond (Bischof 1990).


@cpu_kernel("qr_pivoted")
def _(A, columns, rcond):
    W = A.clone()
    *batch, rows, width = A.shape
    order = torch.arange(columns, device=A.device).expand(*batch, columns).clone()
    rank = torch.zeros(batch, dtype=torch.int64, device=A.device)
    has_rank = torch.zeros(batch, dtype=torch.bool, device=A.device)
    smallest, largest = A.new_zeros(*batch, rows), A.new_zeros(*batch, rows)
    least = greatest = A.new_zeros(batch)
    for step in range(min(rows, columns) if has_rank.numel() else 0):
        norms = W[..., step:, step:columns].square().sum(-2).nan_to_num(torch.inf, torch.inf)
        pivot = (norms.argmax(-1, keepdim=True) + step).where(~has_rank[..., None], step)
        places = torch.arange(width, device=A.device).expand(*batch, width).scatter(-1, pivot, step)
        places[..., step : step + 1] = pivot
        W = W.take_along_dim(places[..., None, :], -1)
        order = order.take_along_dim(places[..., :columns], -1)
        above, x = W[..., :step, step], W[..., step:, step]
        beta, tau, v = _reflector(x)
        norm = beta.abs()
        if step == 0:
            next_least = next_greatest = norm
            turns = [(torch.zeros_like(norm), torch.ones_like(norm))] * 2
        else:
            next_greatest, angle = _larger(greatest, (largest[..., :step] * above).sum(-1), beta)
            hull, other = _larger(least, (smallest[..., :step] * above).sum(-1), beta)
            next_least = least * (norm / hull)
            turns = [(-other.sin(), other.cos()), (angle.cos(), angle.sin())]
        for vector, (old, new) in zip((smallest, largest), turns):
            vector.mul_(old[..., None])
            vector[..., step] = new
        least, greatest = next_least, next_greatest
        has_rank = has_rank | (beta == 0) | (least < greatest * rcond)
        rank = rank.where(has_rank, step + 1)
        rest = W[..., step:, step + 1 :]
        rest = rest - tau[..., None, None] * v[..., None] * (v[..., None, :] @ rest)
        column = torch.cat([beta[..., None], v[..., 1:]], -1)
        reflected = torch.cat([column[..., None], rest], -1)
        W[..., step:, step:] = reflected.where(~has_rank[..., None, None], W[..., step:, step:])
    return W.mT.contiguous(), order, rank


def _reflector(x: Tensor):
    """Returns beta, tau and v of LAPACK's slarfg, v[0] = 1."""
    alpha, rest = x[..., 0], x[..., 1:]
    length = torch.linalg.vector_norm(rest, dim=-1) if rest.shape[-1] else torch.zeros_like(alpha)
    is_zero = length == 0
    beta = (-torch.hypot(alpha, length).copysign(alpha)).where(~is_zero, alpha)
    tau = ((beta - alpha) / beta).where(~is_zero, 0.0)
    v = (rest / (alpha - beta)[..., None]).where(~is_zero[..., None], 0.0)
    return beta, tau, torch.cat([torch.ones_like(x[..., :1]), v], -1)


def _larger(sigma: Tensor, alpha: Tensor, gamma: Tensor):
    """Returns the larger singular value of ((sigma, alpha), (0, gamma)), and the angle of its left singular vector."""
    value = (torch.hypot(sigma + gamma, alpha) + torch.hypot(sigma - gamma, alpha)) / 2
    return value, torch.atan2(2 * alpha * gamma, (sigma + gamma) * (sigma - gamma) + alpha * alpha) / 2


@fake_kernel("qr_pivoted")
def _(A, columns, rcond):
    *batch, rows, width = A.shape
    order, rank = (A.new_empty(sizes, dtype=torch.int64) for sizes in ([*batch, columns], batch))
    return A.new_empty([*batch, width, rows]), order, rank
