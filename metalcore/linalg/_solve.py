"""Systems of equations with a square matrix, and inverses."""

from __future__ import annotations

import torch

from .._core.operators import autograd, cpu_kernel, fake_kernel, ops
from .._core.registry import Op, Sample, register
from .._core.routing import accelerated
from .._core.samples import turned, well_conditioned
from ._common import NUMBERS, Tensors, complex_by_torch, in_float32, raise_errors, square, write_out
from ._lu import broadcastable, one_batch
from ._pytorch import by_torch, checked, factors_transpose, override, takes_square
from ._results import linalg_inv_ex, linalg_solve_ex

__all__ = ["inv", "inv_ex", "solve", "solve_ex"]

# For the gradient, systems up to this size are factored again: one kernel does that faster than factors can be kept.
_FACTORED_AGAIN = 32


def solve(A: torch.Tensor, B: torch.Tensor, *, left: bool = True, out: torch.Tensor | None = None) -> torch.Tensor:
    """Solves A X = B, or X A = B, for X, as torch.linalg.solve: by LU with partial pivoting (see `lu_factor`).

    Up to n = 32 one kernel factors A and solves for the columns of B. For larger n two triangular systems follow the
    factorization. `metalcore.explain("solve", A.shape, B.shape)` tells which kernels a call runs.

    Args:
        A: (*, n, n), any strides. float32 or complex64; float16 and bfloat16 are computed in float32, and X is cast
            back. Other input goes to PyTorch's op.
        B: (*, n, k), or (*, k, n) without `left`, of A's dtype. The batches of A and B broadcast. B may also be a
            vector (n,), or a batch of vectors whose shape is A.shape[:-1].
        left: whether A stands on the left of X. A vector needs that.
        out: a tensor to write X to.

    Returns:
        X, of B's shape with the batches broadcast. Gradients of any order.

    Raises:
        torch.linalg.LinAlgError: a matrix is singular. The message has its index in the batch. The check waits for the
            result; solve_ex does not.
        RuntimeError: shapes do not fit. The messages are PyTorch's.

    Example:
        >>> A, B = torch.tensor([[2.0, 0.0], [0.0, 4.0]], device="mps"), torch.ones(2, 1, device="mps")
        >>> metalcore.solve(A, B).tolist()
        [[0.5], [0.25]]
    """
    if not _takes(A, B, left):
        return by_torch(torch.linalg.solve, A, B, left=left, out=out)

    def call():
        X, info = _solve(A, B, left)
        raise_errors(info, "torch.linalg.solve", A)
        return X

    return write_out("linalg_solve", out, call, A, B)


def solve_ex(
    A: torch.Tensor,
    B: torch.Tensor,
    *,
    left: bool = True,
    check_errors: bool = False,
    out: Tensors | None = None,
) -> linalg_solve_ex:
    """Solves as `solve` does, and reports singular matrices in `info` instead of raising, as torch.linalg.solve_ex.

    Args:
        A, B, left: as for solve.
        check_errors: whether to raise an error too, which waits for the result.
        out: a pair of tensors to write X and info to.

    Returns:
        A torch.return_types.linalg_solve_ex: the named tuple (result, info). info, int32, has A's batch: it
        is 0, or the 1-based index of the first pivot that is zero. The result then has inf and nan.

    Raises:
        RuntimeError: as solve.

    Example:
        >>> X, info = metalcore.solve_ex(torch.zeros(2, 2, device="mps"), torch.ones(2, 1, device="mps"))
        >>> info.item()  # the first zero on U's diagonal
        1
    """
    if not _takes(A, B, left) or type(check_errors) is not bool:
        return by_torch(torch.linalg.solve_ex, A, B, left=left, check_errors=check_errors, out=out)

    def call():
        X, info = _solve(A, B, left)
        if check_errors:
            raise_errors(info, "torch.linalg.solve_ex", A)
        return X, info

    return linalg_solve_ex(tuple(write_out("linalg_solve_ex", out, call, A, B)))


def inv(A: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Computes inverses, as torch.linalg.inv: the solutions of A X = I by LU with partial pivoting (see solve).

    Args:
        A: (*, n, n), any strides. float32 or complex64; float16 and bfloat16 are computed in float32, and the inverse
            is cast back. Other input goes to PyTorch's op.
        out: a tensor to write the inverse to.

    Returns:
        The inverses, of A's shape. Gradients of any order.

    Raises:
        torch.linalg.LinAlgError: a matrix is singular. The message has its index in the batch. The check waits for the
            result; inv_ex does not.
        RuntimeError: the matrices are not square. The message is PyTorch's.

    Example:
        >>> metalcore.inv(torch.tensor([[2.0, 0.0], [0.0, 4.0]], device="mps")).tolist()
        [[0.5, 0.0], [0.0, 0.25]]
    """
    if not _takes_alone(A):
        return by_torch(torch.linalg.inv, A, out=out)

    def call():
        inverse, info = in_float32(_inv_ex, A)
        raise_errors(info, "linalg.inv", A)
        return inverse

    return write_out("linalg_inv", out, call, A)


def inv_ex(A: torch.Tensor, *, check_errors: bool = False, out: Tensors | None = None) -> linalg_inv_ex:
    """Computes inverses as `inv` does, and reports singular matrices in `info` instead of raising, as
    torch.linalg.inv_ex.

    Args:
        A: as for inv.
        check_errors: whether to raise an error too, which waits for the result.
        out: a pair of tensors to write the inverse and info to.

    Returns:
        A torch.return_types.linalg_inv_ex: the named tuple (inverse, info). info (*), int32, is 0, or the 1-based index
        of the first pivot that is zero. The inverse then has inf and nan.

    Raises:
        RuntimeError: as inv.

    Example:
        >>> inverse, info = metalcore.inv_ex(torch.zeros(2, 2, device="mps"))
        >>> info.item()  # the first zero on U's diagonal
        1
    """
    if not _takes_alone(A) or type(check_errors) is not bool:
        return by_torch(torch.linalg.inv_ex, A, check_errors=check_errors, out=out)

    def call():
        inverse, info = in_float32(_inv_ex, A)
        if check_errors:
            raise_errors(info, "linalg.inv_ex", A)
        return inverse, info

    return linalg_inv_ex(tuple(write_out("linalg_inv_ex", out, call, A)))


def _takes_alone(A):
    return accelerated(A, dtypes=NUMBERS) and square(A) and not complex_by_torch("lu_factor", (), A)


def _is_vector(A, B):
    """Returns whether B is one vector for all matrices of A, or one for each, by PyTorch's rule."""
    return B.ndim == 1 or A.ndim - 1 == B.ndim and B.shape == A.shape[:-1]


def _takes(A, B, left):
    """Returns whether the operator takes these. PyTorch's op raises the errors for others."""
    if (
        B is None
        or not accelerated(A, B, dtypes=NUMBERS)
        or A.dtype != B.dtype
        or not square(A)
        or B.ndim < 1
        or type(left) is not bool
        or complex_by_torch("lu_factor", (), A)
    ):
        return False
    if _is_vector(A, B):
        return left and B.shape[-1] == A.shape[-1]
    return B.shape[-2 if left else -1] == A.shape[-1] and broadcastable(A, B)


def _solve(A, B, left):
    vector = _is_vector(A, B)
    own_batch = A.shape[:-2]

    def call(A, B):
        if vector:
            B = B.unsqueeze(-1)
        A, B = one_batch(A, B)
        X, _, _, info = _solve_ex(A, B, left, _keeps_factors(A, B))
        return X.squeeze(-1) if vector else X, _info_of_batch(info, own_batch)

    return in_float32(call, A, B)


def _info_of_batch(info, batch):
    """Returns the info of A's own matrices. Broadcasting copies a matrix, and all copies have the same info."""
    if info.shape == batch:
        return info
    if info.numel() == 0:
        return info.new_zeros(batch)
    info = info[(0,) * (info.ndim - len(batch))]
    return info[tuple(slice(size) for size in batch)].contiguous()


def _keeps_factors(A, B):
    return A.shape[-1] > _FACTORED_AGAIN and torch.is_grad_enabled() and (A.requires_grad or B.requires_grad)


@cpu_kernel("solve_ex")
def _(A, B, left, factors):
    LU, pivots, info = torch.linalg.lu_factor_ex(A if left else A.mT)
    X = torch.linalg.lu_solve(LU, pivots, B if left else B.conj(), left=left, adjoint=not left)
    X = X if left else X.conj().resolve_conj()
    kept = (LU.contiguous(), pivots.contiguous()) if factors else (A.new_empty(0), pivots.new_empty(0))
    return X.contiguous(), *kept, info


@fake_kernel("solve_ex")
def _(A, B, left, factors):
    LU, pivots = (A.shape, A.shape[:-1]) if factors else ([0], [0])
    integers = {"dtype": torch.int32}
    return B.new_empty(B.shape), A.new_empty(LU), A.new_empty(pivots, **integers), A.new_empty(A.shape[:-2], **integers)


def _solve_save(ctx, inputs, output):
    A, _, ctx.left, ctx.factors = inputs
    X, LU, pivots, info = output
    ctx.mark_non_differentiable(LU, pivots, info)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(A, X, LU, pivots)


def _solve_backward(ctx, grad, *_):
    """Returns the gradients. For A X = B, grad_B = A⁻ᴴ grad and grad_A = -grad_B Xᴴ. For X A = B, grad_B = grad A⁻ᴴ
    and grad_A = -Xᴴ grad_B."""
    if grad is None:
        return (None,) * 4
    A, X, LU, pivots = ctx.saved_tensors
    left = ctx.left
    needs_A, needs_B, *_ = ctx.needs_input_grad
    if ctx.factors and not torch.is_grad_enabled():
        # Without `left` the factors are those of Aᵀ, and X Aᴴ = grad is X* Aᵀ = grad*.
        grad_B = ops.lu_solve(LU, pivots, grad if left else grad.conj(), left, left)
        grad_B = grad_B if left else grad_B.conj()
    else:
        grad_B = ops.solve_ex(A.mH, grad, left, _keeps_factors(A, grad))[0]
    grad_A = None
    if needs_A:
        grad_A = -(grad_B @ X.mH if left else X.mH @ grad_B)
    return grad_A, grad_B if needs_B else None, None, None


_solve_ex = autograd("solve_ex", _solve_backward, _solve_save)


@cpu_kernel("inv_ex")
def _(A):
    inverse, info = torch.linalg.inv_ex(A)
    return inverse.contiguous(), info


@fake_kernel("inv_ex")
def _(A):
    return A.new_empty(A.shape), A.new_empty(A.shape[:-2], dtype=torch.int32)


def _inv_save(ctx, inputs, output):
    inverse, info = output
    ctx.mark_non_differentiable(info)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(inverse)


def _inv_backward(ctx, grad, _):
    if grad is None:
        return None
    transposed = ctx.saved_tensors[0].mH
    return -(transposed @ (grad @ transposed))


_inv_ex = autograd("inv_ex", _inv_backward, _inv_save)


# Overrides of PyTorch's kernels


def _override(A, B, *, left=True, check_errors=False):
    is_vector = B.dim() == 1 or B.shape == A.shape[:-1]
    columns = B.unsqueeze(-1) if is_vector else B
    if not (
        takes_square(A, columns)
        and A.shape[:-2] == columns.shape[:-2]
        and (left or not is_vector)
        and A.shape[-1] == columns.shape[-2 if left else -1]
    ):
        return None
    transpose = factors_transpose(torch.ops.aten._linalg_solve_ex, arguments=2) and A.is_contiguous()
    if left and not transpose:
        X, LU, pivots, info = ops.solve_ex(A, columns, True, True)
    else:
        LU, pivots, info = ops.lu_factor_ex(A.mT if transpose else A, True)
        X = ops.lu_solve(LU, pivots, columns, left, transpose)
    return checked((X.squeeze(-1) if is_vector else X, LU, pivots, info), "torch.linalg.solve_ex", check_errors, A)


def _override_inv(A, *, check_errors=False):
    return checked(ops.inv_ex(A), "linalg.inv_ex", check_errors, A) if takes_square(A) else None


def _samples():
    return (
        *(
            Sample(f"{n}x{n}", ((batch, n, n), (batch, n, 5)), prepare=(well_conditioned,), terms=n)
            # The largest has a batch of one: for batches with 150 rows and more, PyTorch 2.13's own results on a CPU
            # are wrong, because of oneMKL's DLASWP.
            for batch, n in ((40, 3), (3, 12), (3, 60), (1, 170))
        ),
        Sample("from the right", ((3, 20, 20), (3, 5, 20)), {"left": False}, prepare=(well_conditioned,), terms=20),
        Sample("complex", ((3, 20, 20), (3, 20, 5)), prepare=(well_conditioned,), arguments=turned, terms=20),
        Sample("vectors", ((3, 20, 20), (3, 20)), prepare=(well_conditioned,), terms=20),
    )


def _samples_of_inverse():
    return tuple(
        Sample(f"{n}x{n}", ((batch, n, n),), prepare=(well_conditioned,), terms=n)
        for batch, n in ((40, 3), (3, 20), (3, 60))
    )


register(
    Op(
        "solve",
        solve,
        namesake="torch.linalg.solve",
        operators=("solve_ex", "lu_solve", "info_any"),
        override=(override("_linalg_solve_ex", _override),),
        waits=True,
        samples=_samples,
    )
)
register(
    Op(
        "solve_ex",
        solve_ex,
        namesake="torch.linalg.solve_ex",
        operators=("solve_ex", "lu_solve"),
        samples=_samples,
    )
)
register(
    Op(
        "inv",
        inv,
        namesake="torch.linalg.inv",
        operators=("inv_ex", "info_any"),
        override=(override("linalg_inv_ex", _override_inv),),
        waits=True,
        samples=_samples_of_inverse,
    )
)
register(Op("inv_ex", inv_ex, namesake="torch.linalg.inv_ex", operators=("inv_ex",), samples=_samples_of_inverse))
