"""Systems of equations with a triangular matrix."""

from __future__ import annotations

import torch

from .._core.operators import autograd, cpu_kernel, fake_kernel, ops
from .._core.registry import Op, Sample, register
from .._core.routing import accelerated
from .._core.samples import turned, well_conditioned
from ._common import NUMBERS, check_types, in_float32, torch_is_faster, write_out
from ._pytorch import by_torch, override, takes

_SIDE, _UPLO, _TRANSA, _DIAG = ("L", "R"), ("U", "L"), ("N", "T", "C"), ("U", "N")  # BLAS's letters


def solve_triangular(
    A: torch.Tensor,
    B: torch.Tensor,
    *,
    upper: bool,
    left: bool = True,
    unitriangular: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Solves A X = B, or X A = B, for X with a triangular A, as torch.linalg.solve_triangular.

    The method is substitution, without inverses, so that each column of X solves a system whose matrix differs from A
    by a few n eps of its entries (Higham, Accuracy and Stability of Numerical Algorithms, 8.1). A simdgroup solves one
    or several systems of up to 32 unknowns, and a threadgroup solves a larger one. The largest systems take panels of
    rows: a solved panel is subtracted from the rows below it. `metalcore.explain("solve_triangular", A, B)` tells which
    kernels a call runs.

    Args:
        A: (*, n, n), any strides. It reads only the triangle that `upper` names. float32 or complex64; float16 and
            bfloat16 are computed in float32, and X is cast back. Other input goes to PyTorch's op.
        B: (*, n, k), or (*, k, n) without `left`, of A's dtype. The batches of A and B broadcast.
        upper: whether A is upper triangular.
        left: whether A stands on the left of X.
        unitriangular: whether A's diagonal counts as ones. Then it is not read.
        out: a tensor to write X to.

    Returns:
        X, of B's shape with the batches broadcast. A zero on A's diagonal raises nothing, and gives inf and nan. X has
        gradients of any order.

    Raises:
        RuntimeError: shapes or `out` do not fit. The messages are PyTorch's.

    Example:
        >>> A, B = torch.tensor([[2.0, 0.0], [1.0, 1.0]], device="mps"), torch.ones(2, 1, device="mps")
        >>> metalcore.solve_triangular(A, B, upper=False).tolist()
        [[0.5], [0.5]]
    """
    if (
        torch_is_faster("solve_triangular", ("left", left), A, B)
        or B is None
        or not accelerated(A, B, dtypes=NUMBERS)
        or A.dtype != B.dtype
        or not type(upper) is type(left) is type(unitriangular) is bool
    ):
        return by_torch(
            torch.linalg.solve_triangular, A, B, upper=upper, left=left, unitriangular=unitriangular, out=out
        )

    def solve(A, B):
        return ops.solve_triangular(A, B, upper, left, unitriangular)

    return write_out("linalg_solve_triangular", out, lambda: in_float32(solve, A, B), A, B)


def trsm(
    A: torch.Tensor,
    B: torch.Tensor,
    *,
    side: str = "L",
    uplo: str = "L",
    transa: str = "N",
    diag: str = "N",
    alpha: float = 1.0,
) -> torch.Tensor:
    """Solves op(A) X = alpha B, or X op(A) = alpha B, for X with a triangular A: BLAS's trsm.

    This is solve_triangular with BLAS's names. Shapes, dtypes and gradients are the same. Unlike in BLAS, X is a new
    tensor and B does not change.

    Args:
        A: (*, n, n). It reads only the triangle `uplo`.
        B: (*, n, k), or (*, k, n) with side "R".
        side: "L" or "R": op(A) stands on the left or on the right of X.
        uplo: "U" or "L": A itself, not op(A), is upper or lower triangular.
        transa: "N" for op(A) = A, "T" for its transpose, "C" for its conjugate transpose.
        diag: "U" if A's diagonal counts as ones, or else "N".
        alpha: the factor of B. Zero gives zeros for any A.

    Returns:
        X, as from solve_triangular.

    Raises:
        TypeError: A or B is not a tensor.
        ValueError: `side`, `uplo`, `transa` or `diag` is another letter.
        RuntimeError: shapes do not fit, as in solve_triangular.

    Example:
        >>> A, B = torch.tensor([[2.0, 0.0], [1.0, 1.0]], device="mps"), torch.ones(2, 1, device="mps")
        >>> metalcore.trsm(A, B, alpha=2.0).tolist()
        [[1.0], [1.0]]
    """
    if side not in _SIDE or uplo not in _UPLO or transa not in _TRANSA or diag not in _DIAG:
        for name, value, letters in (
            ("side", side, _SIDE),
            ("uplo", uplo, _UPLO),
            ("transa", transa, _TRANSA),
            ("diag", diag, _DIAG),
        ):
            if value not in letters:
                raise ValueError(f"trsm: {name} must be one of {', '.join(letters)}, not {value!r}")
    check_types("trsm", ("A", A, torch.Tensor), ("B", B, torch.Tensor))
    upper = uplo == "U"
    if transa != "N":
        A, upper = A.mH if transa == "C" else A.mT, not upper
    X = solve_triangular(A, B if alpha == 1 else alpha * B, upper=upper, left=side == "L", unitriangular=diag == "U")
    return X if alpha != 0 else torch.zeros_like(X)


@cpu_kernel("solve_triangular")
def _(A, B, upper, left, unitriangular):
    return torch.linalg.solve_triangular(A, B, upper=upper, left=left, unitriangular=unitriangular).contiguous()


@fake_kernel("solve_triangular")
def _(A, B, upper, left, unitriangular):
    return A.new_empty([*torch.broadcast_shapes(A.shape[:-2], B.shape[:-2]), *B.shape[-2:]])


def _save(ctx, inputs, output):
    A, B, *ctx.flags = inputs
    ctx.shapes = A.shape, B.shape
    ctx.save_for_backward(A, output)


def _backward(ctx, grad):
    A, X = ctx.saved_tensors
    upper, left, unitriangular = ctx.flags
    needs_A, needs_B, *_ = ctx.needs_input_grad
    grad_B = ops.solve_triangular(A.mH, grad, not upper, left, unitriangular)
    grad_A = None
    if needs_A:
        grad_A = grad_B @ X.mH if left else X.mH @ grad_B
        grad_A = (-grad_A).sum_to_size(ctx.shapes[0])
        grad_A = grad_A.triu(int(unitriangular)) if upper else grad_A.tril(-int(unitriangular))
    return grad_A, grad_B.sum_to_size(ctx.shapes[1]) if needs_B else None, None, None, None


autograd("solve_triangular", _backward, _save)


# The override of PyTorch's kernel


def _override(A, B, *, upper, left=True, unitriangular=False):
    return ops.solve_triangular(A, B, upper, left, unitriangular) if takes(A, B) else None


def _trsm_by_torch(A, B, *, side="L", uplo="L", transa="N", diag="N", alpha=1.0):
    if transa != "N":
        A, uplo = A.mT, "L" if uplo == "U" else "U"
    return torch.linalg.solve_triangular(A, alpha * B, upper=uplo == "U", left=side == "L", unitriangular=diag == "U")


def _samples():
    return tuple(
        Sample(
            name,
            ((batch, n, n), (batch, n, k)),
            {"upper": False},
            prepare=(well_conditioned,),
            terms=n,
            arguments=turned if "complex" in name else lambda *tensors: tensors,
        )
        for name, batch, n, k in (
            ("12x12", 3, 12, 5),
            ("12x12, a vector", 3, 12, 1),
            ("33x33", 1100, 33, 5),
            ("100x100, a vector", 3, 100, 1),
            ("100x100, many columns", 3, 100, 40),
            ("160x160", 3, 160, 20),
            ("40x40, complex", 3, 40, 5),
        )
    )


register(
    Op(
        "solve_triangular",
        solve_triangular,
        namesake="torch.linalg.solve_triangular",
        operators=("solve_triangular",),
        override=(override("linalg_solve_triangular", _override),),
        samples=_samples,
    )
)
register(
    Op(
        "trsm",
        trsm,
        reference=_trsm_by_torch,
        operators=("solve_triangular",),
        samples=lambda: tuple(
            Sample(name, ((3, 20, 20), (3, 20, 20)), options, prepare=(well_conditioned,), terms=20)
            for name, options in (
                ("lower", {}),
                ("from the right", {"side": "R", "uplo": "U", "alpha": 0.5}),
                ("transposed", {"transa": "T", "diag": "U"}),
            )
        ),
    )
)
