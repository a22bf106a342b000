"""Determinants."""

from __future__ import annotations

import torch

from .._core.operators import autograd, cpu_kernel, fake_kernel, ops
from .._core.registry import Op, Sample, register
from .._core.routing import accelerated
from .._core.samples import well_conditioned
from .._core.tensors import beside
from ._common import NUMBERS, Tensors, complex_by_torch, in_float32, square, write_out
from ._pytorch import by_torch, factors_transpose, override, takes_square
from ._results import linalg_slogdet
from ._svd import svd

__all__ = ["det", "slogdet"]


def det(A: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Computes determinants, as torch.linalg.det: the product of U's diagonal in A = P L U, and of P's sign.

    Args:
        A: (*, n, n), any strides. float32 or complex64; float16 and bfloat16 are computed in float32, and the result
            is cast back. Other input goes to PyTorch's op.
        out: a tensor to write the determinants to.

    Returns:
        (*). Singular matrices have 0, and 0 x 0 matrices have 1. The product has a separate exponent, so that it over-
        or underflows only where the determinant does. It has gradients of any order, also for singular matrices.

    Raises:
        RuntimeError: the matrices are not square. The message is PyTorch's.

    Example:
        >>> metalcore.det(torch.tensor([[4.0, 0.0], [2.0, 2.0]], device="mps")).item()
        8.0
    """
    if not _takes(A):
        return by_torch(torch.linalg.det, A, out=out)
    return write_out("linalg_det", out, lambda: in_float32(_det, A), A)


def slogdet(A: torch.Tensor, *, out: Tensors | None = None) -> linalg_slogdet:
    """Computes signs of determinants and the natural logarithms of their magnitudes, as torch.linalg.slogdet.

    Args:
        A: as for det.
        out: a pair of tensors to write sign and logabsdet to.

    Returns:
        A torch.return_types.linalg_slogdet: the named tuple (sign, logabsdet), both (*). Singular matrices have 0 and
        -inf. logabsdet is real, and has gradients of any order where A is not singular. So has sign where A is complex;
        the gradients of a real sign are zero.

    Raises:
        RuntimeError: the matrices are not square. The message is PyTorch's.

    Example:
        >>> sign, logarithm = metalcore.slogdet(-torch.eye(3, device="mps"))
        >>> sign.item(), logarithm.item()
        (-1.0, 0.0)
    """
    if not _takes(A):
        return by_torch(torch.linalg.slogdet, A, out=out)
    results = write_out("linalg_slogdet", out, lambda: in_float32(_slogdet, A), A)
    return linalg_slogdet(tuple(results))


def _takes(A):
    return accelerated(A, dtypes=NUMBERS) and square(A) and not complex_by_torch("lu_factor", (), A)


def _factors_like(A):
    return A.new_empty(A.shape), A.new_empty(A.shape[:-1], dtype=torch.int32)


@cpu_kernel("det")
def _(A):
    LU, pivots, _ = torch.linalg.lu_factor_ex(A)
    return torch.linalg.det(A), LU.contiguous(), pivots.contiguous()


@fake_kernel("det")
def _(A):
    return A.new_empty(A.shape[:-2]), *_factors_like(A)


@cpu_kernel("slogdet")
def _(A):
    LU, pivots, _ = torch.linalg.lu_factor_ex(A)
    return *torch.linalg.slogdet(A), LU.contiguous(), pivots.contiguous()


@fake_kernel("slogdet")
def _(A):
    logarithm = A.new_empty(A.shape[:-2], dtype=A.dtype.to_real())
    return A.new_empty(A.shape[:-2]), logarithm, *_factors_like(A)


def _diagonal(values, n):
    """Returns n x n matrices, each with its value in all places of the diagonal."""
    return torch.diag_embed(values.unsqueeze(-1).expand(*values.shape, n))


def _det_save(ctx, inputs, output):
    ctx.save_for_backward(inputs[0], *output)


def _det_backward(ctx, grad):
    """Returns the conjugates of the cofactors, det(A)* A⁻ᴴ, times grad."""
    A, value, LU, pivots = ctx.saved_tensors
    if grad is None or A.numel() == 0:
        return torch.zeros_like(A)
    return _cofactors(A, value, grad) if torch.is_grad_enabled() else _cofactors_by_factors(LU, pivots, grad)


def _cofactors_by_factors(LU, pivots, grad):
    """Returns the cofactors of L U, times grad, with tiny numbers in the place of zeros on U's diagonal. This matrix is
    not singular, and its determinant times its inverse differs from the cofactors of A by an equally tiny error."""
    n = LU.shape[-1]
    diagonal = LU.diagonal(dim1=-2, dim2=-1)
    largest = diagonal.abs().amax(-1, keepdim=True)
    tiny = torch.finfo(LU.dtype).eps * torch.where(largest == 0, 1, largest)
    change = torch.where(diagonal == 0, tiny, 0).to(LU.dtype)
    exchanges = (pivots != beside(pivots, torch.arange(1, n + 1, device=pivots.device))).sum(-1)
    value = (diagonal + change).prod(-1) * (1 - 2 * (exchanges % 2))
    return ops.lu_solve(LU + torch.diag_embed(change), pivots, _diagonal(grad * value.conj(), n), True, True)


def _cofactors(A, value, grad):
    """Returns the same as a differentiable function of A. Singular matrices take their singular values, as in
    PyTorch."""
    singular = value == 0
    if not singular.any():
        return ops.solve_ex(A.mH, _diagonal(grad * value.conj(), A.shape[-1]), True, False)[0]
    if singular.all():
        return _cofactors_by_singular_values(A, grad)
    n = A.shape[-1]
    result = torch.empty_like(A)
    regular = ~singular
    result = result.index_put((regular,), _cofactors(A[regular], value[regular], grad[regular]))
    singular_result = _cofactors_by_singular_values(A[singular], grad[singular])
    return result.index_put((singular,), singular_result).reshape(*A.shape[:-1], n)


def _cofactors_by_singular_values(A, grad):
    """Returns (det(U) det(Vᴴ))* U diag(products of the other singular values) Vᴴ."""
    U, S, Vh = svd(A)
    ones = torch.ones_like(S[..., :1])
    before = torch.cat([ones, S[..., :-1]], dim=-1).cumprod(-1)
    after = torch.cat([ones, S[..., 1:].flip(-1)], dim=-1).cumprod(-1).flip(-1)
    scale = ((det(U) * det(Vh)).conj() * grad).unsqueeze(-1)
    return (U * (scale * before * after).unsqueeze(-2)) @ Vh


_det = autograd("det", _det_backward, _det_save, results=1)


def _slogdet_save(ctx, inputs, output):
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(inputs[0], output[0], *output[2:])


def _slogdet_backward(ctx, grad_sign, grad):
    """Computes A⁻ᴴ times the gradient of the logarithm, and of a complex sign's angle times the imaginary unit."""
    A, sign, LU, pivots = ctx.saved_tensors
    if A.is_complex() and grad_sign is not None:
        angle = -1j * (grad_sign.conj() * sign).imag
        grad = angle if grad is None else grad + angle
    if grad is None:
        return torch.zeros_like(A)
    B = _diagonal(grad.to(A.dtype), A.shape[-1])
    if torch.is_grad_enabled():
        return ops.solve_ex(A.mH, B, True, False)[0]
    return ops.lu_solve(LU, pivots, B, True, True)


_slogdet = autograd("slogdet", _slogdet_backward, _slogdet_save, results=2)


# Overrides of PyTorch's kernels


def _override(op, operator):
    def take(A):
        if takes_square(A):
            return op(A.mT if factors_transpose(operator) and A.is_contiguous() else A)

    return take


def _samples():
    return tuple(
        # These determinants are near one, so that 16 bits hold them.
        Sample(f"{n}x{n}", ((batch, n, n),), prepare=(lambda a: well_conditioned(a) / 2,), terms=n)
        for batch, n in ((40, 3), (3, 5), (3, 40))
    )


register(
    Op(
        "det",
        det,
        namesake="torch.linalg.det",
        operators=("det", "lu_solve", "solve_ex"),
        override=(override("_linalg_det", _override(ops.det, torch.ops.aten._linalg_det)),),
        samples=_samples,
    )
)
register(
    Op(
        "slogdet",
        slogdet,
        namesake="torch.linalg.slogdet",
        operators=("slogdet", "lu_solve", "solve_ex"),
        override=(override("_linalg_slogdet", _override(ops.slogdet, torch.ops.aten._linalg_slogdet)),),
        samples=_samples,
    )
)
