"""Eigenvalues and eigenvectors of symmetric and Hermitian matrices."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from .._core.operators import autograd, cpu_kernel, fake_kernel, needs_gradient, ops
from .._core.registry import Op, Sample, register
from .._core.routing import accelerated
from .._core.samples import low_rank, separated, turned
from .._core.tensors import beside
from ._cholesky import cholesky_ex
from ._common import (
    NUMBERS,
    Broadened,
    Tensors,
    check_broadening,
    check_types,
    complex_by_torch,
    division,
    in_float32,
    skew,
    square,
    without_autocast,
    write_out,
)
from ._pytorch import by_torch, override, takes_square
from ._results import linalg_eigh
from ._triangular import solve_triangular


def eigh(
    A: torch.Tensor,
    UPLO: str = "L",
    *,
    B: torch.Tensor | None = None,
    broadening: float = 0.0,
    out: Tensors | None = None,
) -> linalg_eigh:
    """Computes the eigenvalue decomposition A = V diag(L) Vᴴ of symmetric or Hermitian matrices, as
    torch.linalg.eigh. V is orthogonal or unitary, and L is real, in ascending order. With B it solves the generalized
    problem A V = B V diag(L), as scipy.linalg.eigh does, and Vᴴ B V = I.

    `metalcore.explain("eigh", A.shape)` tells which kernels a call runs. On Apple GPUs large single matrices go to
    LAPACK on the CPU, and the host waits for the result.

    Args:
        A: (*, n, n), any strides. float32 or complex64; float16 and bfloat16 are computed in float32, and the results
            are cast back. Other input goes to PyTorch's op.
        UPLO: "L" reads only the lower triangle, "U" only the upper one.
        B: symmetric or Hermitian positive definite matrices, (*, n, n), of A's dtype; batches broadcast. The results
            are NaN where B is not positive definite. PyTorch's function has no such argument.
        broadening: as for `svd`: above zero, the derivative multiplies by x / (x² + d²) where it divides by a
            difference x of eigenvalues, with d = broadening * max(|L|), and is finite for every A.
        out: a pair of tensors to write L and V to.

    Returns:
        A torch.return_types.linalg_eigh: the named tuple (eigenvalues, eigenvectors), (*, n) and (*, n, n). They have
        gradients of any order, by PyTorch's formula (Giles 2008). The gradient of A is symmetric or Hermitian,
        whichever triangle was read. The gradients hold for functions that do not depend on the signs or phases of
        eigenvectors or, where eigenvalues repeat, on the choice of vectors within their space. The derivative of V
        divides by differences of eigenvalues. Where these repeat, it is infinite or NaN, as in PyTorch and unless there
        is a broadening, while the derivative of L is finite.

    Raises:
        ValueError: the broadening is no finite number of at least zero, or A is complex and there is one.
        RuntimeError: the matrices are not square, UPLO is another string, or `out` does not fit. A matrix that holds
            NaN or infinity raises nothing, because a check would have to wait for the GPU. Its results are NaN.

    Example:
        >>> A = torch.tensor([[2.0, 0.0], [0.0, 1.0]], device="mps")
        >>> eigenvalues, eigenvectors = metalcore.eigh(A)
        >>> eigenvalues.tolist()
        [1.0, 2.0]
    """
    if B is not None:
        results = _generalized("metalcore.eigh", A, B, UPLO, lambda C: eigh(C, broadening=broadening))
        return linalg_eigh(tuple(write_out("linalg_eigh", out, lambda: results, A, B)))
    broadened = check_broadening("eigh", A, broadening)
    if not _taken(A, UPLO, lambda A: True):
        if broadened and needs_gradient(A) and out is None:
            return linalg_eigh(_Broadened.apply(A, UPLO, broadening))
        return by_torch(torch.linalg.eigh, A, UPLO, out=out)

    def factors(A):
        return _Broadened.apply(A, UPLO, broadening) if broadened and needs_gradient(A) else _eigh(A, UPLO, True)

    return linalg_eigh(tuple(write_out("linalg_eigh", out, lambda: in_float32(factors, A), A)))


def eigvalsh(A: torch.Tensor, UPLO: str = "L", *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Computes the eigenvalues of symmetric matrices in ascending order, as torch.linalg.eigvalsh.

    Args:
        A: (*, n, n), as for `eigh`.
        UPLO: as for `eigh`.
        out: a tensor to write to.

    Returns:
        (*, n). They have gradients of any order. Where values repeat, the first derivative is finite and the second is
        not. If a gradient is needed, the eigenvectors are computed as well.

    Raises:
        RuntimeError: as for `eigh`.

    Example:
        >>> metalcore.eigvalsh(torch.tensor([[2.0, 0.0], [0.0, 1.0]], device="mps")).tolist()
        [1.0, 2.0]
    """
    if not _taken(A, UPLO, needs_gradient):
        return by_torch(torch.linalg.eigvalsh, A, UPLO, out=out)
    return write_out("linalg_eigvalsh", out, lambda: in_float32(lambda A: _eigh(A, UPLO, needs_gradient(A))[0], A), A)


def _taken(A, UPLO, computes_v):
    return (
        accelerated(A, dtypes=NUMBERS)
        and type(UPLO) is str
        and not complex_by_torch("eigh", ("compute_v", computes_v(A)), A)
    )


@cpu_kernel("eigh")
def _(A, UPLO, compute_v):
    if not compute_v:
        return torch.linalg.eigvalsh(A, UPLO), A.new_empty(0)
    L, V = torch.linalg.eigh(A, UPLO)
    return L, V.contiguous()


def _generalized(name: str, A: torch.Tensor, B: torch.Tensor, UPLO: str, decompose: Callable) -> Sequence[torch.Tensor]:
    """Returns eigenvalues and eigenvectors V with Vᴴ B V = I, by B = L Lᴴ and the eigenvectors of L⁻¹ A L⁻ᴴ.

    Args:
        name: the function in errors.
        A, B: (*, n, n) and (*, n, n), whose batches broadcast. It reads the triangle UPLO of both. Where B is not
            positive definite, the results are NaN.
        decompose: a function that returns eigenvalues and eigenvectors of a matrix from its lower triangle.

    Source: Golub and Van Loan, Matrix Computations, 8.7.
    """
    check_types(name, ("A", A, torch.Tensor), ("B", B, torch.Tensor))
    if not square(A) or not square(B) or A.shape[-1] != B.shape[-1]:
        raise RuntimeError(f"{name}: A and B must be (*, n, n), not {tuple(A.shape)} and {tuple(B.shape)}")
    if A.dtype != B.dtype:
        raise RuntimeError(f"{name}: B must have the dtype of A, {A.dtype}, not {B.dtype}")
    if UPLO not in ("L", "U"):
        raise RuntimeError(f"{name}: UPLO must be 'L' or 'U', not {UPLO!r}")
    if UPLO == "U":
        A, B = A.mH, B.mH

    def compute(A, B):
        L, info = cholesky_ex(B)
        L = L.masked_fill((info > 0)[..., None, None], torch.nan)
        Lh = L.mH
        C = solve_triangular(L, A.tril() + A.tril(-1).mH, upper=False)
        values, vectors = decompose(solve_triangular(Lh, C, upper=True, left=False))
        return values, solve_triangular(Lh, vectors, upper=True)

    compute = without_autocast(compute)
    return in_float32(compute, A, B) if A.dtype in (torch.float16, torch.bfloat16) else compute(A, B)


@fake_kernel("eigh")
def _(A, UPLO, compute_v):
    return A.new_empty(A.shape[:-1], dtype=A.dtype.to_real()), A.new_empty(A.shape if compute_v else 0)


def save_eigh(ctx, inputs, output):
    """Saves L and V, for operators whose third argument is compute_v."""
    ctx.compute_v = inputs[2]
    ctx.save_for_backward(*output)
    ctx.set_materialize_grads(False)


def _backward(ctx, grad_L, grad_V):
    if not ctx.compute_v:
        raise RuntimeError("metalcore::eigh: the derivative needs V; use compute_v=True.")
    return gradient_of_eigh(*ctx.saved_tensors, grad_L, grad_V), None, None


class _Broadened(Broadened):
    @staticmethod
    def forward(A, UPLO, broadening):
        return ops.eigh(A, UPLO, True) if accelerated(A) else tuple(by_torch(torch.linalg.eigh, A, UPLO))

    @staticmethod
    def backward(ctx, *grads):  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient_of_eigh(*ctx.saved_tensors, *grads, ctx.broadening), None, None


@without_autocast
def gradient_of_eigh(L, V, grad_L, grad_V, broadening=0.0):
    """Computes V (skew(Vᴴ grad_V) / 2E + diag(grad_L)) Vᴴ, where E[i, j] = L[j] - L[i]."""
    if grad_V is None:
        return None if grad_L is None else (V * grad_L.unsqueeze(-2)) @ V.mH
    identity = beside(L, torch.eye(L.shape[-1], dtype=L.dtype, device=L.device))  # E's diagonal divides only zeros
    differences = 2 * (L.unsqueeze(-2) - L.unsqueeze(-1)) + identity
    largest = torch.maximum(L[..., :1].abs(), L[..., -1:].abs())[..., None] if broadening else None
    M = division(largest, 2 * broadening)(skew(V.mH @ grad_V), differences)
    if V.is_complex():  # a phase of an eigenvector changes nothing
        M = M * (1 - identity)
    if grad_L is not None:
        M = M + grad_L.diag_embed()
    return V @ M @ V.mH


_eigh = autograd("eigh", _backward, save_eigh)


# The override of PyTorch's kernel


def _override(A, UPLO="L", compute_v=True):
    return ops.eigh(A, UPLO, compute_v) if takes_square(A) and UPLO in ("L", "U") else None


def _samples():
    return tuple(
        Sample(name, ((batch, n, n),), arguments=arguments, prepare=(separated,), terms=n**2)
        for name, batch, n, arguments in (
            ("12x12", 7, 12, _symmetric),
            ("40x40", 2, 40, _symmetric),
            ("140x140", 1, 140, _symmetric),
            ("20x20, complex", 3, 20, lambda a: turned(*_symmetric(a))),
        )
    )


def _symmetric(a):
    return (a + a.mT,)


def _unique(factors):
    values, eigenvectors = (factor.flip(-1) for factor in factors)  # the largest first
    return values, low_rank(eigenvectors, values, eigenvectors.mH)


register(
    Op(
        "eigh",
        eigh,
        namesake="torch.linalg.eigh",
        results=_unique,
        operators=("eigh",),
        override=(override("_linalg_eigh", _override),),
        samples=_samples,
    )
)
register(Op("eigvalsh", eigvalsh, namesake="torch.linalg.eigvalsh", operators=("eigh",), samples=_samples))
