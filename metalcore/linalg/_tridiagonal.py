"""Eigenvalues and eigenvectors of symmetric tridiagonal matrices."""

from __future__ import annotations

import torch

from .._core.operators import autograd, cpu_kernel, fake_kernel, needs_gradient
from .._core.registry import Op, Sample, register
from .._core.routing import accelerated
from .._core.samples import low_rank
from ._common import in_float32
from ._eigh import gradient_of_eigh, save_eigh
from ._results import linalg_eigh

__all__ = ["eigh_tridiagonal"]


def eigh_tridiagonal(d: torch.Tensor, e: torch.Tensor, eigvals_only: bool = False) -> linalg_eigh | torch.Tensor:
    """Computes the eigenvalue decomposition T = V diag(L) Vᵀ of symmetric tridiagonal matrices, as
    scipy.linalg.eigh_tridiagonal.

    A matrix is split into leaves of up to 32 rows, which simdgroups solve by implicit QL. Merges join neighbours by the
    secular equation, with deflation, and multiply their eigenvectors. The host never waits. Without eigenvectors, each
    eigenvalue is found by bisection. The error is a small multiple of n eps times the largest eigenvalue.

    Args:
        d: (*, n), the diagonals. float32; float16 and bfloat16 are computed in float32, and the results are cast back.
            PyTorch's eigh takes other input, as dense matrices.
        e: (*, n - 1), the entries beside the diagonal, of d's batch and dtype.
        eigvals_only: whether to compute the eigenvalues alone.

    Returns:
        A torch.return_types.linalg_eigh: the named tuple (eigenvalues, eigenvectors), (*, n), ascending, and (*, n, n);
        or with `eigvals_only` the eigenvalues. They have gradients of any order, as those of `eigh`. All results of a
        matrix with NaN or infinity are NaN.

    Raises:
        ValueError: the shapes, dtypes or devices of d and e do not fit.

    Source: Cuppen, "A Divide and Conquer Method for the Symmetric Tridiagonal Eigenproblem", 1981; Gu and Eisenstat, "A
        Divide-and-Conquer Algorithm for the Symmetric Tridiagonal Eigenproblem", 1995.

    Example:
        >>> d, e = torch.tensor([2.0, 2.0], device="mps"), torch.tensor([1.0], device="mps")
        >>> metalcore.linalg.eigh_tridiagonal(d, e).eigenvalues.round().tolist()
        [1.0, 3.0]
    """
    _check(d, e)
    if not accelerated(d, e):
        matrices = _dense(d, e)
        return torch.linalg.eigvalsh(matrices) if eigvals_only else linalg_eigh(tuple(torch.linalg.eigh(matrices)))
    computes_v = not eigvals_only or (needs_gradient(d) or needs_gradient(e))
    eigenvalues, eigenvectors = in_float32(lambda d, e: _eigh_tridiagonal(d, e, computes_v), d, e)
    return eigenvalues if eigvals_only else linalg_eigh((eigenvalues, eigenvectors))


def _check(d, e):
    for name, tensor in (("d", d), ("e", e)):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"metalcore.eigh_tridiagonal: {name} must be a tensor, not {type(tensor).__name__}")
    expected = (*d.shape[:-1], d.shape[-1] - 1) if d.ndim > 0 and d.shape[-1] > 0 else None
    if tuple(e.shape) != expected:
        wanted = f"shape {expected}" if expected else "a diagonal d of at least one entry"
        raise ValueError(
            f"metalcore.eigh_tridiagonal: e must have {wanted}, and has {tuple(e.shape)} for d of {tuple(d.shape)}"
        )
    if d.dtype != e.dtype or d.device != e.device:
        raise ValueError(
            f"metalcore.eigh_tridiagonal: e must be {d.dtype} on {d.device} as d is, not {e.dtype} on {e.device}"
        )


def _dense(d, e):
    return torch.diag_embed(d) + torch.diag_embed(e, -1) + torch.diag_embed(e, 1)


@cpu_kernel("eigh_tridiagonal")
def _(d, e, compute_v):
    if not compute_v:
        return torch.linalg.eigvalsh(_dense(d, e)), d.new_empty(0)
    L, V = torch.linalg.eigh(_dense(d, e))
    return L, V.contiguous()


@fake_kernel("eigh_tridiagonal")
def _(d, e, compute_v):
    return d.new_empty(d.shape), d.new_empty((*d.shape, d.shape[-1]) if compute_v else 0)


def _backward(ctx, grad_L, grad_V):
    if not ctx.compute_v:
        raise RuntimeError("metalcore::eigh_tridiagonal: the derivative needs V; use compute_v=True.")
    grad = gradient_of_eigh(*ctx.saved_tensors, grad_L, grad_V)
    if grad is None:
        return None, None, None
    diagonal = grad.diagonal(dim1=-2, dim2=-1)
    return diagonal, grad.diagonal(1, -2, -1) + grad.diagonal(-1, -2, -1), None


_eigh_tridiagonal = autograd("eigh_tridiagonal", _backward, save_eigh)


def _samples():
    return tuple(
        Sample(str(n), ((batch, n), (batch, n - 1)), prepare=(_separated, lambda e: e / 8), terms=n**2, roundings=3)
        for batch, n in ((7, 12), (2, 40), (1, 70))
    )


def _separated(d):
    """Returns diagonals of matrices whose eigenvalues differ by about one or more."""
    return d / 8 + 2 * torch.arange(d.shape[-1], device=d.device)


def _unique(factors):
    values, eigenvectors = factors
    return values, low_rank(eigenvectors, values, eigenvectors.mT)


register(
    Op(
        "eigh_tridiagonal",
        eigh_tridiagonal,
        reference=lambda d, e: torch.linalg.eigh(_dense(d, e)),
        results=_unique,
        operators=("eigh_tridiagonal",),
        samples=_samples,
    )
)
