"""Eigenvalues and eigenvectors of general matrices."""

from __future__ import annotations

import torch

from .._core.operators import autograd, cpu_kernel, fake_kernel, needs_gradient, ops
from .._core.registry import Op, Sample, register
from .._core.routing import accelerated
from .._core.tensors import beside
from ._common import COMPUTED, NUMBERS, Tensors, in_float32, without_autocast, write_out
from ._pytorch import by_torch, override
from ._results import linalg_eig
from ._solve import solve_ex


def eig(A: torch.Tensor, *, out: Tensors | None = None) -> linalg_eig:
    """Computes the eigenvalue decomposition A V = V diag(L) of general square matrices, as torch.linalg.eig. L and V
    are complex.

    `metalcore.explain("eig", A.shape)` tells which kernels a call runs. Matrices with more than 1024 rows, and on Apple
    GPUs single ones from 257 rows on, go to LAPACK on the CPU, and the host waits for the result.

    Args:
        A: (*, n, n), any strides, float32 or complex64; float16 and bfloat16 are computed in float32. Other input goes
            to PyTorch's op.
        out: a pair of complex64 tensors to write L and V to.

    Returns:
        A torch.return_types.linalg_eig: the named tuple (eigenvalues, eigenvectors), (*, n) and (*, n, n), complex64.
        The columns of V have norm one. If A is real, complex eigenvalues come in pairs, first the one with the positive
        imaginary part; their eigenvectors are conjugates, with a real largest entry. If A is complex, all eigenvectors
        have one. The order of eigenvalues has no meaning. V is singular, or nearly so, where A has fewer eigenvectors
        than rows.
        Both have gradients of any order, by PyTorch's formula (Boeddeker et al. 2017). The gradients hold for functions
        that do not depend on the eigenvectors' norms and phases. Unlike PyTorch, the derivative does not check that,
        because the check would have to wait for the GPU. It is infinite or NaN where eigenvalues repeat.

    Raises:
        RuntimeError: the matrices are not square, or `out` does not fit. A matrix that holds NaN or infinity raises
            nothing, because a check would have to wait for the GPU. Its results are NaN, as are those of a matrix whose
            iteration does not converge.

    Source: Francis, "The QR Transformation", 1961; the Hessenberg reduction, deflation and back-substitution of
        LAPACK's gehrd, lahqr and trevc; James, Langou and Lowery, "On matrix balancing and eigenvector computation",
        2014.

    Example:
        >>> A = torch.tensor([[0.0, 1.0], [-1.0, 0.0]], device="mps")
        >>> metalcore.eig(A).eigenvalues.tolist()
        [1j, -1j]
    """
    if not accelerated(A, dtypes=NUMBERS):
        return by_torch(torch.linalg.eig, A, out=out)
    return linalg_eig(tuple(write_out("linalg_eig", out, lambda: _computed(A, True), A)))


def eigvals(A: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Computes the eigenvalues of general square matrices, as torch.linalg.eigvals.

    Args:
        A: (*, n, n), as for `eig`.
        out: a complex64 tensor to write to.

    Returns:
        (*, n), complex64, in no particular order. They have gradients of any order. If a gradient is needed, the
        eigenvectors are computed as well.

    Raises:
        RuntimeError: as for `eig`.

    Example:
        >>> metalcore.eigvals(torch.tensor([[0.0, 1.0], [-1.0, 0.0]], device="mps")).tolist()
        [1j, -1j]
    """
    if not accelerated(A, dtypes=NUMBERS):
        return by_torch(torch.linalg.eigvals, A, out=out)
    return write_out("linalg_eigvals", out, lambda: _computed(A, needs_gradient(A))[0], A)


def _computed(A, compute_v):
    return in_float32(lambda A: _eig(A, compute_v), A)


@cpu_kernel("eig")
def _(A, compute_v):
    if not compute_v:
        return torch.linalg.eigvals(A), A.new_empty(0, dtype=torch.complex64)
    L, V = torch.linalg.eig(A)
    return L, V.contiguous()


@fake_kernel("eig")
def _(A, compute_v):
    return (
        A.new_empty(A.shape[:-1], dtype=torch.complex64),
        A.new_empty(A.shape if compute_v else 0, dtype=torch.complex64),
    )


def _save(ctx, inputs, output):
    ctx.is_complex, ctx.compute_v = inputs[0].is_complex(), inputs[1]
    ctx.save_for_backward(*output)
    ctx.set_materialize_grads(False)


def _backward(ctx, grad_L, grad_V):
    if not ctx.compute_v:
        raise RuntimeError("metalcore::eig: the derivative needs V; use compute_v=True.")
    if grad_L is None and grad_V is None:
        return None, None
    gradient = _gradient(*ctx.saved_tensors, grad_L, grad_V)
    return gradient if ctx.is_complex else gradient.real, None


@without_autocast
def _gradient(L, V, grad_L, grad_V):
    """Computes V⁻ᴴ (diag(grad_L) + (Vᴴ grad_V - Vᴴ V diag(Re(Vᴴ grad_V))) / E) Vᴴ, where E[i, j] is the conjugate of
    L[j] - L[i]."""
    Vh = V.mH
    if grad_V is None:
        M = grad_L.unsqueeze(-1) * Vh
    else:
        products = Vh @ grad_V
        real = torch.diagonal(products, dim1=-2, dim2=-1).real
        identity = beside(L, torch.eye(L.shape[-1], device=L.device))
        differences = (L.unsqueeze(-2) - L.unsqueeze(-1)).conj() + identity
        M = (products - Vh @ (V * real.unsqueeze(-2))) / differences * (1 - identity)
        if grad_L is not None:
            M = M + grad_L.diag_embed()
        M = M @ Vh
    return _solve(Vh, M)


def _solve(A, B):
    """Returns A⁻¹ B for complex matrices, by real matrices of twice the size: [Re A, -Im A; Im A, Re A] times (Re X, Im
    X) is (Re B, Im B)."""
    wide = torch.cat([torch.cat([A.real, -A.imag], -1), torch.cat([A.imag, A.real], -1)], -2)
    return torch.complex(*solve_ex(wide, torch.cat([B.real, B.imag], -2)).result.chunk(2, -2))


_eig = autograd("eig", _backward, _save)


# The overrides of PyTorch's operators


def _takes(A):
    return accelerated(A, dtypes=COMPUTED) and A.dim() >= 2 and A.shape[-2] == A.shape[-1]


def _override(A):
    return _eig(A, True) if _takes(A) else None


def _override_values(A):
    return ops.eig(A, False)[0] if _takes(A) else None


def _with_pairs(a):
    """Returns matrices with eigenvalues about three apart, all except the first with a pair above and below. Sizes are
    multiples of three, since half a pair would be a second eigenvalue at the last one's place."""
    n = a.shape[-1]
    index = torch.arange(n - 1)
    off = torch.where(index % 3 == 0, 1.5, 0.0)
    return a / (10 * n) + torch.diag(torch.arange(1.0, n + 1) // 3 * 3) + torch.diag(off, 1) - torch.diag(off, -1)


def _turned(x):
    """Returns complex matrices, whose eigenvalues are 1 + i/2 times those of x."""
    real = x if x.dtype == torch.float64 else x.float()
    return (torch.complex(real, real / 2),)


def _samples():
    return (
        *(
            Sample(f"{n}x{n}", ((batch, n, n),), prepare=(_with_pairs,), terms=n**2)
            for batch, n in ((7, 12), (3, 24), (2, 39), (1, 69))
        ),
        Sample("12x12, complex", ((5, 12, 12),), prepare=(_with_pairs,), arguments=_turned, terms=2 * 12**2),
    )


def _unique(factors):
    """Returns the values by their real parts, and the magnitudes in their eigenvectors, which do not depend on
    phases."""
    values, vectors = factors if isinstance(factors, tuple) else (factors, None)
    order = (values.real + values.imag / 8).argsort(-1)
    sorted_values = values.gather(-1, order)
    results = [sorted_values.real.contiguous(), sorted_values.imag.contiguous()]
    if vectors is not None:
        taken = vectors.gather(-1, order.unsqueeze(-2).expand_as(vectors))
        results.append(taken.real.square() + taken.imag.square())
    return tuple(results)


register(
    Op(
        "eig",
        eig,
        namesake="torch.linalg.eig",
        results=_unique,
        operators=("eig",),
        # PyTorch's derivative solves complex systems, for which it has no kernel on a Mac.
        override=(
            override("linalg_eig", _override, at_autograd=True, dtypes=COMPUTED),
            override("linalg_eig", _override, dtypes=COMPUTED),
            override("_linalg_eigvals", _override_values, dtypes=COMPUTED),
        ),
        samples=_samples,
    )
)
register(
    Op(
        "eigvals",
        eigvals,
        namesake="torch.linalg.eigvals",
        results=_unique,
        operators=("eig",),
        samples=_samples,
    )
)
