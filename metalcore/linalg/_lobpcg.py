"""Some extreme eigenvalues of large symmetric matrices."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .._core.operators import needs_gradient
from .._core.registry import Op, Sample, register
from .._core.routing import accelerated
from .._core.samples import low_rank, separated
from ._common import host_number, in_float32, square, without_autocast
from ._eigh import eigh
from ._pytorch import by_torch
from ._qr import qr

__all__ = ["lobpcg"]

_STEPS_PER_CHECK = 4  # the host waits after so many steps
_MOST_WITHOUT_MEMORY = 20  # steps of matrices without memory, whose plan is asked for


def lobpcg(
    A: torch.Tensor,
    k: int | None = None,
    B: torch.Tensor | None = None,
    X: torch.Tensor | None = None,
    n: int | None = None,
    iK: torch.Tensor | None = None,
    niter: int | None = None,
    tol: float | None = None,
    largest: bool | None = None,
    method: str | None = None,
    tracker: Callable | None = None,
    ortho_iparams: dict[str, int] | None = None,
    ortho_fparams: dict[str, float] | None = None,
    ortho_bparams: dict[str, bool] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes the k largest or smallest eigenvalues of symmetric matrices with their eigenvectors, as torch.lobpcg, by
    locally optimal steps from the residuals and the step before.

    The basis of a step, 3 n columns, is made orthonormal by `qr`, and `eigh` finds the best vectors in it. The host
    waits after every fourth step, to know whether all residuals are small.

    Args:
        A: (*, m, m), float32. Other input (sparse tensors included) goes to PyTorch's function, as do calls that need
            gradients or have one of its other arguments.
        k: how many eigenvalues, by default as many as X has columns, or 1.
        B: (*, m, m), positive definite, for the problem A V = B V diag(L). None stands for I.
        X: (*, m, n), the vectors to start from, n >= k. By default they are random.
        n: the number of random vectors, k by default.
        iK: (*, m, m), the preconditioner, near the inverse of A for the smallest eigenvalues.
        niter: the most steps, 1000 by default. -1 stands for no limit.
        tol: stops where all k residuals are at most tol * (|A| + |L| |B|) * |x|, with Frobenius norms over √m. The
            default is the square root of eps.
        largest: whether the largest eigenvalues are wanted, the default.
        method: "basic" or "ortho", which is checked and changes nothing.
        tracker, ortho_iparams, ortho_fparams, ortho_bparams: arguments with which PyTorch's function takes the call.

    Returns:
        L, (*, k), from the largest (or smallest) one on, and V, (*, m, k).

    Raises:
        ValueError: A has fewer than 3 n rows, or `method` is unknown.

    Source: Knyazev, "Toward the Optimal Preconditioned Eigensolver", 2001; Duersch, Shao, Yang and Gu, "A Robust and
        Efficient Implementation of LOBPCG", 2018.

    Example:
        >>> A = torch.diag(torch.arange(1.0, 31.0, device="mps"))
        >>> values, vectors = metalcore.lobpcg(A, 2)
        >>> values.round().tolist()
        [30.0, 29.0]
    """
    matrices = [tensor for tensor in (A, B, X, iK) if tensor is not None]
    more = tracker, ortho_iparams, ortho_fparams, ortho_bparams
    if (
        A is None
        or not all(value is None or type(value) is int and value > 0 for value in (k, n))
        or not (niter is None or type(niter) is int)
        or not (tol is None or type(tol) in (int, float))
        or not (largest is None or type(largest) is bool)
        or not accelerated(*matrices)
        or not all(tensor.ndim >= 2 for tensor in matrices)
        or not square(A)
        or not all(tensor is None or tensor.shape == A.shape for tensor in (B, iK))
        or X is not None
        and X.shape[:-1] != A.shape[:-1]
        or any(needs_gradient(tensor) for tensor in matrices)
        or any(value is not None for value in more)
        or method not in (None, "basic", "ortho")
    ):
        return by_torch(torch.lobpcg, A, k, B, X, n, iK, niter, tol, largest, method, *more)
    m = A.shape[-1]
    k = (1 if X is None else X.shape[-1]) if k is None else k
    n = X.shape[-1] if X is not None else k if n is None else n
    if m < 3 * n:
        raise ValueError(
            f"LPBPCG algorithm is not applicable when the number of A rows (={m}) is smaller than 3 x the number of "
            f"requested eigenpairs (={n})"
        )
    if X is None:
        X = torch.randn((*A.shape[:-2], m, n), dtype=torch.float32, device=A.device)
    tol = torch.finfo(A.dtype).eps ** 0.5 if tol is None else tol
    most = 1000 if niter is None else niter
    B, X, iK = (None if tensor is None else tensor.float() for tensor in (B, X, iK))
    search = without_autocast(lambda A: _search(A, B, X, iK, k, most, tol, largest is not False))
    values, vectors = in_float32(search, A.detach())
    return values, vectors


def _search(A, B, X, iK, k, most, tol, largest):
    X, norm = X.expand(*A.shape[:-2], *X.shape[-2:]), torch.linalg.vector_norm
    root = A.shape[-1] ** 0.5  # of the number of columns: these norms are those of A x and B x for random x
    norm_A = torch.linalg.matrix_norm(A).unsqueeze(-1) / root
    norm_B = 1.0 if B is None else torch.linalg.matrix_norm(B).unsqueeze(-1) / root
    values, X, P = _best(A, B, X, None, largest)
    step = 0
    while most < 0 or step < most:
        BX = X if B is None else B @ X
        R = A @ X - BX * values.unsqueeze(-2)
        if step % _STEPS_PER_CHECK == 0:
            bound = tol * (norm_A + values.abs() * norm_B) * norm(X, dim=-2)
            if not host_number((norm(R, dim=-2) > bound)[..., :k].any(), step < _MOST_WITHOUT_MEMORY):
                break
        W = R if iK is None else iK @ R
        W = W / norm(W, dim=-2, keepdim=True).clamp(min=torch.finfo(W.dtype).tiny)
        values, X, P = _best(A, B, X, W if P is None else torch.cat([W, P], -1), largest)
        step += 1
    return values[..., :k].contiguous(), X[..., :k].contiguous()


def _best(A, B, X, others, largest):
    """Returns the best eigenvalues and vectors in the space of X and the others, and the part of these vectors beside
    X."""
    n = X.shape[-1]
    Q, _ = qr(X if others is None else torch.cat([X, others], -1))
    Qt = Q.mT
    products = Qt @ (A @ Q)
    values, C = eigh(products, B=None if B is None else Qt @ (B @ Q))
    order = slice(-n, None) if largest else slice(None, n)
    values, C = values[..., order], C[..., order]
    if largest:
        values, C = values.flip(-1), C.flip(-1)
    if others is None:
        return values, Q @ C, None
    # The first n columns of Q are X's space.
    return values, Q @ C, Q[..., n:] @ C[..., n:, :]


def _by_eigh(A, k, **options):
    values, vectors = torch.linalg.eigh(A)
    return values.flip(-1)[..., :k], vectors.flip(-1)[..., :k]


def _unique(results):
    values, vectors = results
    return values, low_rank(vectors, values, vectors.mT)


def _with_three_large(a):
    """Returns matrices of which eight steps find the three largest eigenvalues from any vectors."""
    index = torch.arange(a.shape[-1]) - a.shape[-1] + 4
    return separated(a) + 2000.0 * torch.diag(index.clamp(min=0).float())


register(
    Op(
        "lobpcg",
        lobpcg,
        namesake="torch.lobpcg",
        reference=_by_eigh,
        results=_unique,
        operators=("eigh", "qr"),
        dtypes=frozenset({torch.float32}),  # 16 bits do not hold the residuals
        backward=False,
        waits=True,
        samples=lambda: (
            Sample(
                "40x40",
                ((2, 40, 40),),
                {"k": 3, "niter": 8, "tol": 1e-9},
                arguments=lambda a: (a + a.mT,),
                prepare=(_with_three_large,),
                terms=40**2,
            ),
        ),
    )
)
