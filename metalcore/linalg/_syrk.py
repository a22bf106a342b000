"""The symmetric and the Hermitian rank-k update."""

from __future__ import annotations

import torch
from torch.compiler import is_compiling

from .._core.operators import autograd, cpu_kernel, fake_kernel, ops
from .._core.registry import Op, Sample, register
from .._core.routing import accelerated, on_cuda
from .._core.samples import turned
from ._common import check_types, in_float32, plan_is_torch, torch_is_faster, without_autocast

_PARTS = {"full": lambda x: x, "lower": torch.tril, "upper": torch.triu}


def syrk(
    A: torch.Tensor,
    C: torch.Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    transpose: bool = False,
    triangle: str = "full",
) -> torch.Tensor:
    """Computes alpha A Aᵀ + beta C, or alpha Aᵀ A + beta C: the symmetric rank-k update, BLAS's syrk, as a new tensor.

    The kernel computes one triangle of the product in tiles of 64 x 64, and mirrors it if both are wanted. On NVIDIA
    GPUs PyTorch's matmul computes the product, because it is faster there.

    Args:
        A: (*, n, k), any strides; (*, k, n) with `transpose`. float32; float16 and bfloat16 are computed in float32,
            and the result is cast back. Other input goes to PyTorch's matmul.
        C: the matrix to add, broadcast to (*, n, n). The result is symmetric only if C is. None adds nothing.
        alpha, beta: factors of the product and of C. C is not read if beta is 0, and A is not read if alpha is 0.
        transpose: whether to compute Aᵀ A.
        triangle: "full", "lower" or "upper": the part of the result that is wanted. The other entries are zeros.

    Returns:
        (*, n, n). It has gradients of any order with respect to A and C.

    Raises:
        TypeError: A or C is not a tensor, or `transpose` is not a bool.
        RuntimeError: `triangle` is unknown, A has fewer than two dimensions, or C does not broadcast.

    Example:
        >>> metalcore.syrk(torch.ones(2, 3, device="mps")).tolist()
        [[3.0, 3.0], [3.0, 3.0]]
    """
    if (
        C is None
        and alpha == 1
        and triangle == "full"
        and isinstance(transpose, bool)
        and torch_is_faster("syrk", ("transpose", transpose), A)
        and not torch.is_autocast_enabled("cuda")
    ):
        return _product(A, transpose)  # the result of _composed, without its other steps
    _check("syrk", A, C, transpose, triangle)
    alpha, beta = float(alpha), float(beta)
    C = _as_wide(C, A, transpose)
    if not accelerated(A, C) or C is not None and C.dtype != A.dtype:
        return _composed(A, C, triangle, transpose, alpha, beta)

    def update(A, C=None):
        # On NVIDIA GPUs PyTorch's matmul takes all sizes. A compiled graph cannot ask for the plan.
        by_torch = on_cuda(A) and (is_compiling() or plan_is_torch("syrk", ("transpose", transpose), A))
        return (_composed if by_torch else ops.syrk)(A, C, triangle, transpose, alpha, beta)

    return in_float32(update, A) if C is None else in_float32(update, A, C)


def herk(
    A: torch.Tensor,
    C: torch.Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    transpose: bool = False,
    triangle: str = "full",
) -> torch.Tensor:
    """Computes alpha A Aᴴ + beta C, or alpha Aᴴ A + beta C: the Hermitian rank-k update, BLAS's herk, as a new tensor.

    For real matrices it is `syrk`. PyTorch's matmul computes the product of complex ones.

    Args:
        A: (*, n, k), any strides; (*, k, n) with `transpose`.
        C: the matrix to add, broadcast to (*, n, n). The result is Hermitian only if C is. None adds nothing.
        alpha, beta: real factors of the product and of C. C is not read if beta is 0, and A is not read if alpha is 0.
        transpose: whether to compute Aᴴ A.
        triangle: "full", "lower" or "upper": the part of the result that is wanted. The other entries are zeros.

    Returns:
        (*, n, n). The diagonal of alpha A Aᴴ is real. It has gradients of any order with respect to A and C.

    Raises:
        TypeError: A or C is not a tensor, or `transpose` is not a bool.
        RuntimeError: `triangle` is unknown, A has fewer than two dimensions, or C does not broadcast.

    Example:
        >>> metalcore.herk(torch.tensor([[1j, 2.0]], device="mps")).tolist()
        [[(5+0j)]]
    """
    _check("herk", A, C, transpose, triangle)
    if not A.is_complex():
        return syrk(A, C, alpha=alpha, beta=beta, transpose=transpose, triangle=triangle)
    return _composed(A, _as_wide(C, A, transpose), triangle, transpose, float(alpha), float(beta), True)


def _check(name, A, C, transpose, triangle):
    if triangle not in _PARTS:
        raise RuntimeError(f"{name}: triangle must be 'full', 'lower' or 'upper', not {triangle!r}")
    check_types(
        name, ("A", A, torch.Tensor), ("C", A if C is None else C, torch.Tensor), ("transpose", transpose, bool)
    )
    if A.dim() < 2:
        raise RuntimeError(f"{name}: A must have at least 2 dimensions, but has {A.dim()}")


def _as_wide(C, A, transpose):
    """Returns C with the result's shape."""
    n = A.shape[-1 if transpose else -2]
    return None if C is None else C.expand([*A.shape[:-2], n, n])


def _product(A, transpose, conjugate=False):
    if conjugate:
        product = A.mH @ A if transpose else A @ A.mH
        return product - 1j * torch.diag_embed(product.diagonal(dim1=-2, dim2=-1).imag)
    return A.mT @ A if transpose else A @ A.mT


@cpu_kernel("syrk")
@without_autocast
def _composed(A, C, triangle, transpose, alpha, beta, conjugate=False):
    product = _product(A, transpose, conjugate)
    result = product if alpha == 1 else alpha * product if alpha != 0 else torch.zeros_like(product)
    return _PARTS[triangle](result if C is None or beta == 0 else result + beta * C).contiguous()


@fake_kernel("syrk")
def _(A, C, triangle, transpose, alpha, beta):
    n = A.shape[-1 if transpose else -2]
    return A.new_empty([*A.shape[:-2], n, n])


def _save(ctx, inputs, output):
    A, _, *ctx.options = inputs
    ctx.save_for_backward(A)


def _backward(ctx, grad):
    (A,) = ctx.saved_tensors
    triangle, transpose, alpha, beta = ctx.options
    grad = _PARTS[triangle](grad)
    grad_A = grad_C = None
    if ctx.needs_input_grad[0]:
        symmetric = alpha * (grad + grad.mT)
        grad_A = A @ symmetric if transpose else symmetric @ A
    if ctx.needs_input_grad[1]:
        grad_C = beta * grad
    return grad_A, grad_C, None, None, None, None


autograd("syrk", _backward, _save)


def _as_a_product(A, C=None, *, alpha=1.0, beta=1.0, transpose=False, triangle="full"):
    product = alpha * (A.mT @ A if transpose else A @ A.mT)
    return _PARTS[triangle](product if C is None else product + beta * C)


def _as_a_hermitian_product(A, C=None, *, alpha=1.0, beta=1.0, transpose=False, triangle="full"):
    product = alpha * (A.mH @ A if transpose else A @ A.mH)
    return _PARTS[triangle](product if C is None else product + beta * C)


register(
    Op(
        "syrk",
        syrk,
        reference=_as_a_product,
        operators=("syrk",),
        edge=tuple,  # float16 does not hold large squares
        samples=lambda: (
            Sample("70x40", ((3, 70, 40),), terms=70),
            Sample("150x40, added", ((3, 150, 40), (150, 150)), {"alpha": 0.1, "beta": 0.5}, terms=150, roundings=2),
            Sample("lower, transposed", ((3, 40, 70),), {"transpose": True, "triangle": "lower"}, terms=70),
        ),
    )
)
register(
    Op(
        "herk",
        herk,
        reference=_as_a_hermitian_product,
        operators=("syrk",),
        edge=tuple,  # float16 does not hold large squares
        samples=lambda: (
            Sample("70x40", ((3, 70, 40),), terms=70),
            Sample("complex", ((4, 70, 40),), {"transpose": True, "alpha": 0.5}, arguments=turned, terms=70),
        ),
    )
)
