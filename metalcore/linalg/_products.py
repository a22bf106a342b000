"""Functions of torch.linalg that are products, solutions or singular values in other forms."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from .._core.registry import Op, Sample, register
from .._core.routing import accelerated
from .._core.samples import separated, turned, well_conditioned
from ._common import NUMBERS, cast_out, in_float32, square, without_autocast, write_out
from ._pytorch import by_torch
from ._solve import inv, solve
from ._svd import svdvals

__all__ = ["matrix_norm", "matrix_power", "multi_dot", "tensorinv", "tensorsolve", "vander"]


def matrix_power(A: torch.Tensor, n: int, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Computes the n-th power of square matrices, as torch.linalg.matrix_power: by repeated squaring, of the inverse
    where n is negative.

    Args:
        A: (*, m, m), any strides. float32 or complex64; float16 and bfloat16 are computed in float32, and the result is
            cast back. Other input goes to PyTorch's op.
        n: an integer.
        out: a tensor to write to.

    Returns:
        (*, m, m). Gradients of any order.

    Raises:
        torch.linalg.LinAlgError: n is negative, and a matrix is singular. The check waits for the result.
        RuntimeError: the matrices are not square, or `out` does not fit.

    Example:
        >>> metalcore.matrix_power(torch.tensor([[1.0, 1.0], [0.0, 1.0]], device="mps"), 5).tolist()
        [[1.0, 5.0], [0.0, 1.0]]
    """
    if type(n) is not int or not accelerated(A, dtypes=NUMBERS) or not square(A):
        return by_torch(torch.linalg.matrix_power, A, n, out=out)
    return write_out("linalg_matrix_power", out, lambda: in_float32(without_autocast(_power(n)), A), A)


def _power(n):
    def power(A):
        if n == 0:
            identity = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
            return torch.where(torch.ones_like(A, dtype=torch.bool), identity, A)  # its derivative is zero
        factor = inv(A) if n < 0 else A
        result = factor.clone()
        for bit in format(abs(n), "b")[1:]:  # from the second highest on
            result = result @ result
            if bit == "1":
                result = result @ factor
        return result

    return power


def multi_dot(tensors: Sequence[torch.Tensor], *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Multiplies two or more matrices in the order that takes the fewest operations, as torch.linalg.multi_dot, by
    PyTorch's matmul. float16 and bfloat16 are multiplied in float32, so that only the result is rounded to 16 bits.

    Args:
        tensors: matrices, of which the first and the last may be vectors.
        out: a tensor to write to.

    Returns:
        The product: a matrix, a vector or a number. Gradients of any order.

    Raises:
        RuntimeError: there are fewer than two tensors, or shapes, dtypes or `out` do not fit. The messages are
            PyTorch's.

    Example:
        >>> A, B, c = torch.ones(3, 4, device="mps"), torch.ones(4, 5, device="mps"), torch.ones(5, device="mps")
        >>> metalcore.multi_dot([A, B, c]).tolist()
        [20.0, 20.0, 20.0]
    """
    if (
        type(tensors) not in (list, tuple)
        or not tensors
        or not accelerated(*tensors, dtypes=NUMBERS)
        or len({tensor.dtype for tensor in tensors}) > 1
    ):
        return by_torch(torch.linalg.multi_dot, tensors, out=out)
    multiply = without_autocast(lambda *tensors: torch.linalg.multi_dot(tensors))
    return write_out("linalg_multi_dot", out, lambda: in_float32(multiply, *tensors), *tensors)


def vander(x: torch.Tensor, *, N: int | None = None) -> torch.Tensor:
    """Makes Vandermonde matrices, as torch.linalg.vander: the powers 0 to N - 1 of each number in a row.

    Args:
        x: (*, n). float32, complex64, or float16 and bfloat16, whose powers are computed in float32. Other input goes
            to PyTorch's op.
        N: the number of columns, which is n by default.

    Returns:
        (*, n, N). Gradients of any order.

    Raises:
        RuntimeError: N is less than 1, or x has no dimension. The messages are PyTorch's.

    Example:
        >>> metalcore.vander(torch.tensor([2.0, 3.0], device="mps"), N=3).tolist()
        [[1.0, 2.0, 4.0], [1.0, 3.0, 9.0]]
    """
    if not accelerated(x, dtypes=NUMBERS) or N is not None and type(N) is not int:
        return by_torch(torch.linalg.vander, x, N=N)
    return in_float32(lambda x: torch.linalg.vander(x, N=N), x)


def matrix_norm(
    A: torch.Tensor,
    ord: int | float | str = "fro",
    dim: tuple[int, int] = (-2, -1),
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes norms of matrices, as torch.linalg.matrix_norm. Orders 2, -2 and "nuc" are made of `svdvals`, and all
    others are PyTorch's.

    Args:
        A: (*, m, n), as for `svdvals`.
        ord: 2, -2 or "nuc" for the largest, the smallest or the sum of the singular values, "fro" for the Frobenius
            norm, inf, -inf, 1 or -1 for sums of rows or columns.
        dim: the two dimensions of the matrices.
        keepdim: whether these stay, with one element.
        dtype: the dtype that A is converted to first.
        out: a tensor to write to.

    Returns:
        The norms, with A's batch and real dtype. Gradients of any order where singular values are apart.

    Raises:
        RuntimeError, ValueError, IndexError: the order or a dimension is unknown, or `out` does not fit. The messages
            are PyTorch's.

    Example:
        >>> metalcore.matrix_norm(torch.diag(torch.tensor([3.0, 4.0], device="mps")), 2).item()
        4.0
    """
    if type(ord) not in (int, float, str) or ord not in (2, -2, "nuc") or type(keepdim) is not bool:
        return torch.linalg.matrix_norm(A, ord, dim, keepdim, dtype=dtype, out=out)
    if not accelerated(A, dtypes=NUMBERS) or not _is_pair_of_dims(dim, A, dtype):
        return by_torch(torch.linalg.matrix_norm, A, ord, dim, keepdim, dtype=dtype, out=out)

    def norm(A):
        values = svdvals(A.movedim(dim, (-2, -1)))
        value = values.sum(-1) if ord == "nuc" else values.amax(-1) if ord == 2 else values.amin(-1)
        for place in sorted(d % A.ndim for d in dim) if keepdim else ():
            value = value.unsqueeze(place)
        return value

    matrices = A if dtype is None else A.to(dtype)
    return write_out("linalg_matrix_norm", out, lambda: in_float32(norm, matrices), A)


def _is_pair_of_dims(dim, A, dtype):
    """Returns whether these are two different dimensions of matrices that have singular values."""
    if not isinstance(dim, (tuple, list)) or len(dim) != 2 or not all(type(d) is int for d in dim):
        return False
    first, second = dim
    return (
        (dtype is None or type(dtype) is torch.dtype and dtype in NUMBERS and (dtype.is_complex or not A.is_complex()))
        and all(-A.ndim <= d < A.ndim for d in dim)
        and first % A.ndim != second % A.ndim
        and A.shape[first] > 0
        and A.shape[second] > 0
    )


def tensorinv(A: torch.Tensor, ind: int = 2, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Computes the inverse of a tensor with respect to tensordot, as torch.linalg.tensorinv: `inv` of the matrix whose
    rows are the first `ind` dimensions.

    Args:
        A: the product of its first `ind` sizes is that of the others. dtypes as for `inv`.
        ind: the number of dimensions.
        out: a tensor to write to.

    Returns:
        A tensor of shape A.shape[ind:] + A.shape[:ind]. Gradients of any order.

    Raises:
        torch.linalg.LinAlgError: the matrix is singular. The check waits for the result.
        RuntimeError: `ind` or `out` does not fit. The messages are PyTorch's.

    Example:
        >>> metalcore.tensorinv(torch.eye(6, device="mps").reshape(2, 3, 6)).shape
        torch.Size([6, 2, 3])
    """
    if type(ind) is not int or ind <= 0 or not accelerated(A, dtypes=NUMBERS) or not _is_square_by(A, ind):
        return by_torch(torch.linalg.tensorinv, A, ind, out=out)

    def invert():
        rows = math.prod(A.shape[:ind])
        return inv(A.reshape(rows, rows)).reshape(A.shape[ind:] + A.shape[:ind])

    return cast_out("linalg.tensorinv", out, invert, A, dtype=A.dtype)


def tensorsolve(
    A: torch.Tensor, B: torch.Tensor, dims: Sequence[int] | None = None, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Solves tensordot(A, X, X.ndim) = B for X, as torch.linalg.tensorsolve: by `solve` with the matrix whose rows are
    the first B.ndim dimensions of A.

    Args:
        A: the product of its first B.ndim sizes is that of the others. dtypes as for `solve`.
        B: a tensor of as many elements, of A's dtype.
        dims: the dimensions of A that are moved to its end first.
        out: a tensor to write to.

    Returns:
        X, of shape A.shape[B.ndim:]. Gradients of any order.

    Raises:
        torch.linalg.LinAlgError: the matrix is singular. The check waits for the result.
        RuntimeError: shapes, `dims` or `out` do not fit. The messages are PyTorch's.

    Example:
        >>> A, B = torch.eye(6, device="mps").reshape(2, 3, 6), torch.ones(2, 3, device="mps")
        >>> metalcore.tensorsolve(A, B).tolist()
        [1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    """
    if B is None or not accelerated(A, B, dtypes=NUMBERS) or A.dtype != B.dtype or not _fits(dims, A):
        return by_torch(torch.linalg.tensorsolve, A, B, dims, out=out)
    moved = A if dims is None else A.movedim(tuple(dims), tuple(range(-len(dims), 0)))
    if not _is_square_by(moved, B.ndim) or B.numel() != math.prod(moved.shape[: B.ndim]):
        return by_torch(torch.linalg.tensorsolve, A, B, dims, out=out)

    def find():
        return solve(moved.reshape(B.numel(), B.numel()), B.flatten()).reshape(moved.shape[B.ndim :])

    return cast_out("linalg.tensorsolve", out, find, A, B, dtype=A.dtype)


def _is_square_by(A, ind):
    """Returns whether the first `ind` dimensions make as many rows as the others make columns."""
    return math.prod(A.shape[:ind]) == math.prod(A.shape[ind:])


def _fits(dims, A):
    """Returns whether `dims` are different dimensions of A."""
    if dims is None:
        return True
    if type(dims) not in (tuple, list):
        return False
    valid = all(type(d) is int and -A.ndim <= d < A.ndim for d in dims)
    return valid and len({d % A.ndim for d in dims}) == len(dims)


def _as_tensor(a):
    """Returns a matrix of 12 rows as a tensor of four dimensions."""
    return (a.reshape(3, 4, 2, 6),)


register(
    Op(
        "matrix_power",
        matrix_power,
        namesake="torch.linalg.matrix_power",
        operators=("inv_ex",),
        waits=True,
        samples=lambda: (
            Sample("fifth", ((8, 12, 12),), {"n": 5}, prepare=(lambda a: well_conditioned(a) / 3,), terms=5 * 12),
            Sample("inverse", ((7, 12, 12),), {"n": -3}, prepare=(well_conditioned,), terms=3 * 12**2),
            Sample("complex", ((9, 12, 12),), {"n": -2}, turned, prepare=(well_conditioned,), terms=2 * 12**2),
        ),
    )
)
register(
    Op(
        "multi_dot",
        multi_dot,
        namesake="torch.linalg.multi_dot",
        samples=lambda: (
            Sample("three", ((20, 30), (30, 5), (5, 8)), arguments=lambda *tensors: (tensors,), terms=150),
        ),
    )
)
register(
    Op("vander", vander, namesake="torch.linalg.vander", samples=lambda: (Sample("5 powers", ((3, 9),), {"N": 5}),))
)
register(
    Op(
        "matrix_norm",
        matrix_norm,
        namesake="torch.linalg.matrix_norm",
        operators=("svd",),
        samples=lambda: tuple(
            Sample(str(ord), ((batch, 12, 10),), {"ord": ord}, prepare=(separated,), terms=12**2)
            for batch, ord in ((7, 2), (8, "nuc"))
        ),
    )
)
register(
    Op(
        "tensorinv",
        tensorinv,
        namesake="torch.linalg.tensorinv",
        operators=("inv_ex",),
        waits=True,
        samples=lambda: (
            Sample("3x4x2x6", ((12, 12),), arguments=_as_tensor, prepare=(well_conditioned,), terms=12**2),
        ),
    )
)
register(
    Op(
        "tensorsolve",
        tensorsolve,
        namesake="torch.linalg.tensorsolve",
        operators=("solve_ex",),
        waits=True,
        samples=lambda: (
            Sample(
                "3x4x2x6",
                ((12, 12), (3, 4)),
                arguments=lambda a, b: (*_as_tensor(a), b),
                prepare=(well_conditioned,),
                terms=12,
            ),
        ),
    )
)
