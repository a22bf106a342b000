"""The Sylvester equation, and the square root of matrices, whose derivative solves one."""

from __future__ import annotations

import torch

from .._core.operators import cpu_kernel, fake_kernel, needs_gradient, ops
from .._core.registry import Op, Sample, register
from .._core.routing import accelerated
from .._core.samples import turned, well_conditioned
from ._common import NUMBERS, check_types, host_number, in_float32, without_autocast
from ._schur import rsf2csf

__all__ = ["solve_sylvester", "sqrtm"]


def solve_sylvester(A: torch.Tensor, B: torch.Tensor, Q: torch.Tensor) -> torch.Tensor:
    """Solves A X + X B = Q for X, with the arguments of scipy.linalg.solve_sylvester.

    The equation is solved between the complex Schur forms of A and B, which have up to 1024 rows.

    Args:
        A: (*, m, m), any strides, float32 or complex64; float16 and bfloat16 are computed in float32, and X is cast
            back.
        B: (*, n, n), of A's dtype.
        Q: (*, m, n), of A's dtype. All batches broadcast.

    Returns:
        X, (*, m, n). Where an eigenvalue of A is one of -B, it has inf, nan or large numbers. It has gradients of any
        order.

    Raises:
        TypeError: an argument is no tensor that kernels take: those of the CPU and of float64 are for
            scipy.linalg.solve_sylvester.
        RuntimeError: shapes or dtypes do not fit, or A or B has more than 1024 rows.

    Source: Bartels and Stewart, "Solution of the Matrix Equation AX + XB = C", 1972.

    Example:
        >>> A, B = torch.eye(2, device="mps"), torch.eye(3, device="mps")
        >>> metalcore.solve_sylvester(A, B, torch.ones(2, 3, device="mps")).tolist()
        [[0.5, 0.5, 0.5], [0.5, 0.5, 0.5]]
    """
    check_input("solve_sylvester", A, B=B, Q=Q)
    m, n = A.shape[-1], B.shape[-1]
    if A.shape[-2] != m or B.shape[-2] != n or Q.shape[-2:] != (m, n):
        raise RuntimeError(
            "metalcore.solve_sylvester: A, B and Q must be (*, m, m), (*, n, n) and (*, m, n), not "
            f"{tuple(A.shape)}, {tuple(B.shape)} and {tuple(Q.shape)}"
        )
    return in_float32(without_autocast(lambda A, B, Q: _Sylvester.apply(A, B, Q)), A, B, Q)


def sqrtm(A: torch.Tensor) -> torch.Tensor:
    """Computes the principal square roots X X = A of general square matrices, as scipy.linalg.sqrtm: the eigenvalues of
    X have real parts that are not negative.

    It is computed from the complex Schur form of A, which has up to 1024 rows.

    Args:
        A: (*, n, n), any strides, float32 or complex64; float16 and bfloat16 are computed in float32.

    Returns:
        (*, n, n), complex64 where A is complex or a matrix of the batch has a negative real eigenvalue, and else of A's
        dtype. **The host waits** to know. A matrix without a square root has inf or nan, as has one that holds NaN or
        infinity. It has gradients of any order where no eigenvalue is zero, by a Sylvester equation.

    Raises:
        TypeError: A is no tensor that kernels take: those of the CPU and of float64 are for scipy.linalg.sqrtm.
        RuntimeError: the matrices are not square, or have more than 1024 rows.

    Source: Björck and Hammarling, "A Schur Method for the Square Root of a Matrix", 1983.

    Example:
        >>> metalcore.sqrtm(torch.tensor([[4.0, 1.0], [0.0, 4.0]], device="mps")).tolist()
        [[2.0, 0.25], [0.0, 2.0]]
    """
    return of_schur_form("sqrtm", A, _root, _Root)


def of_schur_form(name, A, function, with_gradient):
    """Returns a function of matrices that it computes from complex Schur forms, which may be real."""
    check_input(name, A)
    A, dtype = (A, A.dtype) if A.is_complex() else (A.float(), A.dtype)
    return real_where_known(without_autocast(with_gradient.apply if needs_gradient(A) else function)(A), dtype)


def check_input(name, A, **others):
    """Raises the errors of functions whose namesakes SciPy has, for tensors of one dtype."""
    tensors = {"A": A, **others}
    check_types(f"metalcore.{name}", *((argument, value, torch.Tensor) for argument, value in tensors.items()))
    for argument, value in tensors.items():
        if not accelerated(value, dtypes=NUMBERS) or value.device != A.device:
            raise TypeError(
                f"metalcore.{name}: {argument} must be a float32 or complex64 tensor on "
                f"{'a GPU' if value is A else 'the GPU of A'}, not {value.dtype} on {value.device.type}; "
                f"scipy.linalg.{name} takes others"
            )
        if value.dtype != A.dtype:
            raise RuntimeError(f"metalcore.{name}: {argument} must have the dtype of A, {A.dtype}, not {value.dtype}")
        if value.ndim < 2:
            raise RuntimeError(f"metalcore.{name}: {argument} must have at least 2 dimensions, not {value.ndim}")
    if A.shape[-1] != A.shape[-2] and not others:
        raise RuntimeError(f"metalcore.{name}: A must be (*, n, n), not {tuple(A.shape)}")


def complex_schur(A):
    """Returns the complex Schur form of a matrix, and whether its real form has a negative eigenvalue, or one that is
    NaN. If A is complex, that is not asked, and T stands for the answer."""
    T, Z = ops.schur(A, True)
    if A.is_complex():
        return T, Z, T
    zeros = T.new_zeros((*T.shape[:-1], 1))
    below = torch.cat([zeros[..., :1, :], T.diagonal(-1, -2, -1).unsqueeze(-1)], -2) if T.shape[-1] else zeros
    below = below.squeeze(-1)
    is_alone = (below == 0) & (torch.cat([below[..., 1:], zeros[..., :1, 0]], -1) == 0)
    is_negative = (is_alone & ~(T.diagonal(dim1=-2, dim2=-1) >= 0)).any()
    return *rsf2csf(T, Z), is_negative


def real_where_known(results, dtype):
    """Returns a complex function of matrices, or its real part, of this dtype, if no eigenvalue is negative. The host
    waits to know."""
    X, is_negative = results
    return X if dtype.is_complex or host_number(is_negative, False) else X.real.to(dtype).contiguous()


def triangular_root(T):
    """Returns the square roots of upper triangular complex matrices. An eigenvalue with a zero as imaginary part has
    +0."""
    T = torch.complex(T.real, torch.where(T.imag == 0, 0.0, T.imag))
    return ops.square_root_triangular(T.mT.contiguous()).mT


def _root(A):
    T, Z, is_negative = complex_schur(A)
    return Z @ triangular_root(T) @ Z.mH, is_negative


class _Root(torch.autograd.Function):
    @staticmethod
    def forward(ctx, A):
        X, is_negative = _root(A)
        ctx.is_complex = A.is_complex()
        ctx.save_for_backward(X)
        ctx.mark_non_differentiable(is_negative)
        return X, is_negative

    @staticmethod
    def backward(ctx, grad, _):  # pyright: ignore[reportIncompatibleMethodOverride]
        (X,) = ctx.saved_tensors
        gradient = _Sylvester.apply(X.mH, X.mH, grad)
        return gradient if ctx.is_complex else gradient.real


class _Sylvester(torch.autograd.Function):
    @staticmethod
    def forward(ctx, A, B, Q):
        batch = torch.broadcast_shapes(A.shape[:-2], B.shape[:-2], Q.shape[:-2])
        R, U = _expanded_form(A, batch)
        S, V = _expanded_form(B, batch)
        F = (U.mH @ Q.to(U.dtype) @ V).expand(*batch, *Q.shape[-2:])
        Y = ops.sylvester_triangular(R.mT.contiguous(), S.mT.contiguous(), F.mT.contiguous()).mT
        X = U @ Y @ V.mH
        X = X if A.is_complex() else X.real.contiguous()
        ctx.save_for_backward(A, B, X)
        ctx.shapes = A.shape, B.shape, Q.shape
        return X

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        A, B, X = ctx.saved_tensors
        by_Q = _Sylvester.apply(A.mH, B.mH, grad)
        gradients = -(by_Q @ X.mH), -(X.mH @ by_Q), by_Q
        return tuple(gradient.sum_to_size(shape) for gradient, shape in zip(gradients, ctx.shapes))


def _expanded_form(A, batch):
    return (part.expand(*batch, *A.shape[-2:]) for part in complex_schur(A)[:2])


@cpu_kernel("sylvester_triangular")
def _(A, B, C):
    A, B, C = A.mT, B.mT, C.mT
    m, n = C.shape[-2:]
    X = torch.zeros_like(C)
    identity = torch.eye(m, dtype=A.dtype, device=A.device)
    for j in range(n):
        right = C[..., j : j + 1] - X @ B[..., :, j : j + 1].triu(-j)
        X[..., j : j + 1] = torch.linalg.solve_triangular(A + B[..., j, j, None, None] * identity, right, upper=True)
    return X.mT.contiguous()


@fake_kernel("sylvester_triangular")
def _(A, B, C):
    return C.new_empty(C.shape)


@cpu_kernel("square_root_triangular")
def _(C):
    C = C.mT
    n = C.shape[-1]
    X = C.diagonal(dim1=-2, dim2=-1).sqrt().diag_embed()
    identity = torch.eye(n, dtype=C.dtype, device=C.device)
    for j in range(1, n):
        A = X[..., :j, :j] + X[..., j, j, None, None] * identity[:j, :j]
        X[..., :j, j : j + 1] = torch.linalg.solve_triangular(A, C[..., :j, j : j + 1], upper=True)
    return X.mT.contiguous()


@fake_kernel("square_root_triangular")
def _(C):
    return C.new_empty(C.shape)


def _sylvester_by_sum(A, B, Q):
    """Solves by the Kronecker sum of A and Bᵀ."""
    m, n = Q.shape[-2:]
    identity = torch.eye
    left = torch.einsum("...ik,jl->...ijkl", A, identity(n, dtype=A.dtype, device=A.device))
    right = torch.einsum("ik,...lj->...ijkl", identity(m, dtype=A.dtype, device=A.device), B)
    system = (left + right).reshape(*Q.shape[:-2], m * n, m * n)
    return torch.linalg.solve(system, Q.reshape(*Q.shape[:-2], m * n, 1)).reshape(Q.shape)


def _root_by_eigenvalues(A):
    values, vectors = torch.linalg.eig(A)
    root = torch.linalg.solve(vectors, vectors * values.sqrt().unsqueeze(-2), left=False)
    return root if A.is_complex() else root.real


register(
    Op(
        "solve_sylvester",
        solve_sylvester,
        reference=_sylvester_by_sum,
        operators=("schur", "sylvester_triangular"),
        error="linalg.schur takes",
        samples=lambda: tuple(
            Sample(
                name,
                ((batch, m, m), (batch, n, n), (batch, m, n)),
                arguments=arguments,
                prepare=(well_conditioned, well_conditioned),
                terms=m**2,
            )
            for name, batch, m, n, arguments in (
                ("12x8", 3, 12, 8, lambda *tensors: tensors),
                ("34x3", 2, 34, 3, lambda *tensors: tensors),
                ("9x9, complex", 3, 9, 9, lambda a, b, q: (*turned(a), *turned(b), *turned(q))),
            )
        ),
    )
)
register(
    Op(
        "sqrtm",
        sqrtm,
        reference=_root_by_eigenvalues,
        operators=("schur", "square_root_triangular", "sylvester_triangular"),
        waits=True,
        error="linalg.schur takes",
        samples=lambda: (
            *(
                Sample(f"{n}x{n}", ((batch, n, n),), prepare=(well_conditioned,), terms=n**2)
                for batch, n in ((3, 12), (2, 34))
            ),
            Sample("12x12, complex", ((5, 12, 12),), prepare=(well_conditioned,), arguments=turned, terms=12**2),
        ),
    )
)
