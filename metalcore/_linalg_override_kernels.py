"""The kernels of metalcore.overrides for linear algebra: what _override_kernels.py says, for torch.linalg.

The results are all that PyTorch's operators give, in the form that its derivatives expect.
"""

from __future__ import annotations

import functools
import threading

import torch

from ._routing import accelerated, ops
from .linalg._common import raise_errors

__all__ = ["OPERATORS"]

_FLOAT32 = frozenset({torch.float32})
_inside = threading.local()


def _outermost(make):
    """For ops whose plans may leave a size to PyTorch's operator, the very one that is overridden: on a thread that is
    inside one of these kernels, it is the previous kernel that runs."""

    @functools.wraps(make)
    def making(previous):
        kernel = make(previous)

        def guarded(keyset, *args, **kwargs):
            if getattr(_inside, "a_kernel", False):
                return previous.call_boxed(keyset, *args, **kwargs)
            _inside.a_kernel = True
            try:
                return kernel(keyset, *args, **kwargs)
            finally:
                _inside.a_kernel = False
        return guarded
    return making


def _takes(*tensors):
    return accelerated(*tensors, dtypes=_FLOAT32) and all(tensor.dim() >= 2 for tensor in tensors)


def _takes_square(A, *others):
    return _takes(A, *others) and A.shape[-2] == A.shape[-1]


def _checked(results, name, check_errors, A):
    if check_errors:
        raise_errors(results[-1], name, A)
    return results


def _factors_transpose(operator, arguments=1):
    """Whether an operator of this PyTorch factors the transpose of a matrix that lies by rows, as its derivative then
    takes for granted. All its arguments are that matrix."""
    A = torch.tensor([[1.0, 0.5], [0.0, 1.0]], dtype=torch.float32, device="cpu")  # whatever the defaults are
    LU = [result for result in operator(*[A] * arguments) if result.shape == A.shape][-1]
    return bool(LU[1, 0])


@_outermost
def _qr(previous):
    def kernel(keyset, A, mode="reduced"):
        if _takes(A) and mode in ("reduced", "complete", "r"):
            return ops.qr(A, mode)
        return previous.call_boxed(keyset, A, mode)
    return kernel


@_outermost
def _solve_triangular(previous):
    def kernel(keyset, A, B, *, upper, left=True, unitriangular=False):
        if _takes(A, B):
            return ops.solve_triangular(A, B, upper, left, unitriangular)
        return previous.call_boxed(keyset, A, B, upper=upper, left=left, unitriangular=unitriangular)
    return kernel


@_outermost
def _cholesky(previous):
    def kernel(keyset, A, *, upper=False, check_errors=False):
        if _takes_square(A):
            return _checked(ops.cholesky_ex(A, upper), "linalg.cholesky_ex", check_errors, A)
        return previous.call_boxed(keyset, A, upper=upper, check_errors=check_errors)
    return kernel


@_outermost
def _lu_factor(previous):
    def kernel(keyset, A, *, pivot=True, check_errors=False):
        if _takes(A):
            return _checked(ops.lu_factor_ex(A, pivot), "torch.linalg.lu_factor_ex", check_errors, A)
        return previous.call_boxed(keyset, A, pivot=pivot, check_errors=check_errors)
    return kernel


@_outermost
def _lu_solve(previous):
    def kernel(keyset, LU, pivots, B, *, left=True, adjoint=False):
        if _takes_square(LU, B) and LU.shape[:-2] == B.shape[:-2] and LU.shape[-1] == B.shape[-2 if left else -1]:
            return ops.lu_solve(LU, pivots, B, left, adjoint)
        return previous.call_boxed(keyset, LU, pivots, B, left=left, adjoint=adjoint)
    return kernel


@_outermost
def _solve(previous):
    factors_transpose = _factors_transpose(torch.ops.aten._linalg_solve_ex, arguments=2)

    def kernel(keyset, A, B, *, left=True, check_errors=False):
        is_vector = B.dim() == 1 or B.shape == A.shape[:-1]
        columns = B.unsqueeze(-1) if is_vector else B
        if not (_takes_square(A, columns) and A.shape[:-2] == columns.shape[:-2] and (left or not is_vector)
                and A.shape[-1] == columns.shape[-2 if left else -1]):
            return previous.call_boxed(keyset, A, B, left=left, check_errors=check_errors)
        transpose = factors_transpose and A.is_contiguous()
        if left and not transpose:
            X, LU, pivots, info = ops.solve_ex(A, columns, True, True)
        else:
            LU, pivots, info = ops.lu_factor_ex(A.mT if transpose else A, True)
            X = ops.lu_solve(LU, pivots, columns, left, transpose)
        return _checked((X.squeeze(-1) if is_vector else X, LU, pivots, info), "torch.linalg.solve_ex", check_errors, A)
    return kernel


@_outermost
def _inv(previous):
    def kernel(keyset, A, *, check_errors=False):
        if _takes_square(A):
            return _checked(ops.inv_ex(A), "linalg.inv_ex", check_errors, A)
        return previous.call_boxed(keyset, A, check_errors=check_errors)
    return kernel


def _determinant_of(op, operator):
    @_outermost
    def make(previous):
        factors_transpose = _factors_transpose(operator)

        def kernel(keyset, A):
            if _takes_square(A):
                return op(A.mT if factors_transpose and A.is_contiguous() else A)
            return previous.call_boxed(keyset, A)
        return kernel
    return make


@_outermost
def _eigh(previous):
    def kernel(keyset, A, UPLO="L", compute_v=True):
        if _takes_square(A) and UPLO in ("L", "U"):
            return ops.eigh(A, UPLO, compute_v)
        return previous.call_boxed(keyset, A, UPLO, compute_v)
    return kernel


@_outermost
def _svd(previous):
    def kernel(keyset, A, full_matrices=False, compute_uv=True, *, driver=None):
        if _takes(A) and driver is None:
            return ops.svd(A, full_matrices, compute_uv)
        return previous.call_boxed(keyset, A, full_matrices, compute_uv, driver=driver)
    return kernel


# As in _override_kernels.py.
OPERATORS = {
    "qr": [("linalg_qr", False, _qr)],
    "solve_triangular": [("linalg_solve_triangular", False, _solve_triangular)],
    "cholesky": [("linalg_cholesky_ex", False, _cholesky)],
    "lu_factor": [("linalg_lu_factor_ex", False, _lu_factor)],
    "lu_solve": [("linalg_lu_solve", False, _lu_solve)],
    "solve": [("_linalg_solve_ex", False, _solve)],
    "inv": [("linalg_inv_ex", False, _inv)],
    "det": [("_linalg_det", False, _determinant_of(ops.det, torch.ops.aten._linalg_det))],
    "slogdet": [("_linalg_slogdet", False, _determinant_of(ops.slogdet, torch.ops.aten._linalg_slogdet))],
    "eigh": [("_linalg_eigh", False, _eigh)],
    "svd": [("_linalg_svd", False, _svd)],
}
