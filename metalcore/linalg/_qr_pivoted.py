"""The operator of QR with column pivoting, for matrices that may lack rank."""

from __future__ import annotations

import torch
from torch import Tensor

from .._core.operators import cpu_kernel, fake_kernel

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
    known = torch.zeros(batch, dtype=torch.bool, device=A.device)
    smallest, largest = A.new_zeros(*batch, rows), A.new_zeros(*batch, rows)
    least = greatest = A.new_zeros(batch)
    for step in range(min(rows, columns) if known.numel() else 0):
        norms = W[..., step:, step:columns].square().sum(-2).nan_to_num(torch.inf, torch.inf)
        pivot = (norms.argmax(-1, keepdim=True) + step).where(~known[..., None], step)
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
        known = known | (beta == 0) | (least < greatest * rcond)
        rank = rank.where(known, step + 1)
        rest = W[..., step:, step + 1 :]
        rest = rest - tau[..., None, None] * v[..., None] * (v[..., None, :] @ rest)
        column = torch.cat([beta[..., None], v[..., 1:]], -1)
        reflected = torch.cat([column[..., None], rest], -1)
        W[..., step:, step:] = reflected.where(~known[..., None, None], W[..., step:, step:])
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
