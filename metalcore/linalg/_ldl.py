"""The LDL factorization of symmetric and Hermitian matrices, and solving with its factors."""

from __future__ import annotations

import torch

from .._core.operators import autograd, cpu_kernel, fake_kernel, ops
from .._core.registry import Op, Sample, register
from .._core.routing import accelerated
from .._core.samples import positive_definite, turned
from ._common import NUMBERS, Tensors, in_float32, square, write_out
from ._lu import broadcastable, one_batch
from ._pytorch import by_torch, checked, factored, factored_ex, override, takes_square
from ._results import linalg_ldl_factor, linalg_ldl_factor_ex

__all__ = ["ldl_factor", "ldl_factor_ex", "ldl_solve"]


def ldl_factor(A: torch.Tensor, *, hermitian: bool = False, out: Tensors | None = None) -> linalg_ldl_factor:
    """Computes the compact LDL factorization of symmetric or Hermitian matrices, which need not be definite, as
    torch.linalg.ldl_factor.

    A = L D Lᵀ, or L D Lᴴ, with exchanges of rows and columns in between. D has blocks of one or two rows, chosen by
    Bunch and Kaufman's partial pivoting. A simdgroup or a threadgroup factors a matrix in threadgroup memory, and a
    threadgroup one of up to 1024 rows in device memory. `metalcore.explain("ldl_factor", A.shape)` tells which kernel a
    call runs.

    Args:
        A: (*, n, n), any strides. It reads only the lower triangle. float32 or complex64; float16 and bfloat16 are
            computed in float32, and LD is cast back. Other input goes to PyTorch's op.
        hermitian: whether complex A is Hermitian, and not symmetric. Imaginary parts on the diagonal are not read then.
        out: a pair of tensors to write LD and pivots to.

    Returns:
        A torch.return_types.linalg_ldl_factor: the named tuple (LD, pivots), as LAPACK's sytrf and hetrf have them for
        the lower triangle. LD (*, n, n) has D's blocks, L below them, and zeros above the diagonal. pivots (*, n),
        int32: row pivots[i] - 1 was exchanged with row i, or where two are negative and equal, with the second of both.
        They have no gradients, as PyTorch's have none.

    Raises:
        RuntimeError: D has a zero on its diagonal, the matrices are not square, or `out` does not fit. The check waits
            for the result; ldl_factor_ex does not.

    Source: Bunch and Kaufman, "Some Stable Methods for Calculating Inertia and Solving Symmetric Linear Systems", 1977.

    Example:
        >>> LD, pivots = metalcore.ldl_factor(torch.tensor([[0.0, 2.0], [2.0, 0.0]], device="mps"))
        >>> pivots.tolist()
        [-2, -2]
    """
    if not _takes(A, hermitian):
        return by_torch(torch.linalg.ldl_factor, A, hermitian=hermitian, out=out)
    return factored(linalg_ldl_factor, lambda: _factor(A, hermitian), A, out)


def ldl_factor_ex(
    A: torch.Tensor, *, hermitian: bool = False, check_errors: bool = False, out: Tensors | None = None
) -> linalg_ldl_factor_ex:
    """Computes `ldl_factor` and reports zeros on D's diagonal in `info` instead of raising, as
    torch.linalg.ldl_factor_ex.

    Args:
        A, hermitian: as for ldl_factor.
        check_errors: whether to raise an error too, which waits for the result.
        out: three tensors to write LD, pivots and info to.

    Returns:
        A torch.return_types.linalg_ldl_factor_ex: the named tuple (LD, pivots, info). info (*), int32: 0, or the
        1-based index of the first zero on D's diagonal.

    Raises:
        RuntimeError: as ldl_factor.

    Example:
        >>> LD, pivots, info = metalcore.ldl_factor_ex(torch.zeros(2, 2, device="mps"))
        >>> info.item()
        1
    """
    if not _takes(A, hermitian) or type(check_errors) is not bool:
        return by_torch(torch.linalg.ldl_factor_ex, A, hermitian=hermitian, check_errors=check_errors, out=out)
    return factored_ex(linalg_ldl_factor_ex, lambda: _factor(A, hermitian), A, check_errors, out)


def ldl_solve(
    LD: torch.Tensor,
    pivots: torch.Tensor,
    B: torch.Tensor,
    *,
    hermitian: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Solves A X = B for X, with the A that `ldl_factor` has factored, as torch.linalg.ldl_solve.

    Args:
        LD: (*, n, n), as ldl_factor returns it: float32, complex64, float16 or bfloat16. Other input goes to PyTorch's
            op.
        pivots: (*, n), integers of LD's batch.
        B: (*, n, k), of LD's dtype. The batches of LD and B broadcast.
        hermitian: as for ldl_factor.
        out: a tensor to write X to.

    Returns:
        X, (*, n, k). It has gradients of any order with respect to B, and none with respect to LD.

    Raises:
        RuntimeError: shapes or dtypes do not fit. The messages are PyTorch's.

    Example:
        >>> LD, pivots = metalcore.ldl_factor(torch.tensor([[0.0, 2.0], [2.0, 0.0]], device="mps"))
        >>> metalcore.ldl_solve(LD, pivots, torch.tensor([[2.0], [4.0]], device="mps")).tolist()
        [[2.0], [1.0]]
    """
    if not _solvable(LD, pivots, B, hermitian):
        return by_torch(torch.linalg.ldl_solve, LD, pivots, B, hermitian=hermitian, out=out)

    def solve(LD, B):
        LD, B = one_batch(LD, B)
        return _ldl_solve(LD, pivots.expand(LD.shape[:-1]).int(), B, hermitian)

    return write_out("linalg_ldl_solve", out, lambda: in_float32(solve, LD.detach(), B), B)


def _takes(A, hermitian):
    return accelerated(A, dtypes=NUMBERS) and square(A) and type(hermitian) is bool


def _solvable(LD, pivots, B, hermitian):
    """Returns whether the operator takes these. PyTorch's op raises the errors for others."""
    return (
        B is not None
        and accelerated(LD, B, dtypes=NUMBERS)
        and LD.dtype == B.dtype
        and type(hermitian) is bool
        and isinstance(pivots, torch.Tensor)
        and not pivots.is_floating_point()
        and not pivots.is_complex()
        and pivots.dtype is not torch.bool
        and pivots.device == LD.device
        and square(LD)
        and B.ndim >= 2
        and pivots.shape == LD.shape[:-1]
        and B.shape[-2] == LD.shape[-1]
        and broadcastable(LD, B)
    )


def _factor(A, hermitian):
    return in_float32(lambda A: ops.ldl_factor_ex(A, hermitian), A.detach())


@cpu_kernel("ldl_factor_ex")
def _(A, hermitian):
    LD, pivots, info = torch.linalg.ldl_factor_ex(A, hermitian=hermitian)
    return LD.contiguous(), pivots.contiguous(), info


@fake_kernel("ldl_factor_ex")
def _(A, hermitian):
    integers = {"dtype": torch.int32}
    return A.new_empty(A.shape), A.new_empty(A.shape[:-1], **integers), A.new_empty(A.shape[:-2], **integers)


@cpu_kernel("ldl_solve")
def _(LD, pivots, B, hermitian):
    return torch.linalg.ldl_solve(LD, pivots, B, hermitian=hermitian).contiguous()


@fake_kernel("ldl_solve")
def _(LD, pivots, B, hermitian):
    return B.new_empty(B.shape)


def _save(ctx, inputs, output):
    LD, pivots, _, ctx.hermitian = inputs
    ctx.save_for_backward(LD, pivots)


def _backward(ctx, grad):
    """Returns A⁻ᴴ grad. The inverse of a symmetric A has its conjugate as conjugate transpose."""
    LD, pivots = ctx.saved_tensors
    if ctx.hermitian or not LD.is_complex():
        return None, None, ops.ldl_solve(LD, pivots, grad, ctx.hermitian), None
    return None, None, ops.ldl_solve(LD, pivots, grad.conj().resolve_conj(), False).conj(), None


_ldl_solve = autograd("ldl_solve", _backward, _save)


# Overrides of PyTorch's kernels


def _override_factor(A, *, hermitian=False, check_errors=False):
    if takes_square(A):
        return checked(ops.ldl_factor_ex(A, hermitian), "torch.linalg.ldl_factor_ex", check_errors, A)


def _override_solve(LD, pivots, B, *, hermitian=False):
    if takes_square(LD, B) and broadcastable(LD, B) and LD.shape[-1] == B.shape[-2]:
        LD, B = one_batch(LD, B)
        return ops.ldl_solve(LD, pivots.expand(LD.shape[:-1]).int(), B, hermitian)


def _samples():
    return (
        *(
            Sample(f"{n}x{n}", ((batch, n, n),), prepare=(_indefinite,), terms=n)
            for batch, n in ((7, 12), (3, 40), (1, 70))
        ),
        *(
            Sample(
                f"{n}x{n}, complex", ((batch, n, n),), {"hermitian": True}, turned, prepare=(_indefinite,), terms=2 * n
            )
            for batch, n in ((9, 12), (1, 40), (1, 70))
        ),
    )


def _indefinite(a):
    """Returns matrices that need no exchanges: every second diagonal entry dominates with the other sign."""
    signs = 1 - 2 * (torch.arange(a.shape[-1]) % 2)
    return positive_definite(a) * signs.float().diag() * 4 + (a + a.mT) / (4 * a.shape[-1])


def _samples_of_factors():
    def arguments(LD, B):
        """Returns pivots that exchange no rows, so that no result depends on a factorization."""
        return LD, torch.arange(1, LD.shape[-1] + 1, dtype=torch.int32, device=LD.device).expand(LD.shape[:-1]), B

    return tuple(
        Sample(name, ((batch, n, n), (batch, n, 5)), arguments=arguments, prepare=(_indefinite,), terms=n)
        for name, batch, n in (("12x12", 3, 12), ("70x70", 2, 70))
    )


register(
    Op(
        "ldl_factor",
        ldl_factor,
        namesake="torch.linalg.ldl_factor",
        operators=("ldl_factor_ex", "info_any"),
        override=(override("linalg_ldl_factor_ex", _override_factor),),
        backward=False,
        waits=True,
        samples=_samples,
    )
)
register(
    Op(
        "ldl_factor_ex",
        ldl_factor_ex,
        namesake="torch.linalg.ldl_factor_ex",
        operators=("ldl_factor_ex",),
        backward=False,
        samples=_samples,
    )
)
register(
    Op(
        "ldl_solve",
        ldl_solve,
        namesake="torch.linalg.ldl_solve",
        operators=("ldl_solve",),
        integers={"pivots": torch.int32},
        override=(override("linalg_ldl_solve", _override_solve),),
        backward=False,
        samples=_samples_of_factors,
    )
)
