"""The leading singular values and vectors of matrices, by random projections."""

from __future__ import annotations

import torch

from .._core.registry import Op, Sample, register
from .._core.routing import accelerated
from .._core.samples import low_rank, separated
from ._common import without_autocast
from ._pytorch import by_torch
from ._qr import qr
from ._svd import svd


def svd_lowrank(
    A: torch.Tensor, q: int | None = 6, niter: int | None = 2, M: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Computes an approximate singular value decomposition A ≈ U diag(S) Vᵀ of rank q, as torch.svd_lowrank.

    A multiplies q random vectors. Where singular values decay slowly, `niter` further products with Aᵀ and A help. A QR
    decomposition follows each product. Then A is projected on the span of the vectors, and the projection is decomposed
    (algorithms 4.4 and 5.1 of Halko, Martinsson and Tropp 2011). The time is that of 2 (niter + 1) products of A with q
    columns. The random numbers come from PyTorch's generator of A's device, so that the same seed gives the same
    result.

    Args:
        A: (*, m, n), any strides, with few singular values that matter, such as a weight matrix. float32; float16 and
            bfloat16 are computed in float32, and the results are cast back. Other input goes to PyTorch's function.
        q: the rank, which should be 5 to 10 more than the wanted one for large matrices. None means 6.
        niter: the number of subspace iterations. None means 2.
        M: a matrix to subtract from A, of a shape that broadcasts to A's.

    Returns:
        A tuple (U, S, V), of shapes (*, m, q), (*, q) and (*, n, q). They are differentiable, as for `svd`.

    Example:
        >>> U, S, V = metalcore.svd_lowrank(torch.randn(8, 5, device="mps"), q=2)
        >>> U.shape, S.shape, V.shape
        (torch.Size([8, 2]), torch.Size([2]), torch.Size([5, 2]))
    """
    if not accelerated(A, M):
        return by_torch(torch.svd_lowrank, A, q, niter, M)
    if A.dtype is not torch.float32:
        U, S, V = svd_lowrank(A.float(), q, niter, None if M is None else M.float())
        return U.to(A.dtype), S.to(A.dtype), V.to(A.dtype)
    return _decompose(A, 6 if q is None else q, 2 if niter is None else niter, M)


@without_autocast
def _decompose(A, q, niter, M):
    m, n = A.shape[-2:]
    if M is not None:
        M = M.broadcast_to(A.shape)
    if m < n:
        A, M = A.mT, None if M is None else M.mT
    # These subtract products, so that A - M needs no memory.
    times = lambda X: A @ X if M is None else A @ X - M @ X  # noqa: E731
    transposed_times = lambda X: A.mT @ X if M is None else A.mT @ X - M.mT @ X  # noqa: E731

    Q = qr(times(torch.randn(A.shape[-1], q, dtype=A.dtype, device=A.device))).Q
    for _ in range(niter):
        Q = qr(transposed_times(Q)).Q
        Q = qr(times(Q)).Q
    V, S, Uh = svd(transposed_times(Q), full_matrices=False)  # the transpose of Qᵀ A
    U = Q @ Uh.mT
    return (V, S, U) if m < n else (U, S, V)


def pca_lowrank(
    A: torch.Tensor, q: int | None = None, center: bool = True, niter: int = 2
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Computes the principal components of a matrix's rows, as torch.pca_lowrank: `svd_lowrank` of A minus the mean of
    its rows.

    Args:
        A: (*, m, n), m samples of n features, as for `svd_lowrank`.
        q: the number of components. None means min(6, m, n).
        center: whether to subtract the mean.
        niter: as for `svd_lowrank`.

    Returns:
        A tuple (U, S, V), as from `svd_lowrank`. V's columns are the principal directions, and S² / (m - 1) are their
        variances.

    Raises:
        ValueError: q is negative or larger than m or n, or niter is negative.

    Example:
        >>> U, S, V = metalcore.pca_lowrank(torch.randn(8, 5, device="mps"), q=2)
        >>> U.shape, S.shape, V.shape
        (torch.Size([8, 2]), torch.Size([2]), torch.Size([5, 2]))
    """
    if not accelerated(A):
        return by_torch(torch.pca_lowrank, A, q, center, niter)
    m, n = A.shape[-2:]
    if q is None:
        q = min(6, m, n)
    if not 0 <= q <= min(m, n):
        raise ValueError(f"q(={q}) must be non-negative integer and not greater than min(m, n)={min(m, n)}")
    if niter < 0:
        raise ValueError(f"niter(={niter}) must be non-negative integer")
    if A.dtype is not torch.float32:
        U, S, V = pca_lowrank(A.float(), q, center, niter)
        return U.to(A.dtype), S.to(A.dtype), V.to(A.dtype)
    return svd_lowrank(A - A.mean(-2, keepdim=True) if center else A, q, niter)


def _op(function):
    # q is the number of columns, so that no result depends on the random numbers.
    return Op(
        function.__name__,
        function,
        namesake=f"torch.{function.__name__}",
        results=lambda factors: (factors[1], low_rank(factors[0], factors[1], factors[2].mT)),
        operators=("qr", "svd", "solve_triangular"),
        samples=lambda: (Sample("20x12", ((3, 20, 12),), {"q": 12}, prepare=(separated,), terms=20**2, roundings=3),),
    )


register(_op(svd_lowrank))
register(_op(pca_lowrank))
