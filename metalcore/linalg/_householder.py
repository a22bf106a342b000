"""The Householder reflectors of QR: geqrf and the functions that use its results, under LAPACK's names."""

from __future__ import annotations

import torch

from .._core.operators import autograd, cpu_kernel, fake_kernel, needs_gradient, ops
from .._core.registry import Op, Sample, register
from .._core.routing import accelerated
from .._core.samples import turned, well_conditioned
from .._core.tensors import beside
from ._block_reflector import coupling, larfb, larft, unit_lower
from ._common import NUMBERS, Tensors, cast_out, complex_by_torch, in_float32, torch_is_faster, write_out
from ._pytorch import by_torch
from ._triangular import solve_triangular

__all__ = ["geqrf", "householder_product", "ormqr"]


def geqrf(input: torch.Tensor, *, out: Tensors | None = None) -> torch.return_types.geqrf:
    """Computes the Householder reflectors of a QR decomposition, as torch.geqrf: LAPACK's geqrf.

    H_i = I - tau_i v_i v_iᴴ, where v_i is zero above entry i and one at entry i, and H_0 H_1 … R = A. The kernels are
    those of `qr`.

    Args:
        input: (*, m, n), any strides. float32 or complex64; float16 and bfloat16 are computed in float32, and the
            results are cast back. Other input goes to PyTorch's op.
        out: a pair of tensors to write the results to.

    Returns:
        A torch.return_types.geqrf: the named tuple (a, tau). a (*, m, n) has R on and above its diagonal and v_i below
        it, in column i. tau is (*, min(m, n)). They have no gradients, as in PyTorch.

    Raises:
        RuntimeError: `input` has fewer than two dimensions, or `out` does not fit.

    Example:
        >>> reflectors, tau = metalcore.geqrf(torch.randn(5, 3, device="mps"))
        >>> reflectors.shape, tau.shape
        (torch.Size([5, 3]), torch.Size([3]))
    """
    if not accelerated(input, dtypes=NUMBERS) or complex_by_torch("geqrf", (), input):
        return by_torch(torch.geqrf, input, out=out)
    a, tau = cast_out(
        "torch.geqrf", out, lambda: in_float32(ops.geqrf, input), input, dtype=input.dtype, parts=("a", "tau")
    )
    return torch.return_types.geqrf((a, tau))


def householder_product(A: torch.Tensor, tau: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Computes the first columns of a product of Householder reflectors, as torch.linalg.householder_product: LAPACK's
    orgqr.

    Args:
        A: (*, m, n) with m >= n, any strides. It has reflectors below its diagonal, as geqrf returns them. The other
            entries are not read. float32 or complex64; float16 and bfloat16 are computed in float32, and the result
            is cast back. Other input goes to PyTorch's op.
        tau: (*, k) with k <= n, the factors of the reflectors in the first k columns.
        out: a tensor to write the result to.

    Returns:
        (*, m, n), the first n columns of H_0 H_1 … H_{k-1}. It has gradients of any order, those of the compact WY
        form.

    Raises:
        RuntimeError: shapes do not fit each other, or `out` does not fit.

    Example:
        >>> reflectors, tau = metalcore.geqrf(torch.randn(5, 3, device="mps"))
        >>> metalcore.householder_product(reflectors, tau).shape
        torch.Size([5, 3])
    """
    if _torch_takes("householder_product", (), A, tau) or not _have_one_dtype(A, tau, dtypes=NUMBERS):
        return by_torch(torch.linalg.householder_product, A, tau, out=out)
    fits = A.ndim >= 2 and tau.shape[:-1] == A.shape[:-2] and tau.ndim == A.ndim - 1
    if not fits or not A.shape[-2] >= A.shape[-1] >= tau.shape[-1]:
        _refuse(torch.linalg.householder_product, A, tau)
    return cast_out(
        "torch.linalg.householder_product",
        out,
        lambda: in_float32(ops.householder_product, A, tau),
        A,
        tau,
        dtype=A.dtype,
    )


def ormqr(
    input: torch.Tensor,
    tau: torch.Tensor,
    other: torch.Tensor,
    left: bool = True,
    transpose: bool = False,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiplies a product of Householder reflectors and a matrix, as torch.ormqr: LAPACK's ormqr.

    Args:
        input: (*, m, k), any strides. It has reflectors below its diagonal, as geqrf returns them. float32 or
            complex64; float16 and bfloat16 are computed in float32, and the result is cast back. Other input goes to
            PyTorch's op.
        tau: (*, min(m, k)), the factors of the reflectors.
        other: (*, m, n), or (*, n, m) without `left`.
        left: whether to compute Q C or C Q, where C is `other` and Q = H_0 H_1 … is m x m.
        transpose: whether to multiply by Qᴴ in the place of Q.
        out: a tensor to write the result to.

    Returns:
        The product, of `other`'s shape. It has gradients of any order.

    Raises:
        RuntimeError: shapes do not fit each other, or `out` does not fit.

    Example:
        >>> reflectors, tau = metalcore.geqrf(torch.randn(5, 3, device="mps"))
        >>> metalcore.ormqr(reflectors, tau, torch.randn(5, 2, device="mps")).shape
        torch.Size([5, 2])
    """
    if (
        _torch_takes("ormqr", ("left", left), input, tau, other)
        or not _have_one_dtype(input, tau, other, dtypes=NUMBERS)
        or not type(left) is type(transpose) is bool
    ):
        return by_torch(torch.ormqr, input, tau, other, left, transpose, out=out)
    fits = (
        input.ndim == other.ndim >= 2
        and tau.ndim == input.ndim - 1
        and tau.shape[:-1] == input.shape[:-2] == other.shape[:-2]
    )
    if not fits or other.shape[-2 if left else -1] != input.shape[-2] or tau.shape[-1] != min(input.shape[-2:]):
        _refuse(torch.ormqr, input, tau, other, left, transpose)
    tensors = input, tau, other
    multiply = _by_block_reflector if input.is_complex() else ops.ormqr

    def reflect(input, tau, other):
        return multiply(input, tau, other, left, transpose)

    return write_out("ormqr", out, lambda: in_float32(reflect, *tensors), *tensors)


def _by_block_reflector(input, tau, other, left, transpose):
    """Returns what `ormqr` does, for complex numbers, of which its kernels know nothing."""
    V = input[..., : tau.shape[-1]]
    return larfb(V, larft(V, tau), other, left, transpose)


def _torch_takes(op, option, *tensors):
    """Returns whether PyTorch's function takes the call. Its derivative divides by 1 - tau |v|², which may be near
    zero. So a call of real matrices that needs a derivative takes our operator, also where the plan is PyTorch's op."""
    differentiated = any(
        isinstance(tensor, torch.Tensor) and needs_gradient(tensor) and not tensor.is_complex() for tensor in tensors
    )
    return not differentiated and torch_is_faster(op, option, *tensors)


def _have_one_dtype(*tensors, dtypes):
    return accelerated(*tensors, dtypes=dtypes) and all(
        tensor is not None and tensor.dtype is tensors[0].dtype for tensor in tensors
    )


def _refuse(function, *arguments):
    """Raises the error that PyTorch's function raises for such shapes, on any device."""
    function(
        *[torch.empty((), dtype=torch.float32).expand(a.shape) if isinstance(a, torch.Tensor) else a for a in arguments]
    )
    raise RuntimeError(f"{function.__name__}: shapes that do not fit each other")


@cpu_kernel("geqrf")
def _(A):
    return tuple(result.contiguous() for result in torch.geqrf(A))


@fake_kernel("geqrf")
def _(A):
    *batch, m, n = A.shape
    return A.new_empty(A.shape), A.new_empty([*batch, min(m, n)])


@cpu_kernel("householder_product")
def _(A, tau):
    return torch.linalg.householder_product(A, tau).contiguous()


@fake_kernel("householder_product")
def _(A, tau):
    return A.new_empty(A.shape)


@cpu_kernel("ormqr")
def _(input, tau, other, left, transpose):
    return torch.ormqr(input, tau, other, left, transpose).contiguous()


@fake_kernel("ormqr")
def _(input, tau, other, left, transpose):
    return other.new_empty(other.shape)


def _reflectors_backward(grad, A, tau, C, transpose):
    """Returns the gradients of (I - V F Vᴴ) C with respect to A and tau, where F is T = larft(V, tau) or its
    transpose."""
    count = tau.shape[-1]
    V = unit_lower(A, count)
    M = coupling(V, tau)
    T = solve_triangular(M, torch.diag_embed(tau), upper=True, unitriangular=True)
    F = T.mH if transpose else T
    W = V.mH @ C
    grad_FW = -(V.mH @ grad)
    grad_V = C @ (F.mH @ grad_FW).mH - grad @ (F @ W).mH
    grad_F = grad_FW @ W.mH
    # T = M⁻¹ diag(tau) with M = I + diag(tau) S, where S is VᴴV above its diagonal.
    through = solve_triangular(M.mH, grad_F.mH if transpose else grad_F, upper=False, unitriangular=True)
    grad_M = -(through @ T.mH).triu(1)
    grad_S = tau.conj()[..., None] * grad_M
    grad_tau = through.diagonal(dim1=-2, dim2=-1) + (grad_M * (V.mH @ V).conj()).sum(-1)
    grad_V = (grad_V + V @ (grad_S + grad_S.mH)).tril(-1)
    return torch.nn.functional.pad(grad_V, (0, A.shape[-1] - count)), grad_tau


def _geqrf_backward(ctx, grad_a, grad_tau):
    raise NotImplementedError("the derivative for 'geqrf' is not implemented.")


def _save_nothing(ctx, inputs, output):
    pass


def _save_inputs(ctx, inputs, output):
    tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
    ctx.options = inputs[len(tensors) :]
    ctx.save_for_backward(*tensors)


def _householder_product_backward(ctx, grad):
    A, tau = ctx.saved_tensors
    identity = beside(A, torch.eye(*A.shape[-2:], dtype=A.dtype, device=A.device))
    return _reflectors_backward(grad, A, tau, identity, False)


def _ormqr_backward(ctx, grad):
    A, tau, C = ctx.saved_tensors
    left, transpose = ctx.options
    grad_A = grad_tau = grad_C = None
    if ctx.needs_input_grad[2]:
        grad_C = ops.ormqr(A, tau, grad, left, not transpose)
    if ctx.needs_input_grad[0] or ctx.needs_input_grad[1]:  # C Q is (Qᵀ Cᵀ)ᵀ
        if not left:
            grad, C = grad.mT, C.mT
        grad_A, grad_tau = _reflectors_backward(grad, A, tau, C, left == transpose)
    return grad_A, grad_tau, grad_C, None, None


autograd("geqrf", _geqrf_backward, _save_nothing)
autograd("householder_product", _householder_product_backward, _save_inputs)
autograd("ormqr", _ormqr_backward, _save_inputs)


def _nearly_orthogonal(a, *others):
    """Returns reflectors of small numbers, each with a tau of one."""
    return a / 16, torch.ones_like(a[..., 0, :]), *others


register(
    Op(
        "geqrf",
        geqrf,
        namesake="torch.geqrf",
        operators=("geqrf",),
        backward=False,
        samples=lambda: tuple(
            Sample(f"{m}x{n}", ((batch, m, n),), prepare=(well_conditioned,), terms=m)
            for batch, m, n in ((3, 60, 20), (1, 160, 140))
        ),
    )
)
register(
    Op(
        "householder_product",
        householder_product,
        namesake="torch.linalg.householder_product",
        operators=("householder_product", "solve_triangular"),
        edge=tuple,  # reflectors have small numbers, as _nearly_orthogonal makes them
        samples=lambda: tuple(
            Sample(f"{m}x{n}", ((batch, m, n),), arguments=_nearly_orthogonal, terms=m)
            for batch, m, n in ((4, 30, 20), (1, 160, 140))
        ),
    )
)
register(
    Op(
        "ormqr",
        ormqr,
        namesake="torch.ormqr",
        operators=("ormqr", "solve_triangular"),
        edge=tuple,
        samples=lambda: (
            Sample("160x140", ((1, 160, 140), (1, 160, 30)), arguments=_nearly_orthogonal, terms=160),
            Sample(
                "from the right",
                ((3, 30, 20), (3, 10, 30)),
                {"left": False, "transpose": True},
                arguments=_nearly_orthogonal,
                terms=30,
            ),
            Sample(
                "complex",
                ((3, 30, 20), (3, 30, 10)),
                {"transpose": True},
                arguments=lambda a, C: _nearly_orthogonal(*turned(a, C)),
                terms=30,
            ),
        ),
    )
)
