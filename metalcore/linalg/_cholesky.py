"""The Cholesky factorization, and systems solved with it."""

from __future__ import annotations

import torch

from .._core.operators import autograd, cpu_kernel, fake_kernel, ops
from .._core.registry import Op, Sample, register
from .._core.routing import accelerated
from .._core.samples import positive_definite, turned, well_conditioned
from ._common import NUMBERS, Tensors, cast_out, in_float32, raise_errors, torch_is_faster, write_out
from ._pytorch import by_torch, checked, override, takes_square
from ._results import linalg_cholesky_ex
from ._triangular import solve_triangular


def cholesky(A: torch.Tensor, *, upper: bool = False, out: torch.Tensor | None = None) -> torch.Tensor:
    """Computes the Cholesky factorization A = L Lᴴ of Hermitian positive-definite matrices, as torch.linalg.cholesky.

    It waits for the device, to check that every matrix is positive-definite. `cholesky_ex` does not wait.

    Args:
        A: (*, n, n), any strides. It reads only the lower triangle, or with `upper` the upper one. float32 or
            complex64; float16 and bfloat16 are computed in float32, and the factor is cast back. Other input goes to
            PyTorch's op.
        upper: whether to return U = Lᴴ, so that A = Uᴴ U.
        out: a tensor to write the factor to.

    Returns:
        L (*, n, n), with exact zeros above its diagonal. It has gradients of any order.

    Raises:
        torch.linalg.LinAlgError: a matrix is not positive-definite. The message names the batch entry.
        RuntimeError: the matrices are not square, or `out` does not fit.

    Example:
        >>> A = torch.tensor([[4.0, 2.0], [2.0, 2.0]], device="mps")
        >>> metalcore.cholesky(A).tolist()
        [[2.0, 0.0], [1.0, 1.0]]
    """
    if (
        torch_is_faster("cholesky", ("upper", upper), A)
        or not accelerated(A, dtypes=NUMBERS)
        or type(upper) is not bool
    ):
        return by_torch(torch.linalg.cholesky, A, upper=upper, out=out)

    def factor():
        L, info = _factor(A, upper)
        raise_errors(info, "linalg.cholesky", A)
        return L

    return write_out("linalg_cholesky", out, factor, A)


def cholesky_ex(
    A: torch.Tensor, *, upper: bool = False, check_errors: bool = False, out: Tensors | None = None
) -> linalg_cholesky_ex:
    """Computes `cholesky` and reports failures in `info` instead of raising, as torch.linalg.cholesky_ex.

    A simdgroup factors a matrix of up to 32 columns in registers, and a threadgroup a larger one. The largest matrices
    take panels (LAPACK's right-looking potrf). `metalcore.explain("cholesky_ex", A.shape)` tells which kernels a call
    runs.

    Args:
        A, upper: as in `cholesky`.
        check_errors: whether to raise an error too, which waits for the result.
        out: a pair of tensors to write L and info to.

    Returns:
        A torch.return_types.linalg_cholesky_ex: the named tuple (L, info). info (*), int32, is 0, or the order k of the
        first leading minor that is not positive-definite. A NaN or an infinite pivot counts as a failure too. Then the
        leading k - 1 rows and columns of L are the factor of A's. The other entries of its lower triangle are
        unspecified, but finite where A is finite.

    Raises:
        RuntimeError: as in `cholesky`.

    Example:
        >>> L, info = metalcore.cholesky_ex(-torch.eye(2, device="mps"))
        >>> info.item()  # the first leading minor that is not positive
        1
    """
    if (
        torch_is_faster("cholesky", ("upper", upper), A)
        or not accelerated(A, dtypes=NUMBERS)
        or not type(upper) is type(check_errors) is bool
    ):
        return by_torch(torch.linalg.cholesky_ex, A, upper=upper, check_errors=check_errors, out=out)

    def factor():
        L, info = _factor(A, upper)
        if check_errors:
            raise_errors(info, "linalg.cholesky_ex", A)
        return L, info

    return linalg_cholesky_ex(tuple(write_out("linalg_cholesky_ex", out, factor, A)))


def cholesky_solve(
    B: torch.Tensor, L: torch.Tensor, upper: bool = False, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Solves A X = B for X, from the factor L of A = L Lᴴ, as torch.cholesky_solve.

    Args:
        B: (*, n, k), any strides.
        L: (*, n, n), any strides, with dtypes as in `cholesky`. It reads the lower triangle. With `upper` it reads the
            upper one, and A = Lᴴ L. The batches of B and L broadcast.
        upper: whether L is an upper triangular factor.
        out: a tensor to write X to.

    Returns:
        X (*, n, k). It has gradients of any order. The gradient of L is PyTorch's, which is not triangular.

    Raises:
        RuntimeError: shapes do not fit each other, or `out` does not fit.

    Example:
        >>> L = torch.tensor([[2.0, 0.0], [1.0, 1.0]], device="mps")
        >>> metalcore.cholesky_solve(torch.tensor([[8.0], [6.0]], device="mps"), L).tolist()
        [[1.0], [2.0]]
    """
    if L is None or not accelerated(B, L, dtypes=NUMBERS) or B.dtype != L.dtype or type(upper) is not bool:
        return by_torch(torch.cholesky_solve, B, L, upper, out=out)
    solve = lambda: in_float32(lambda B, L: ops.cholesky_solve(B, L, upper), B, L)  # noqa: E731
    return cast_out("cholesky_solve", out, solve, B, L, dtype=B.dtype)


def _factor(A, upper):
    return in_float32(lambda A: ops.cholesky_ex(A, upper), A)


@cpu_kernel("cholesky_ex")
def _(A, upper):
    L, info = torch.linalg.cholesky_ex(A, upper=upper)
    return L.contiguous(), info


@fake_kernel("cholesky_ex")
def _(A, upper):
    return A.new_empty(A.shape), A.new_empty(A.shape[:-2], dtype=torch.int32)


def _save_factor(ctx, inputs, output):
    ctx.upper = inputs[1]
    ctx.save_for_backward(output[0])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _factor_backward(ctx, grad_L, _):
    """Computes ½ L⁻ᴴ S L⁻¹, where S is Hermitian and has the lower triangle of P = Lᴴ grad_L (Murray 2016)."""
    if grad_L is None:
        return None, None
    (L,) = ctx.saved_tensors
    if ctx.upper:
        L, grad_L = L.mH, grad_L.mH
    P = L.mH @ grad_L
    symmetric = 0.5 * (P.tril() + P.tril(-1).mH)
    half_solved = solve_triangular(L.mH, symmetric, upper=True)
    return solve_triangular(L, half_solved, upper=False, left=False), None


autograd("cholesky_ex", _factor_backward, _save_factor)


@cpu_kernel("cholesky_solve")
def _(B, L, upper):
    return torch.cholesky_solve(B, L, upper).contiguous()


@fake_kernel("cholesky_solve")
def _(B, L, upper):
    batch = torch.broadcast_shapes(B.shape[:-2], L.shape[:-2])
    return B.new_empty([*batch, *B.shape[-2:]])


def _save_solution(ctx, inputs, output):
    ctx.upper = inputs[2]
    ctx.shapes = inputs[0].shape, inputs[1].shape
    ctx.save_for_backward(inputs[1], output)


def _solve_backward(ctx, grad_X):
    L, X = ctx.saved_tensors
    wants_B, wants_L, *_ = ctx.needs_input_grad
    grad_B = ops.cholesky_solve(grad_X, L, ctx.upper)
    grad_L = None
    if wants_L:
        product = grad_B @ X.mH
        symmetric = product + product.mH  # the symmetric part of -2 grad_A
        grad_L = (-L @ symmetric if ctx.upper else -symmetric @ L).sum_to_size(ctx.shapes[1])
    return grad_B.sum_to_size(ctx.shapes[0]) if wants_B else None, grad_L, None


autograd("cholesky_solve", _solve_backward, _save_solution)


# The override of PyTorch's kernel


def _override(A, *, upper=False, check_errors=False):
    if takes_square(A):
        return checked(ops.cholesky_ex(A, upper), "linalg.cholesky_ex", check_errors, A)


def _samples():
    square = [
        Sample(f"{n}x{n}", ((batch, n, n),), prepare=(positive_definite,), terms=n)
        for batch, n in ((40, 16), (3, 100), (1, 200))
    ]
    return (
        *square,
        Sample("upper", ((3, 40, 40),), {"upper": True}, prepare=(positive_definite,), terms=40),
        Sample("complex", ((3, 40, 40),), prepare=(positive_definite,), arguments=turned, terms=40),
    )


register(
    Op(
        "cholesky",
        cholesky,
        namesake="torch.linalg.cholesky",
        operators=("cholesky_ex", "solve_triangular"),
        override=(override("linalg_cholesky_ex", _override),),
        waits=True,
        samples=_samples,
    )
)
register(
    Op(
        "cholesky_ex",
        cholesky_ex,
        namesake="torch.linalg.cholesky_ex",
        operators=("cholesky_ex", "solve_triangular"),
        samples=_samples,
    )
)
register(
    Op(
        "cholesky_solve",
        cholesky_solve,
        namesake="torch.cholesky_solve",
        operators=("cholesky_solve",),
        samples=lambda: tuple(
            Sample(
                f"{n}x{n}",
                ((3, n, n), (3, n, 5)),
                {"upper": upper},
                arguments=lambda L, B: (B, L),
                prepare=(well_conditioned,),
                terms=n,
            )
            for n, upper in ((20, False), (100, True))
        ),
    )
)
