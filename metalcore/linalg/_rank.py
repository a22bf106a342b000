"""The rank, the condition number and the Moore-Penrose inverse, which follow from the singular values."""

from __future__ import annotations

import torch

from .._core.operators import needs_gradient
from .._core.registry import Op, Sample, register
from .._core.routing import accelerated
from .._core.samples import separated, turned, well_conditioned
from ._common import NUMBERS, cast_out, in_float32, without_autocast
from ._eigh import _eigh
from ._pytorch import by_torch
from ._solve import inv_ex
from ._svd import _svd, svdvals

_INFINITY = float("inf")


def matrix_rank(
    A: torch.Tensor,
    tol: float | torch.Tensor | None = None,
    hermitian: bool = False,
    *,
    atol: float | torch.Tensor | None = None,
    rtol: float | torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Counts the singular values above max(atol, rtol * the largest), as torch.linalg.matrix_rank.

    Args:
        A: (*, m, n), as for `svdvals`.
        tol: as atol, with an rtol of 0.
        hermitian: whether A is symmetric or Hermitian. Then it counts magnitudes of eigenvalues, and reads only
            the lower triangle.
        atol, rtol: numbers, or tensors that broadcast with A's batch. Without both, atol is 0 and rtol
            is max(m, n) * eps of float32, also for the 16-bit dtypes. With only an atol above 0, rtol is 0.
        out: an integer tensor to write to.

    Returns:
        The ranks, int64, with A's batch. A matrix that holds NaN or infinity has rank 0.

    Raises:
        RuntimeError: A has fewer than two dimensions, or with `hermitian` its matrices are not square; a tolerance is
            complex; or `out` does not fit.

    Example:
        >>> metalcore.matrix_rank(torch.ones(3, 3, device="mps")).item()
        1
    """
    if type(hermitian) is not bool:
        return by_torch(
            torch.linalg.matrix_rank, A, hermitian=hermitian, **without_defaults(tol=tol, atol=atol, rtol=rtol, out=out)
        )
    tolerances = chosen_tolerances(A, tol, atol, rtol)
    if tolerances is None:
        return by_torch(
            torch.linalg.matrix_rank, A, **without_defaults(tol=tol, hermitian=hermitian, atol=atol, rtol=rtol, out=out)
        )

    def ranks():
        if A.numel() == 0:
            return A.new_zeros(A.shape[:-2], dtype=torch.int64)
        matrix = A.detach() if A.is_complex() else A.detach().float()
        if hermitian:
            values = _eigh(matrix, "L", False)[0].abs()
            return (values > threshold(values.amax(-1, keepdim=True), *tolerances)).sum(-1)
        values = _svd(matrix, False, False)[1]
        return (values > threshold(values[..., :1], *tolerances)).sum(-1)

    return cast_out("torch.linalg.matrix_rank", out, ranks, dtype=torch.int64)


def cond(A: torch.Tensor, p: float | str | None = None, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Computes the condition number of matrices, as torch.linalg.cond: the norm of A times that of its inverse.

    Args:
        A: (*, m, n), as for `svdvals`. Norms other than 2 and -2 need square matrices.
        p: the norm. None or 2 gives the largest singular value over the smallest, and -2 the reciprocal. "nuc" gives
            the sum of the singular values times the sum of their reciprocals. "fro", 1, -1, inf and -inf use the
            inverse.
        out: a tensor to write to.

    Returns:
        The condition numbers, with A's batch and dtype, float32 for complex64. Singular matrices have infinity,
        and empty ones have 0. They are differentiable.

    Raises:
        RuntimeError: the norm is unknown, A has fewer than two dimensions, its matrices are not square and the norm
            needs that, or `out` does not fit.

    Example:
        >>> round(metalcore.cond(torch.diag(torch.tensor([8.0, 2.0], device="mps"))).item(), 3)
        4.0
    """
    if not accelerated(A, dtypes=NUMBERS) or A.numel() == 0 or not _is_defined(A, p):
        return by_torch(torch.linalg.cond, A, p, out=out)
    return cast_out("linalg.cond", out, lambda: in_float32(lambda A: _condition(A, p), A), dtype=A.real.dtype)


def _is_defined(A, p):
    if A.dim() < 2 or p is not None and type(p) not in (str, int, float):
        return False
    return p in (None, 2, -2) or p in ("fro", "nuc", 1, -1, _INFINITY, -_INFINITY) and A.shape[-1] == A.shape[-2]


def _condition(A, p):
    if p in (None, 2, -2, "nuc"):
        values = svdvals(A)
        if p == "nuc":
            return values.sum(-1) * values.reciprocal().sum(-1)
        first, last = values[..., 0], values[..., -1]
        return last / first if p == -2 else first / last
    inverse, info = inv_ex(A)
    inverse = inverse.masked_fill((info > 0)[..., None, None], _INFINITY)
    product = torch.linalg.matrix_norm(A, p) * torch.linalg.matrix_norm(inverse, p)
    return product.nan_to_num(_INFINITY, _INFINITY, -_INFINITY)  # zero times infinity counts as infinity


def without_defaults(**arguments):
    """Returns the arguments that are neither None nor False. Few of torch's overloads take None."""
    return {name: value for name, value in arguments.items() if value is not None and value is not False}


def chosen_tolerances(A, both, atol, rtol):
    """Returns (atol, rtol) with PyTorch's defaults, or None if PyTorch's own function must take or refuse the call.

    both: PyTorch's older argument, which replaces the two and is returned as atol.
    """
    present = without_defaults(both=both, atol=atol, rtol=rtol)
    if "both" in present and len(present) > 1 or not accelerated(A, dtypes=NUMBERS) or A.dim() < 2:
        return None
    if not all(_is_tolerance(value, A) for value in present.values()):
        return None
    if both is not None:
        return both, 0.0
    if rtol is None:
        rtol = max(A.shape[-2:]) * torch.finfo(torch.float32).eps
        if isinstance(atol, torch.Tensor):
            rtol = torch.where(atol <= 0, rtol, 0.0)
        elif atol is not None and atol > 0:
            rtol = 0.0
    return 0.0 if atol is None else atol, rtol


def _is_tolerance(value, A):
    if isinstance(value, torch.Tensor):
        return value.device == A.device and not value.is_complex()
    return isinstance(value, (int, float))


def threshold(largest, atol, rtol):
    """Returns max(atol, rtol * largest), where `largest` is (*, 1) and the tolerances are numbers or tensors."""
    # A tensor without dimensions may be on the CPU. In a trace, the default rtol is such a tensor.
    atol, rtol = (x.unsqueeze(-1) if isinstance(x, torch.Tensor) and x.ndim else x for x in (atol, rtol))
    relative = rtol * largest
    if isinstance(atol, torch.Tensor):
        return torch.maximum(*torch.broadcast_tensors(atol.to(relative.dtype), relative))
    return relative.clamp(min=atol)


def _cond_by_torch(A, p=None):
    if p is None:
        return torch.linalg.cond(A)
    return torch.linalg.matrix_norm(A, p) * torch.linalg.matrix_norm(
        torch.linalg.inv(A), p
    )  # PyTorch's cond has no derivative here


def _with_rank_5(a):
    return separated(a) * (torch.arange(a.shape[-1]) < 5)


register(
    Op(
        "matrix_rank",
        matrix_rank,
        namesake="torch.linalg.matrix_rank",
        results=lambda rank: [rank.float()],
        operators=("eigh", "svd"),
        backward=False,
        samples=lambda: (
            Sample("20x12", ((3, 20, 12),), {"rtol": 0.01}, prepare=(_with_rank_5,)),
            Sample(
                "hermitian",
                ((3, 12, 12),),
                {"hermitian": True, "rtol": 0.01},
                arguments=lambda a: (a + a.mT,),
                prepare=(lambda a: _with_rank_5(_with_rank_5(a).mT),),
            ),
            Sample("complex", ((5, 20, 12),), {"rtol": 0.01}, prepare=(_with_rank_5,), arguments=turned),
        ),
    )
)
register(
    Op(
        "cond",
        cond,
        namesake="torch.linalg.cond",
        reference=_cond_by_torch,
        operators=("inv_ex", "svd"),
        samples=lambda: (
            *(
                Sample(name, ((3, 12, 12),), {"p": p}, prepare=(well_conditioned,), terms=12**2)
                for name, p in (("by singular values", None), ("by the inverse", 1))
            ),
            Sample("complex", ((5, 12, 12),), {"p": 1}, prepare=(well_conditioned,), terms=12**2, arguments=turned),
        ),
    )
)


def pinv(
    A: torch.Tensor,
    rcond: float | torch.Tensor | None = None,
    hermitian: bool = False,
    *,
    atol: float | torch.Tensor | None = None,
    rtol: float | torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes the pseudoinverse V diag(1 / S) Uᴴ of matrices, as torch.linalg.pinv. Singular values of at most
    max(atol, rtol * the largest) count as zero.

    Args:
        A: (*, m, n), as for `svd`.
        rcond: as rtol, with an atol of 0.
        hermitian: whether A is symmetric or Hermitian. Then it uses `eigh`, which reads the lower triangle.
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
        V, magnitudes = Vh.mH, values
        largest = values[..., :1]
    inverse = torch.where(magnitudes > threshold(largest, atol, rtol), values.reciprocal(), 0)
    return (V * inverse.unsqueeze(-2)) @ U.mH


class _Pinv(torch.autograd.Function):
    forward = staticmethod(_pinv)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0], output)

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]  (it has one output)
        A, P = ctx.saved_tensors
        wide = A.shape[-2] <= A.shape[-1]
        gradient = _gradient(A, P, grad) if wide else _gradient(A.mH, P.mH, grad.mH).mH
        return gradient.sum_to_size(A.shape), None, None, None  # tolerances may have more batches than A


@without_autocast
def _gradient(A, P, G):
    """Computes -Pᴴ G Pᴴ + (I - A P) Gᴴ P Pᴴ + Pᴴ P Gᴴ (I - P A). The order of the products is fast for m x n matrices
    with m <= n."""
    Gh, Ph = G.mH, P.mH
    K = Gh @ P
    KPh = K @ Ph
    return KPh - (P @ K).mH - (A @ P) @ KPh + (Ph @ P) @ (Gh - K @ A)


def by_pseudoinverse(A, B, grad, rcond):
    """Returns the gradients of X = pinv(A) B by A and B, where singular values of at most rcond times the largest are
    zeros."""
    P = _Pinv.apply(A, 0.0, rcond, False) if needs_gradient(A) else _pinv(A, 0.0, rcond, False)
    by_P = grad @ B.mH
    wide = A.shape[-2] <= A.shape[-1]
    by_A = _gradient(A, P, by_P) if wide else _gradient(A.mH, P.mH, by_P.mH).mH
    return by_A.sum_to_size(A.shape), (P.mH @ grad).sum_to_size(B.shape)


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
            Sample("complex", ((5, 20, 12),), prepare=(well_conditioned,), terms=20, arguments=turned),
        ),
    )
)
