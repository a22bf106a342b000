"""The Schur and the Hessenberg form of general matrices."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from .._core.operators import cpu_kernel, fake_kernel, ops
from .._core.registry import Op, Sample, register
from .._core.routing import accelerated
from .._core.samples import turned
from ._common import NUMBERS, check_types, in_float32, square

__all__ = ["Hessenberg", "Schur", "hessenberg", "rsf2csf", "schur"]

_MOST = 1024  # rows


class Schur(NamedTuple):
    """What `schur` and `rsf2csf` return."""

    T: torch.Tensor
    Z: torch.Tensor


class Hessenberg(NamedTuple):
    """What `hessenberg` returns with `calc_q`."""

    H: torch.Tensor
    Q: torch.Tensor


def schur(
    A: torch.Tensor,
    output: str = "real",
    lwork: int | None = None,
    overwrite_a: bool = False,
    sort: None = None,
    check_finite: bool = False,
) -> Schur:
    """Computes the Schur form A = Z T Zᴴ of general square matrices, with the arguments of scipy.linalg.schur: Z is
    orthogonal or unitary, and T is upper triangular. The real form of a real matrix has 2x2 blocks for pairs of complex
    eigenvalues, with equal diagonal entries.

    The kernels are those of `eig`, up to its Schur form, without balancing. They take matrices of up to 1024 rows.

    Args:
        A: (*, n, n), any strides, float32 or complex64; float16 and bfloat16 are computed in float32, and the results
            are cast back.
        output: "real" or "r", "complex" or "c". Complex A has the complex form always.
        lwork, overwrite_a, check_finite: SciPy's arguments, which have no effect.
        sort: None. SciPy orders the eigenvalues by it.

    Returns:
        A named tuple of T and Z, (*, n, n), of A's dtype, or complex64. They have no gradients. A matrix that holds NaN
        or infinity, or whose iteration does not converge, has NaN results.

    Raises:
        TypeError: A is no tensor that kernels take: those of the CPU and of float64 are for scipy.linalg.schur.
        ValueError: `output` is unknown, or there is a `sort`.
        RuntimeError: the matrices are not square, or have more than 1024 rows.

    Source: Francis, "The QR Transformation", 1961; LAPACK's gehrd, lahqr and lanv2.

    Example:
        >>> T, Z = metalcore.schur(torch.tensor([[1.0, 2.0], [0.0, 3.0]], device="mps"))
        >>> T.tolist()
        [[1.0, 2.0], [0.0, 3.0]]
    """
    _check("schur", A)
    if output not in ("real", "r", "complex", "c"):
        raise ValueError(f"metalcore.schur: output must be 'real' or 'complex', not {output!r}")
    if sort is not None:
        raise ValueError(f"metalcore.schur: sort must be None, not {sort!r}; scipy.linalg.schur sorts")
    if output in ("complex", "c") and not A.is_complex():
        A = torch.complex(A.float(), torch.zeros_like(A, dtype=torch.float32))
    return Schur(*in_float32(lambda A: _contiguous(ops.schur(A, True)), A.detach()))


def hessenberg(
    A: torch.Tensor, calc_q: bool = False, overwrite_a: bool = False, check_finite: bool = False
) -> torch.Tensor | Hessenberg:
    """Computes the upper Hessenberg form A = Q H Qᴴ of general square matrices, with the arguments of
    scipy.linalg.hessenberg: Q is orthogonal or unitary, and H is zero below its first subdiagonal.

    Args:
        A: (*, n, n), as for `schur`.
        calc_q: whether to return Q too.
        overwrite_a, check_finite: SciPy's arguments, which have no effect.

    Returns:
        H, (*, n, n), or a named tuple of H and Q. They have no gradients. A matrix that holds NaN or infinity has NaN
        results.

    Raises:
        TypeError: A is no tensor that kernels take: those of the CPU and of float64 are for scipy.linalg.hessenberg.
        RuntimeError: the matrices are not square, or have more than 1024 rows.

    Source: LAPACK's gehrd.

    Example:
        >>> metalcore.hessenberg(torch.randn(4, 4, device="mps"))[3, :2].tolist()
        [0.0, 0.0]
    """
    _check("hessenberg", A)
    H, Q = in_float32(lambda A: _contiguous(ops.schur(A, False)), A.detach())
    return Hessenberg(H, Q) if calc_q else H


def rsf2csf(T: torch.Tensor, Z: torch.Tensor, check_finite: bool = False) -> Schur:
    """Converts a real Schur form to a complex one, as scipy.linalg.rsf2csf: Z T Zᴴ stays the same, and T becomes upper
    triangular.

    A rotation for each 2x2 block does so, all at once.

    Args:
        T, Z: (*, n, n), a result of `schur`, of any floating-point dtype and device. Complex ones come back as they
            are.
        check_finite: SciPy's argument, which has no effect.

    Returns:
        A named tuple of the complex T and Z.

    Raises:
        TypeError: an argument is not a tensor.
        RuntimeError: the matrices are not square, or their shapes differ.

    Example:
        >>> T = torch.tensor([[0.0, 2.0], [-2.0, 0.0]], device="mps")
        >>> metalcore.linalg.rsf2csf(T, torch.eye(2, device="mps")).T.diagonal().tolist()
        [2j, -2j]
    """
    check_types("metalcore.linalg.rsf2csf", ("T", T, torch.Tensor), ("Z", Z, torch.Tensor))
    if not square(T) or T.shape != Z.shape:
        raise RuntimeError(
            f"metalcore.linalg.rsf2csf: T and Z must be (*, n, n), not {tuple(T.shape)} and {tuple(Z.shape)}"
        )
    if T.is_complex():
        return Schur(T, Z)
    if T.dtype in (torch.float16, torch.bfloat16):
        T, Z = T.float(), Z.float()
    diagonal = T.diagonal(dim1=-2, dim2=-1)
    first, second = diagonal[..., :-1], diagonal[..., 1:]
    below, above = T.diagonal(-1, -2, -1), T.diagonal(1, -2, -1)
    eps = torch.finfo(T.dtype).eps
    is_pair = below.abs() > eps * (first.abs() + second.abs())
    # (z, below) is the eigenvector of the block's first eigenvalue, which is z above `second`.
    half = (first - second) / 2
    largest = torch.maximum(torch.maximum(half.abs(), above.abs()), below.abs())  # squares of large numbers overflow
    largest = torch.where(is_pair, largest, 1.0)
    half, above, below = half / largest, above / largest, below / largest
    squares = half * half + above * below
    z = half + torch.complex(squares, torch.zeros_like(squares)).sqrt()
    length = torch.hypot(z.abs(), below)
    cosine = torch.where(is_pair, z / length, 1.0)
    sine = torch.where(is_pair, below / length, 0.0)
    ones = torch.ones_like(diagonal[..., :1])
    # A row is the first or the second one of a pair, or has a one.
    turns = torch.cat([cosine.conj(), ones], -1) * torch.cat([ones, cosine], -1)
    G = turns.diag_embed() + sine.diag_embed(1) - sine.diag_embed(-1)
    return Schur((G @ T.to(G.dtype) @ G.mH).triu(), Z.to(G.dtype) @ G.mH)


def _check(name, A):
    check_types(f"metalcore.{name}", ("A", A, torch.Tensor))
    if not accelerated(A, dtypes=NUMBERS):
        raise TypeError(
            f"metalcore.{name}: A must be a float32 or complex64 tensor on a GPU, not {A.dtype} on {A.device.type}; "
            f"scipy.linalg.{name} takes others"
        )
    if not square(A):
        raise RuntimeError(f"metalcore.{name}: A must be (*, n, n), not {tuple(A.shape)}")
    if A.shape[-1] > _MOST:
        raise RuntimeError(f"metalcore.{name}: A may have up to {_MOST} rows, and has {A.shape[-1]}")


def _contiguous(results):
    return [result.contiguous() for result in results]


@cpu_kernel("schur")
def _(A, sweeps):
    name = "schur" if sweeps else "hessenberg"
    raise RuntimeError(
        f"metalcore.{name}: Metal refuses its kernels, and PyTorch has no operator for it; scipy.linalg.{name} takes "
        "tensors of the CPU"
    )


@fake_kernel("schur")
def _(A, sweeps):
    return A.new_empty(A.shape), A.new_empty(A.shape).mT


def _products(results):
    """Returns what two forms of a matrix have in common: the matrix."""
    T, Z = (x if x.is_complex() or x.dtype == torch.float64 else x.float() for x in results)
    product = Z @ T @ Z.mH
    return (torch.view_as_real(product) if product.is_complex() else product,)


def _as_it_is(A, *_, **__):
    """Returns a form for `_products`."""
    return A, torch.eye(A.shape[-1], dtype=A.dtype, device=A.device).expand(A.shape)


def _samples(**options):
    return (
        *(Sample(f"{n}x{n}", ((batch, n, n),), options, terms=n**2) for batch, n in ((7, 12), (2, 39), (1, 69))),
        *(
            Sample(f"{n}x{n}, complex", ((batch, n, n),), options, arguments=turned, terms=2 * n**2)
            for batch, n in ((9, 12), (1, 61))
        ),
    )


for _name, _function, _options in (("schur", schur, {}), ("hessenberg", hessenberg, {"calc_q": True})):
    register(
        Op(
            _name,
            _function,
            reference=_as_it_is,
            results=_products,
            operators=("schur",),
            error=f"linalg.{_name} takes",
            dtypes=frozenset({torch.float32}),  # 16-bit forms multiply to no more than a few digits of the matrix
            edge=tuple,
            backward=False,
            samples=functools.partial(_samples, **_options),
        )
    )
