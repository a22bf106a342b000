"""The LU factorization with partial pivoting, and solving with its factors."""

from __future__ import annotations

import torch

from .._core.operators import autograd, cpu_kernel, fake_kernel, ops
from .._core.registry import Op, Sample, register
from .._core.routing import accelerated
from .._core.samples import turned, well_conditioned
from .._core.tensors import beside
from ._common import NUMBERS, Tensors, complex_by_torch, in_float32, square, torch_is_faster, write_out
from ._pytorch import by_torch, checked, factored, factored_ex, override, takes, takes_square
from ._results import linalg_lu, linalg_lu_factor, linalg_lu_factor_ex
from ._triangular import solve_triangular

__all__ = ["lu", "lu_factor", "lu_factor_ex", "lu_solve"]

_transforms_active = torch._C._are_functorch_transforms_active


def lu_factor(A: torch.Tensor, *, pivot: bool = True, out: Tensors | None = None) -> linalg_lu_factor:
    """Computes a compact LU factorization with partial pivoting, as torch.linalg.lu_factor.

    A = P L U, where L is lower triangular with ones on its diagonal, U is upper triangular, and P is a permutation. The
    pivot of a column is its first entry of largest magnitude, as in LAPACK's getrf. A thread, a simdgroup or a
    threadgroup factors a small matrix in registers. Large matrices take right-looking panels (Golub and Van Loan,
    Matrix Computations, 3.4 and 3.6). `metalcore.explain("lu_factor", A.shape)` tells which kernels a call runs.

    Args:
        A: (*, m, n), any strides. float32 or complex64; float16 and bfloat16 are computed in float32, and LU cast back.
            Other input
            goes to PyTorch's op.
        pivot: False uses the diagonal's entries as pivots. LU then has inf or nan if one of them is zero.
        out: a pair of tensors to write LU and pivots to.

    Returns:
        A torch.return_types.linalg_lu_factor: the named tuple (LU, pivots). LU (*, m, n) has L below its diagonal,
        without the ones, and U. pivots (*, min(m, n)), int32, says that row i was exchanged with row pivots[i] - 1.

    Raises:
        RuntimeError: U has a zero on its diagonal, A has fewer than two dimensions, or `out` does not fit. The check
            waits for the result; lu_factor_ex does not.

    Example:
        >>> LU, pivots = metalcore.lu_factor(torch.tensor([[1.0, 2.0], [4.0, 4.0]], device="mps"))
        >>> pivots.tolist()
        [2, 2]
    """
    if torch_is_faster("lu_factor", (), A) or not _takes(A) or type(pivot) is not bool:
        return by_torch(torch.linalg.lu_factor, A, pivot=pivot, out=out)
    return factored(linalg_lu_factor, lambda: _factor(A, pivot), A, out, A)


def lu_factor_ex(
    A: torch.Tensor, *, pivot: bool = True, check_errors: bool = False, out: Tensors | None = None
) -> linalg_lu_factor_ex:
    """Computes `lu_factor` and reports zeros on U's diagonal in `info` instead of raising, as
    torch.linalg.lu_factor_ex.

    Args:
        A, pivot: as for lu_factor.
        check_errors: whether to raise an error too, which waits for the result.
        out: three tensors to write LU, pivots and info to.

    Returns:
        A torch.return_types.linalg_lu_factor_ex: the named tuple (LU, pivots, info). info (*), int32: 0, or the 1-based
        index of the first zero on U's diagonal. The factorization is complete in both cases.

    Raises:
        RuntimeError: as lu_factor.

    Example:
        >>> LU, pivots, info = metalcore.lu_factor_ex(torch.zeros(2, 2, device="mps"))
        >>> info.item()  # the first zero on U's diagonal
        1
    """
    if torch_is_faster("lu_factor", (), A) or not _takes(A) or not type(pivot) is type(check_errors) is bool:
        return by_torch(torch.linalg.lu_factor_ex, A, pivot=pivot, check_errors=check_errors, out=out)
    return factored_ex(linalg_lu_factor_ex, lambda: _factor(A, pivot), A, check_errors, out, A)


def lu(A: torch.Tensor, *, pivot: bool = True, out: Tensors | None = None) -> linalg_lu:
    """Computes the LU decomposition A = P L U with partial pivoting, as torch.linalg.lu. The algorithms are those of
    lu_factor.

    Args:
        A, pivot: as for lu_factor. Singular matrices have a decomposition too.
        out: three tensors to write P, L and U to.

    Returns:
        A torch.return_types.linalg_lu: the named tuple (P, L, U). With k = min(m, n): P (*, m, m), a permutation (empty
        without `pivot`); L (*, m, k), lower triangular with ones on its diagonal; U (*, k, n), upper triangular.
        Gradients of any order, where the first k columns have full rank.

    Raises:
        RuntimeError: A has fewer than two dimensions, or `out` does not fit.

    Example:
        >>> P, L, U = metalcore.lu(torch.tensor([[1.0, 2.0], [4.0, 4.0]], device="mps"))
        >>> U.tolist()
        [[4.0, 4.0], [0.0, 1.0]]
    """
    if not _takes(A) or type(pivot) is not bool or complex_by_torch("lu", ("pivot", pivot), A):
        return by_torch(torch.linalg.lu, A, pivot=pivot, out=out)
    results = write_out("linalg_lu", out, lambda: in_float32(lambda A: _lu(A, pivot), A), A)
    return linalg_lu(tuple(results))


def lu_solve(
    LU: torch.Tensor,
    pivots: torch.Tensor,
    B: torch.Tensor,
    *,
    left: bool = True,
    adjoint: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Solves A X = B (or X A = B) for X, with the A that `lu_factor` has factored, as torch.linalg.lu_solve.

    Args:
        LU: (*, n, n), as lu_factor returns it: float32, complex64, float16 or bfloat16. Other input goes to PyTorch's
            op.
        pivots: (*, n), int32, of LU's batch, from 1 to n.
        B: (*, n, k), or (*, k, n) without `left`, of LU's dtype. The batches of LU and B broadcast.
        left: whether A stands on the left of X.
        adjoint: whether to solve with Aᴴ in the place of A.
        out: a tensor to write X to.

    Returns:
        X, of B's shape with the batches broadcast. It has inf and nan if A is singular, and is nan if a pivot is not
        from 1 to n. PyTorch raises an error for such pivots on the CPU, but that would have to wait for the GPU.

    Raises:
        RuntimeError: shapes or dtypes do not fit. The messages are PyTorch's.

    Example:
        >>> LU, pivots = metalcore.lu_factor(torch.tensor([[1.0, 2.0], [4.0, 4.0]], device="mps"))
        >>> metalcore.lu_solve(LU, pivots, torch.tensor([[3.0], [8.0]], device="mps")).tolist()
        [[1.0], [1.0]]
    """
    if (
        torch_is_faster("lu_solve", ("left", left), LU, pivots, B)
        or not type(left) is type(adjoint) is bool
        or not _solvable(LU, pivots, B, left)
    ):
        if _transforms_active() and _shapes_fit(LU, pivots, B, left):
            LU, B = one_batch(LU, B)  # PyTorch's rule for vmap takes pivots of other matrices where batches broadcast
            pivots = pivots.expand(LU.shape[:-1])
        return by_torch(torch.linalg.lu_solve, LU, pivots, B, left=left, adjoint=adjoint, out=out)

    def solve(LU, B):
        LU, B = one_batch(LU, B)
        return _lu_solve(LU, pivots.expand(LU.shape[:-1]), B, left, adjoint)

    return write_out("linalg_lu_solve", out, lambda: in_float32(solve, LU, B), LU, B)


def _takes(A):
    return accelerated(A, dtypes=NUMBERS) and A.ndim >= 2


def _solvable(LU, pivots, B, left):
    """Returns whether the operator takes these. PyTorch's op raises the errors for others."""
    return (
        B is not None
        and accelerated(LU, B, dtypes=NUMBERS)
        and LU.dtype == B.dtype
        and _shapes_fit(LU, pivots, B, left)
        and pivots.device == LU.device
        and pivots.dtype is torch.int32
    )


def _shapes_fit(LU, pivots, B, left):
    return (
        all(isinstance(tensor, torch.Tensor) for tensor in (LU, pivots, B))
        and square(LU)
        and B.ndim >= 2
        and pivots.shape == LU.shape[:-1]
        and B.shape[-2 if left else -1] == LU.shape[-1]
        and broadcastable(LU, B)
    )


def broadcastable(A, B):
    """Returns whether the batches of two tensors of matrices broadcast."""
    return all(a == b or a == 1 or b == 1 for a, b in zip(A.shape[-3::-1], B.shape[-3::-1]))


def one_batch(A, B):
    """Returns two tensors of matrices with their batches broadcast."""
    if A.shape[:-2] == B.shape[:-2]:
        return A, B
    batch = torch.broadcast_shapes(A.shape[:-2], B.shape[:-2])
    return A.expand(*batch, *A.shape[-2:]), B.expand(*batch, *B.shape[-2:])


def _factor(A, pivot):
    return in_float32(lambda A: _lu_factor_ex(A, pivot), A)


@cpu_kernel("lu_factor_ex")
def _(A, pivot):
    LU, pivots, info = torch.linalg.lu_factor_ex(A, pivot=pivot)
    return LU.contiguous(), pivots.contiguous(), info


@fake_kernel("lu_factor_ex")
def _(A, pivot):
    *batch, m, n = A.shape
    integers = {"dtype": torch.int32}
    return A.new_empty(A.shape), A.new_empty([*batch, min(m, n)], **integers), A.new_empty(batch, **integers)


@cpu_kernel("lu")
def _(A, pivot):
    return tuple(part.contiguous() for part in torch.linalg.lu(A, pivot=pivot))


@fake_kernel("lu")
def _(A, pivot):
    *batch, m, n = A.shape
    k = min(m, n)
    return A.new_empty([*batch, m, m] if pivot else [0]), A.new_empty([*batch, m, k]), A.new_empty([*batch, k, n])


@cpu_kernel("lu_solve")
def _(LU, pivots, B, left, adjoint):
    return torch.linalg.lu_solve(LU, pivots, B, left=left, adjoint=adjoint).contiguous()


@fake_kernel("lu_solve")
def _(LU, pivots, B, left, adjoint):
    return B.new_empty(B.shape)


def _gradient(P, L, U, grad_L, grad_U):
    """Returns the gradient of A = P L U. With k = min(m, n), L is (L1, L2) by rows, U is (U1, U2) by columns, and L1
    and U1 are k x k:

        M = tril(L1ᴴ grad_L1 - grad_U2 U2ᴴ, -1) + triu(grad_U1 U1ᴴ - L2ᴴ grad_L2),   grad_A1 = P L1⁻ᴴ M U1⁻ᴴ

    The square case is that of de Hoog, Anderssen and Lukas (2011). The rows below L1 follow from L2 = A2 U1⁻¹, and the
    columns beside U1 from U2 = L1⁻¹ A2. The subtracted terms are their parts of M.
    """
    m, k, n = L.shape[-2], L.shape[-1], U.shape[-1]
    L1, U1 = L[..., :k, :], U[..., :k]
    lower = upper = torch.zeros_like(L1)
    right = below = None
    # A slice of all is an alias, which autograd's is_grads_batched does not know; narrow() is none.
    if grad_L is not None:
        lower = L1.mH @ grad_L.narrow(-2, 0, k)
        if m > k:
            upper = -(L[..., k:, :].mH @ grad_L[..., k:, :])
            below = solve_triangular(U1.mH, grad_L[..., k:, :], upper=False, left=False)
    if grad_U is not None:
        upper = upper + grad_U.narrow(-1, 0, k) @ U1.mH
        if n > k:
            lower = lower - grad_U[..., k:] @ U[..., k:].mH
            right = solve_triangular(L1.mH, grad_U[..., k:], upper=True, unitriangular=True)
    middle = solve_triangular(U1.mH, lower.tril(-1) + upper.triu(), upper=False, left=False)
    grad = solve_triangular(L1.mH, middle, upper=True, unitriangular=True)
    if n > k:
        grad = torch.cat([grad, torch.zeros_like(U[..., k:]) if right is None else right], dim=-1)
    if m > k:
        grad = torch.cat([grad, torch.zeros_like(L[..., k:, :]) if below is None else below], dim=-2)
    return grad if P is None else P @ grad


def _factor_save(ctx, inputs, output):
    LU, pivots, info = output
    ctx.pivot = inputs[1]
    ctx.mark_non_differentiable(pivots, info)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(LU, pivots)


def _factor_backward(ctx, grad, *_):
    if grad is None:
        return None, None
    LU, pivots = ctx.saved_tensors
    m, n = LU.shape[-2:]
    k = min(m, n)
    P = torch.lu_unpack(LU.detach(), pivots, unpack_data=False)[0] if ctx.pivot else None
    L = LU[..., :k].tril(-1) + beside(LU, torch.eye(m, k, dtype=LU.dtype, device=LU.device))
    return _gradient(P, L, LU[..., :k, :].triu(), grad.narrow(-1, 0, k), grad.narrow(-2, 0, k)), None


_lu_factor_ex = autograd("lu_factor_ex", _factor_backward, _factor_save)


def _lu_save(ctx, inputs, output):
    ctx.pivot = inputs[1]
    ctx.mark_non_differentiable(output[0])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output)


def _lu_backward(ctx, _, grad_L, grad_U):
    if grad_L is None and grad_U is None:
        return None, None
    P, L, U = ctx.saved_tensors
    return _gradient(P if ctx.pivot else None, L, U, grad_L, grad_U), None


_lu = autograd("lu", _lu_backward, _lu_save)


def _solve_save(ctx, inputs, output):
    LU, pivots, _, *ctx.flags = inputs
    ctx.save_for_backward(LU, pivots, output)


def _solve_backward(ctx, grad):
    """Returns grad_B = A⁻ᴴ grad and grad_A = -grad_B Xᴴ. The gradient of LU in A = P L U is Pᵀ grad_A Uᴴ below the
    diagonal, and Lᴴ Pᵀ grad_A on and above it. Transposition gives the cases X A = B and Aᴴ this form."""
    LU, pivots, X = ctx.saved_tensors
    left, adjoint = ctx.flags
    needs_LU, _, needs_B, *_ = ctx.needs_input_grad
    grad_B = ops.lu_solve(LU, pivots, grad, left, not adjoint)
    grad_LU = None
    if needs_LU:
        identity = beside(LU, torch.eye(LU.shape[-1], dtype=LU.dtype, device=LU.device))
        U, L = LU.triu(), LU.tril(-1) + identity
        valid_pivots = pivots.clamp(1, LU.shape[-1])  # lu_unpack checks nothing; for invalid pivots grad_B is nan
        P = torch.lu_unpack(LU.detach(), valid_pivots, unpack_data=False)[0]
        outer, inner = (grad_B, X) if left else (grad_B.mH, X.mH)
        if adjoint == left:
            outer, inner = inner, outer
        outer = P.mH @ outer
        grad_LU = -(outer @ (U @ inner).mH).tril(-1) - ((L.mH @ outer) @ inner.mH).triu()
    return grad_LU, None, grad_B if needs_B else None, None, None


_lu_solve = autograd("lu_solve", _solve_backward, _solve_save)


# Overrides of PyTorch's kernels


def _override_factor(A, *, pivot=True, check_errors=False):
    if takes(A):
        return checked(ops.lu_factor_ex(A, pivot), "torch.linalg.lu_factor_ex", check_errors, A)


def _override_solve(LU, pivots, B, *, left=True, adjoint=False):
    if takes_square(LU, B) and broadcastable(LU, B) and LU.shape[-1] == B.shape[-2 if left else -1]:
        LU, B = one_batch(LU, B)
        return ops.lu_solve(LU, pivots.expand(LU.shape[:-1]), B, left, adjoint)


def _samples():
    return (
        *(
            Sample(f"{m}x{n}", ((batch, m, n),), prepare=(well_conditioned,), terms=max(m, n))
            for batch, m, n in ((40, 3, 3), (7, 16, 12), (3, 20, 30), (3, 100, 60), (1, 200, 200))
        ),
        Sample("complex", ((3, 40, 30),), prepare=(well_conditioned,), arguments=turned, terms=40),
    )


def _samples_of_factors():
    def arguments(LU, B):
        """Returns pivots that exchange no rows, so that no result depends on a factorization."""
        return LU, torch.arange(1, LU.shape[-1] + 1, dtype=torch.int32, device=LU.device).expand(LU.shape[:-1]), B

    return tuple(
        Sample(
            f"{n}x{n}",
            ((batch, n, n), (batch, n, 5)),
            {"adjoint": adjoint},
            arguments=arguments,
            prepare=(well_conditioned,),
            terms=n,
        )
        for batch, n, adjoint in ((3, 20, False), (3, 60, True), (1, 170, False))
    )


register(Op("lu", lu, namesake="torch.linalg.lu", operators=("lu", "solve_triangular"), samples=_samples))
register(
    Op(
        "lu_factor",
        lu_factor,
        namesake="torch.linalg.lu_factor",
        operators=("lu_factor_ex", "solve_triangular", "info_any"),
        override=(override("linalg_lu_factor_ex", _override_factor),),
        waits=True,
        samples=_samples,
    )
)
register(
    Op(
        "lu_factor_ex",
        lu_factor_ex,
        namesake="torch.linalg.lu_factor_ex",
        operators=("lu_factor_ex", "solve_triangular"),
        samples=_samples,
    )
)
register(
    Op(
        "lu_solve",
        lu_solve,
        namesake="torch.linalg.lu_solve",
        operators=("lu_solve",),
        integers={"pivots": torch.int32},
        override=(override("linalg_lu_solve", _override_solve),),
        samples=_samples_of_factors,
    )
)
