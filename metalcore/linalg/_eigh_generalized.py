"""The generalized eigenvalue problem A V = B V diag(L) of symmetric and Hermitian matrices."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ._cholesky import cholesky_ex
from ._common import check_types, in_float32, square, without_autocast
from ._triangular import solve_triangular

__all__ = ["generalized"]


def generalized(name: str, A: torch.Tensor, B: torch.Tensor, UPLO: str, decompose: Callable) -> Sequence[torch.Tensor]:
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
