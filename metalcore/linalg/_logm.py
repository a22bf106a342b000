"""The logarithm of matrices."""

from __future__ import annotations

import torch

from .._core.operators import composed_kernel, fake_kernel, needs_gradient, ops
from .._core.registry import Op, Sample, register
from .._core.samples import turned
from .._core.tensors import beside
from ._common import host_number
from ._sylvester import complex_schur, of_schur_form, triangular_root
from ._triangular import solve_triangular

__all__ = ["logm"]

# Gauss and Legendre's rule on [0, 1], which integrates E (I + t E)⁻¹ with an error of 6e-8 where the norm of E is 0.7.
_NODES = (0.0198550718, 0.1016667613, 0.2372337950, 0.4082826788)
_NODES += tuple(1 - node for node in reversed(_NODES))
_WEIGHTS = (0.0506142681, 0.1111905172, 0.1568533229, 0.1813418917)
_WEIGHTS += tuple(reversed(_WEIGHTS))
_NEAR = 0.7
_MOST_ROOTS = 40


def logm(A: torch.Tensor) -> torch.Tensor:
    """Computes the principal logarithms of general square matrices, with the first argument of scipy.linalg.logm:
    exp(X) = A, and the imaginary parts of X's eigenvalues are between -π and π.

    Square roots of the complex Schur form of A, which has up to 1024 rows, bring it near I, where Gauss and Legendre's
    rule integrates the logarithm.

    Args:
        A: (*, n, n), any strides, float32 or complex64; float16 and bfloat16 are computed in float32.

    Returns:
        (*, n, n), complex64 where A is complex or a matrix of the batch has a negative real eigenvalue, and else of A's
        dtype. **The host waits** to know, and after each square root. A singular matrix has inf or nan, as has one that
        holds NaN or infinity. It has gradients of any order, from the logarithm of the block matrix (Aᴴ, G; 0, Aᴴ).

    Raises:
        TypeError: A is no tensor that kernels take: those of the CPU and of float64 are for scipy.linalg.logm.
        RuntimeError: the matrices are not square, or have more than 1024 rows.

    Source: Al-Mohy and Higham, "Improved Inverse Scaling and Squaring Algorithms for the Matrix Logarithm", 2012.

    Example:
        >>> metalcore.logm(torch.tensor([[1.0, 2.0], [0.0, 1.0]], device="mps")).tolist()
        [[0.0, 2.0], [0.0, 0.0]]
    """
    return of_schur_form("logm", A, _logarithm, _Logarithm)


def _logarithm(A):
    T, Z, is_negative = complex_schur(A)
    return Z @ ops.logarithm_triangular(T) @ Z.mH, is_negative


@composed_kernel("logarithm_triangular")
def _(T):
    diagonal = T.diagonal(dim1=-2, dim2=-1)
    diagonal = torch.complex(diagonal.real, torch.where(diagonal.imag == 0, 0.0, diagonal.imag))
    identity = beside(T, torch.eye(T.shape[-1], dtype=T.dtype, device=T.device))
    roots = torch.zeros_like(diagonal.real[..., :1, None])
    for _ in range(_MOST_ROOTS if T.numel() else 0):
        is_far = ((T - identity).abs().sum(-2).amax(-1) > _NEAR)[..., None, None]
        if not host_number(is_far.any(), False):
            break
        T = torch.where(is_far, triangular_root(T), T)
        roots = roots + is_far
    E = T - identity
    nodes = torch.stack([torch.full((), node, device=T.device) for node in _NODES])
    weights = torch.stack([torch.full((), weight, device=T.device) for weight in _WEIGHTS])
    systems = identity + nodes[:, None, None] * E.unsqueeze(-3)
    terms = solve_triangular(systems, E.unsqueeze(-3).expand(systems.shape).contiguous(), upper=True)
    sums = (terms * weights[:, None, None]).sum(-3)
    return (torch.exp2(roots) * sums).triu(1) + diagonal.log().diag_embed()


@fake_kernel("logarithm_triangular")
def _(T):
    return T.new_empty(T.shape)


class _Logarithm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, A):
        X, is_negative = _logarithm(A)
        ctx.save_for_backward(A)
        ctx.mark_non_differentiable(is_negative)
        return X, is_negative

    @staticmethod
    def backward(ctx, grad, _):  # pyright: ignore[reportIncompatibleMethodOverride]
        (A,) = ctx.saved_tensors
        n, Ah = A.shape[-1], A.mH.to(grad.dtype)
        # The block that is wanted is linear in grad. A matrix near I needs no more roots than A.
        with torch.no_grad():
            scale = 4 * grad.abs().sum((-2, -1), keepdim=True).clamp(min=1e-37)
        blocks = torch.cat([torch.cat([Ah, grad / scale], -1), torch.cat([torch.zeros_like(Ah), Ah], -1)], -2)
        X, _ = _Logarithm.apply(blocks) if needs_gradient(blocks) else _logarithm(blocks)
        gradient = X[..., :n, n:] * scale
        return gradient if A.is_complex() else gradient.real


def _by_eigenvalues(A):
    values, vectors = torch.linalg.eig(A)
    logarithm = torch.linalg.solve(vectors, vectors * values.log().unsqueeze(-2), left=False)
    return logarithm if A.is_complex() else logarithm.real


def _near_one(a):
    """Returns matrices that need no square root. Their logarithms are small beside them, and so are less exact."""
    return torch.eye(a.shape[-1]) + a / (3 * a.shape[-1])


register(
    Op(
        "logm",
        logm,
        reference=_by_eigenvalues,
        operators=("schur", "logarithm_triangular", "square_root_triangular", "solve_triangular"),
        waits=True,
        error="linalg.schur takes",
        samples=lambda: (
            Sample("12x12", ((3, 12, 12),), prepare=(_near_one,), terms=4 * 12**2),
            Sample("9x9, complex", ((6, 9, 9),), prepare=(_near_one,), arguments=turned, terms=8 * 9**2),
        ),
    )
)
