"""Systems of equations and least squares: factors in float32, and residuals in pairs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...double import Double
from .. import cholesky_solve as float32_cholesky_solve
from .. import lu_factor_ex, lu_solve, solve_triangular
from .. import qr as float32_qr
from ._common import LIMIT, Call, iterate, relative

__all__ = ["cholesky_solve", "inv", "lstsq", "solve"]

Numbers = Tensor | Double


def _answer(results, return_refined):
    values, refined = results
    result = values[0] if len(values) == 1 else tuple(values)
    return (result, refined) if return_refined else result


def _column_norms(x):
    return x.hi.abs().amax(-2)


def _refine(product: Callable, size: Tensor, B: Double, correction: Callable) -> tuple[Double, Tensor]:
    """Solves A X = B from X = 0 by corrections. Returns X, and whether each matrix has converged.

    product: computes A X.
    size: (batch,), the norm of A, by rows.
    correction: solves for a residual in float32.
    """
    X, rest = Double.of_pairs(torch.zeros_like(B.pairs)), B

    def measure():
        nonlocal rest
        rest = B - product(X)
        return relative(_column_norms(rest), size.unsqueeze(-1) * _column_norms(X) + _column_norms(B)).amax(-1)

    def correct():
        nonlocal X
        X = X + correction(rest.float())

    refined = iterate(measure, correct)
    return X, refined


def solve(A: Numbers, B: Numbers, *, device=None, return_refined: bool = False):
    """Solves A X = B with a backward error of at most 1e-13: LU factors in float32, refined by residuals in pairs of
    float32.

    It converges for condition numbers up to about 1e6, and mostly 1e7. LAPACK solves the other systems in float64 on
    the CPU, with a RefinementWarning. A matrix that has NaN or an infinity gives NaN.

    Args:
        A: (*, n, n), a float64 tensor on the CPU or a Double.
        B: (*, n, k), or (*, n) as in torch.linalg.solve, of the same type.
        device: where tensors are computed: by default on the GPU, "cuda" or "mps". Doubles stay on their device.
        return_refined: whether to return also which matrices the device refined, a bool tensor (*) on the CPU.

    Returns:
        X, of the type of A: max |B - A X| is at most 1e-13 (‖A‖ max |X| + max |B|) in each column.

    Raises:
        TypeError: an argument is neither a float64 tensor on the CPU nor a Double.
        RuntimeError: A is not square, or B does not fit.
        torch.linalg.LinAlgError: A is singular.

    Example:
        >>> A = 2 * torch.eye(3, dtype=torch.float64)
        >>> metalcore.linalg.refined.solve(A, torch.ones(3, dtype=torch.float64), device="mps").tolist()
        [0.5, 0.5, 0.5]
    """
    vector = B.ndim == 1 or B.ndim == A.ndim - 1 and tuple(B.shape) == tuple(A.shape[:-1])
    call = Call("solve", {"A": A, "B": B.unsqueeze(-1) if vector else B}, device, by_column=("B",))
    results = _solve(call)
    if vector:
        results = [x[..., 0] for x in results[0]], results[1]
    return _answer(results, return_refined)


def _check_system(call, A, B):
    if A.shape[-1] != A.shape[-2]:
        raise RuntimeError(f"refined.{call.name}: A must be square, not {A.shape[-2]}x{A.shape[-1]}")
    if A.shape[-2] != B.shape[-2]:
        raise RuntimeError(f"refined.{call.name}: B has {B.shape[-2]} rows, and A has {A.shape[-2]}")


def _solve(call, by_lapack: Callable = torch.linalg.solve):
    A, B = call.numbers
    _check_system(call, A, B)
    LU, pivots, _ = lu_factor_ex(A.float())
    size = A.hi.abs().sum(-1).amax(-1)
    X, refined = _refine(A.matmul, size, B, lambda rest: lu_solve(LU, pivots, rest))
    power = call.powers[1] / call.powers[0]
    return call.results(refined, [(X, power)], lambda A, B: [by_lapack(A, B)])


def inv(A: Numbers, *, device=None, return_refined: bool = False):
    """Inverts matrices as solve(A, identity) does, with its bounds and conditions.

    Args:
        A: (*, n, n), a float64 tensor on the CPU or a Double.
        device, return_refined: as for solve.

    Returns:
        The inverses, of the type of A: max |I - A X| is at most 1e-13 (‖A‖ max |X| + 1) in each column.

    Raises:
        TypeError: A is neither a float64 tensor on the CPU nor a Double.
        RuntimeError: A is not square.
        torch.linalg.LinAlgError: A is singular.

    Example:
        >>> metalcore.linalg.refined.inv(4 * torch.eye(2, dtype=torch.float64), device="mps").tolist()
        [[0.25, 0.0], [0.0, 0.25]]
    """
    identity = torch.eye(A.shape[-1], dtype=torch.float64)
    call = Call("inv", {"A": A, "identity": Double(identity, A.device) if isinstance(A, Double) else identity}, device)
    return _answer(_solve(call, lambda A, _: torch.linalg.inv(A)), return_refined)


def cholesky_solve(B: Numbers, L: Numbers, upper: bool = False, *, device=None, return_refined: bool = False):
    """Solves A X = B from A's Cholesky factor with a backward error of at most 1e-13, by residuals in pairs of float32.

    It converges for condition numbers of L up to about 1e3, which is 1e6 for A. LAPACK solves the other systems in
    float64 on the CPU, with a RefinementWarning.

    Args:
        B: (*, n, k), a float64 tensor on the CPU or a Double.
        L: (*, n, n), of the same type. Its other triangle is not read.
        upper: whether L is the upper factor, with A = LᵀL.
        device, return_refined: as for solve.

    Returns:
        X, of the type of B.

    Raises:
        TypeError: an argument is neither a float64 tensor on the CPU nor a Double.
        RuntimeError: L is not square, or B does not fit.

    Example:
        >>> L = 2 * torch.eye(2, dtype=torch.float64)
        >>> metalcore.linalg.refined.cholesky_solve(L, L, device="mps").tolist()
        [[0.5, 0.0], [0.0, 0.5]]
    """
    call = Call("cholesky_solve", {"B": B, "A": L}, device, by_column=("B",))
    right, factor = call.numbers
    _check_system(call, factor, right)
    kept = torch.ones(factor.shape[-2:], dtype=torch.bool, device=factor.device)
    factor = Double.of_pairs(factor.pairs.where((kept.triu() if upper else kept.tril()).unsqueeze(-1), 0.0))
    first, second = (factor.mT, factor) if upper else (factor, factor.mT)
    size = (first.hi.abs() @ second.hi.abs()).sum(-1).amax(-1)
    X, refined = _refine(
        lambda X: first @ (second @ X), size, right, lambda rest: float32_cholesky_solve(rest, factor.float(), upper)
    )
    power = call.powers[0] / call.powers[1] / call.powers[1]
    return _answer(
        call.results(refined, [(X, power)], lambda B, L: [torch.cholesky_solve(B, L, upper)]), return_refined
    )


def lstsq(A: Numbers, B: Numbers, *, device=None, return_refined: bool = False):
    """Solves least-squares problems, min ‖A X - B‖, with a backward error of at most 1e-13.

    A QR factorization in float32 is refined on the augmented system r + A x = b, Aᵀr = 0 (Björck 1967), with residuals
    in pairs of float32. It converges for condition numbers up to about 1e6, and mostly 1e7. LAPACK solves the other
    problems in float64 on the CPU, those without full rank among them, with a RefinementWarning.

    Args:
        A: (*, m, n) with m >= n, a float64 tensor on the CPU or a Double.
        B: (*, m, k), of the same type.
        device, return_refined: as for solve.

    Returns:
        The solution X, (*, n, k), of the type of A.

    Raises:
        TypeError: an argument is neither a float64 tensor on the CPU nor a Double.
        RuntimeError: A has fewer rows than columns, or B does not fit.

    Example:
        >>> A, B = torch.ones(4, 1, dtype=torch.float64), torch.arange(4, dtype=torch.float64).unsqueeze(-1)
        >>> metalcore.linalg.refined.lstsq(A, B, device="mps").tolist()
        [[1.5]]
    """
    call = Call("lstsq", {"A": A, "B": B}, device, by_column=("B",))
    matrix, right = call.numbers
    m, n = matrix.shape[-2:]
    if m < n or m != right.shape[-2]:
        raise RuntimeError(
            f"refined.lstsq: A must have at least as many rows as columns, and as many as B, but A is {m}x{n}, and B "
            f"has {right.shape[-2]} rows"
        )
    Q, R = float32_qr(matrix.float())
    X = Double.of_pairs(torch.zeros_like(right.pairs[:, :n]))
    residual, first, second = right, right, X  # r, b - r - A x, and Aᵀr
    size = matrix.hi.square().sum((-2, -1)).sqrt().unsqueeze(-1)

    def norms(x):
        return x.hi.square().sum(-2).sqrt()

    def measure():
        nonlocal first, second
        first, second = right - residual - matrix @ X, matrix.mT @ residual
        whole = size * norms(X) + norms(right)
        # The residual of a system that has a solution is as small as the noise.
        slope = relative(norms(second), size * norms(residual)).where(norms(residual) > LIMIT * whole, 0.0)
        return torch.maximum(relative(norms(first), whole), slope).amax(-1)

    def correct():
        nonlocal X, residual
        inner = solve_triangular(R.mT.contiguous(), -second.float(), upper=False)
        projected = Q.mT @ first.float()
        X = X + solve_triangular(R, projected - inner, upper=True)
        residual = residual + (first.float() - Q @ (projected - inner))

    refined = iterate(measure, correct)
    power = call.powers[1] / call.powers[0]
    return _answer(
        call.results(refined, [(X, power)], lambda A, B: [torch.linalg.lstsq(A, B).solution]), return_refined
    )
