"""The singular value decomposition."""

from __future__ import annotations

import torch

from .._core.operators import autograd, cpu_kernel, fake_kernel, needs_gradient, ops
from .._core.registry import Op, Sample, register
from .._core.routing import accelerated
from .._core.samples import low_rank, separated, turned
from .._core.tensors import beside
from ._common import (
    NUMBERS,
    Broadened,
    Tensors,
    check_broadening,
    complex_by_torch,
    division,
    in_float32,
    skew,
    without_autocast,
    write_out,
)
from ._pytorch import by_torch, override, takes
from ._results import linalg_svd

# The drivers of torch.linalg.svd on CUDA.
_DRIVERS = ("gesvd", "gesvdj", "gesvda")


def svd(
    A: torch.Tensor,
    full_matrices: bool = True,
    *,
    driver: str | None = None,
    broadening: float = 0.0,
    out: Tensors | None = None,
) -> linalg_svd:
    """Computes the singular value decomposition A = U diag(S) Vh, as torch.linalg.svd: U and Vhᴴ have orthonormal
    columns, S is not negative and descends.

    `metalcore.explain("svd", A.shape, full_matrices=False)` tells which kernels a call runs. On Apple GPUs large single
    matrices go to LAPACK on the CPU, and the host waits for the result.

    Args:
        A: (*, m, n), any strides. float32 or complex64; float16 and bfloat16 are computed in float32, and the results
            are cast back. Other input goes to PyTorch's op.
        full_matrices: whether U is (*, m, m) and Vh (*, n, n). Otherwise, with k = min(m, n), U is (*, m, k) and Vh
            (*, k, n). S is (*, k) in both cases.
        driver: None or, on CUDA, "gesvd", "gesvdj" or "gesvda", as in PyTorch. It has no effect.
        broadening: PyTorch's function has no such argument. Above zero, the derivative is finite for every A. Where it
            divides by x, which is a difference or a sum of singular values or a value itself, it multiplies by the
            Lorentzian x / (x² + d²), with d = broadening * S[0] (Liao et al. 2019, arXiv:1903.09650). Terms with
            |x| >> d change by the factor 1 - (d / x)², and no factor is above 1 / 2d. So functions that do not depend
            on the choice of vectors within the space of a repeated value keep their derivative, up to the squares of
            d over the gaps. 1e-4 suits float32, and 1e-6 float64. Real input of every dtype and device takes it.
        out: three tensors to write U, S and Vh to.

    Returns:
        A torch.return_types.linalg_svd: the named tuple (U, S, Vh). They have gradients of any order, by PyTorch's
        formula (Townsend 2016). The gradients hold for functions that do not depend on the signs of singular vectors,
        or on the phase that complex ones of a pair have in common, or where singular values repeat, on the choice of
        vectors within their space. The derivatives of U and Vh divide by differences of singular values, and for
        matrices that are not square by the values themselves. Where such a divisor is zero, they are infinite or NaN,
        as in PyTorch and unless there is a broadening, while the derivative of S is finite. Columns of U and rows of Vh
        after the first k count as constants.

    Raises:
        ValueError: the broadening is no finite number of at least zero, or A is complex and there is one.
        RuntimeError: A has fewer than two dimensions, PyTorch does not know the driver, or `out` does not fit. A matrix
            that holds NaN or infinity raises nothing, because a check would have to wait for the GPU. Its results are
            NaN.

    Example:
        >>> U, S, Vh = metalcore.svd(torch.randn(5, 3, device="mps"), full_matrices=False)
        >>> U.shape, S.shape, Vh.shape
        (torch.Size([5, 3]), torch.Size([3]), torch.Size([3, 3]))
    """
    broadened = check_broadening("svd", A, broadening)
    if (
        not accelerated(A, dtypes=NUMBERS)
        or type(full_matrices) is not bool
        or driver is not None
        and type(driver) is not str
        or complex_by_torch("svd", ("full_matrices", full_matrices), A)
    ):
        if broadened and needs_gradient(A) and out is None:
            return linalg_svd(_Broadened.apply(A, full_matrices, driver, broadening))
        return by_torch(torch.linalg.svd, A, full_matrices, driver=driver, out=out)
    _check_driver(A, driver)

    def factors(A):
        if broadened and needs_gradient(A):
            return _Broadened.apply(A, full_matrices, driver, broadening)
        return _svd(A, full_matrices, True)

    return linalg_svd(tuple(write_out("linalg_svd", out, lambda: in_float32(factors, A), A)))


def svdvals(A: torch.Tensor, *, driver: str | None = None, out: torch.Tensor | None = None) -> torch.Tensor:
    """Computes the singular values of matrices in descending order, as torch.linalg.svdvals.

    Args:
        A: (*, m, n), as for `svd`.
        driver: as for `svd`.
        out: a tensor to write to.

    Returns:
        (*, min(m, n)). They have gradients of any order. Where values repeat, the first derivative is finite and the
        second is not. If a gradient is needed, the singular vectors are computed as well.

    Raises:
        RuntimeError: as for `svd`.

    Example:
        >>> metalcore.svdvals(torch.tensor([[2.0, 0.0], [0.0, 4.0]], device="mps")).tolist()
        [4.0, 2.0]
    """
    if (
        not accelerated(A, dtypes=NUMBERS)
        or driver is not None
        and type(driver) is not str
        or complex_by_torch("svd", ("compute_uv", needs_gradient(A)), A)
    ):
        return by_torch(torch.linalg.svdvals, A, driver=driver, out=out)
    _check_driver(A, driver)
    return write_out("linalg_svdvals", out, lambda: in_float32(lambda A: _svd(A, False, needs_gradient(A))[1], A), A)


def _check_driver(A, driver):
    if driver is None or A.numel() == 0:
        return
    if not A.is_cuda:
        raise RuntimeError(
            "torch.linalg.svd: keyword argument `driver=` is only supported on CUDA inputs with cuSOLVER backend."
        )
    if driver not in _DRIVERS:
        raise RuntimeError(
            f"torch.linalg.svd: unknown svd driver {driver} in svd_cusolver computation. "
            f"It should be one of {', '.join(_DRIVERS)}."
        )


@cpu_kernel("svd")
def _(A, full_matrices, compute_uv):
    if not compute_uv:
        return A.new_empty(0), torch.linalg.svdvals(A), A.new_empty(0)
    U, S, Vh = torch.linalg.svd(A, full_matrices)
    return U.contiguous(), S, Vh.contiguous()


@fake_kernel("svd")
def _(A, full_matrices, compute_uv):
    *batch, m, n = A.shape
    k = min(m, n)
    S = A.new_empty([*batch, k], dtype=A.dtype.to_real())
    if not compute_uv:
        return A.new_empty(0), S, A.new_empty(0)
    return A.new_empty([*batch, m, m if full_matrices else k]), S, A.new_empty([*batch, n if full_matrices else k, n])


def _save(ctx, inputs, output):
    ctx.compute_uv = inputs[2]
    ctx.save_for_backward(*output)
    ctx.set_materialize_grads(False)


def _backward(ctx, grad_U, grad_S, grad_Vh):
    if not ctx.compute_uv:
        raise RuntimeError("metalcore::svd: the derivative needs U and Vh; use compute_uv=True.")
    return _gradient(*ctx.saved_tensors, grad_U, grad_S, grad_Vh), None, None


class _Broadened(Broadened):
    @staticmethod
    def forward(A, full_matrices, driver, broadening):
        if accelerated(A):
            return ops.svd(A, full_matrices, True)
        return tuple(by_torch(torch.linalg.svd, A, full_matrices, driver=driver))

    @staticmethod
    def backward(ctx, *grads):  # pyright: ignore[reportIncompatibleMethodOverride]
        return _gradient(*ctx.saved_tensors, *grads, ctx.broadening), None, None, None


@without_autocast
def _gradient(U, S, Vh, grad_U, grad_S, grad_Vh, broadening=0.0):
    """Returns the gradient of the reduced A = U diag(S) Vᴴ: U M Vᴴ with M = (skew(Uᴴ grad_U) S + S skew(Vᴴ grad_V)) / E
    + diag(grad_S), where E[i, j] = S[j]² - S[i]². If A is not square, the part of grad_U or grad_V outside of the space
    of U or V, divided by S, is added."""
    U, V = U[..., : S.shape[-1]], Vh.mH[..., : S.shape[-1]]
    # A slice of all is an alias, which autograd's is_grads_batched does not know; narrow() is none.
    grad_U = None if grad_U is None else grad_U.narrow(-1, 0, S.shape[-1])
    grad_V = None if grad_Vh is None else grad_Vh.mH.narrow(-1, 0, S.shape[-1])
    if grad_U is None and grad_V is None:
        return None if grad_S is None else (U * grad_S.unsqueeze(-2)) @ V.mH
    column, row = S.unsqueeze(-1), S.unsqueeze(-2)
    terms = []
    inside_U = inside_V = None
    if grad_U is not None:
        inside_U = U.mH @ grad_U
        terms.append(skew(inside_U) * row)
    if grad_V is not None:
        inside_V = V.mH @ grad_V
        terms.append(column * skew(inside_V))
    # E's two factors divide one after the other, because their product might overflow. E's diagonal divides only zeros.
    identity = beside(S, torch.eye(S.shape[-1], dtype=S.dtype, device=S.device))
    divide = division(S[..., :1, None] if S.shape[-1] else None, broadening)
    M = divide(divide(sum(terms[1:], terms[0]), row - column + identity), row + column + identity)
    if inside_U is not None and U.is_complex():  # the phase that the vectors of a pair have in common changes nothing
        M = M + 1j * divide(inside_U.diagonal(dim1=-2, dim2=-1).imag, S).diag_embed()
    if grad_S is not None:
        M = M + grad_S.diag_embed()
    gradient_V = U @ M
    if inside_U is not None and U.shape[-2] > U.shape[-1]:
        gradient_V = gradient_V + divide(grad_U - U @ inside_U, row)
    gradient = gradient_V @ V.mH
    if inside_V is not None and V.shape[-2] > V.shape[-1]:
        gradient = gradient + divide(U, row) @ (grad_V - V @ inside_V).mH
    return gradient


_svd = autograd("svd", _backward, _save)


# The override of PyTorch's kernel


def _override(A, full_matrices=False, compute_uv=True, *, driver=None):
    return ops.svd(A, full_matrices, compute_uv) if takes(A) and driver is None else None


def _samples(name="", **options):
    return tuple(
        Sample(
            f"{name}{m}x{n}" + ("" if arguments is None else ", complex"),
            ((batch, m, n),),
            options,
            prepare=(separated,),
            terms=max(m, n) ** 2,
            backward=not options.get("full_matrices"),
            arguments=arguments or (lambda *tensors: tensors),
        )
        for batch, m, n, arguments in (
            (7, 20, 12, None),
            (2, 60, 40, None),
            (5, 100, 10, None),
            (1, 140, 140, None),
            (3, 30, 20, turned),
        )
    )


register(
    Op(
        "svd",
        svd,
        namesake="torch.linalg.svd",
        results=lambda factors: (factors.S, low_rank(*factors)),
        operators=("svd",),
        override=(override("_linalg_svd", _override, composite="linalg_svd"),),
        samples=lambda: (*_samples(full_matrices=False), *_samples("full, ", full_matrices=True)[:2]),
    )
)
register(Op("svdvals", svdvals, namesake="torch.linalg.svdvals", operators=("svd",), samples=_samples))
