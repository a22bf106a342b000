"""The kernels of metalcore.overrides for linear algebra: what _override_kernels.py says, for torch.linalg.

The results are all that PyTorch's operators give, in the form that its derivatives expect.
"""

from __future__ import annotations

import functools
import threading

import torch

from ._core.operators import ops
from ._core.routing import accelerated
from .linalg._common import raise_errors

__all__ = ["DTYPES", "OPERATORS"]

DTYPES = frozenset({torch.float32})
_inside = threading.local()


def _outermost(take):
    """The maker of a kernel for a function with the operator's arguments, which returns None for what it does not take.

    Plans may leave a size to PyTorch's operator, the very one that is overridden: on a thread that is inside one of
    these kernels, it is the previous kernel that runs.
    """

    def make(previous, count, left):
        def kernel(keyset, *args, **kwargs):
            if getattr(_inside, "a_kernel", False):
                _inside.left = True
                return previous.call_boxed(keyset, *args, **kwargs)
            _inside.a_kernel, _inside.left = True, False
            try:
                result = take(*args, **kwargs)
                if result is None:
                    return left(keyset, *args, **kwargs)
            finally:
                _inside.a_kernel = False
            if _inside.left:
                count.left["a size at which PyTorch's op is faster (metalcore.explain tells)"] += 1
            else:
                count.ran += 1
            return result

        return kernel

    return make


def _takes(*tensors):
    return accelerated(*tensors, dtypes=DTYPES) and all(tensor.dim() >= 2 for tensor in tensors)


def _takes_square(A, *others):
    return _takes(A, *others) and A.shape[-2] == A.shape[-1]


def _checked(results, name, check_errors, A):
    if check_errors:
        raise_errors(results[-1], name, A)
    return results


@functools.cache
def _factors_transpose(operator, arguments=1):
    """Whether an operator of this PyTorch factors the transpose of a matrix that lies by rows, as its derivative then
    takes for granted. All its arguments are that matrix."""
    A = torch.tensor([[1.0, 0.5], [0.0, 1.0]], dtype=torch.float32, device="cpu")  # whatever the defaults are
    LU = [result for result in operator(*[A] * arguments) if result.shape == A.shape][-1]
    return bool(LU[1, 0])


def _qr(A, mode="reduced"):
    return ops.qr(A, mode) if _takes(A) and mode in ("reduced", "complete", "r") else None


def _solve_triangular(A, B, *, upper, left=True, unitriangular=False):
    return ops.solve_triangular(A, B, upper, left, unitriangular) if _takes(A, B) else None


def _cholesky(A, *, upper=False, check_errors=False):
    if _takes_square(A):
        return _checked(ops.cholesky_ex(A, upper), "linalg.cholesky_ex", check_errors, A)


def _lu_factor(A, *, pivot=True, check_errors=False):
    if _takes(A):
        return _checked(ops.lu_factor_ex(A, pivot), "torch.linalg.lu_factor_ex", check_errors, A)


def _lu_solve(LU, pivots, B, *, left=True, adjoint=False):
    if _takes_square(LU, B) and LU.shape[:-2] == B.shape[:-2] and LU.shape[-1] == B.shape[-2 if left else -1]:
        return ops.lu_solve(LU, pivots, B, left, adjoint)


def _solve(A, B, *, left=True, check_errors=False):
    is_vector = B.dim() == 1 or B.shape == A.shape[:-1]
    columns = B.unsqueeze(-1) if is_vector else B
    if not (
        _takes_square(A, columns)
        and A.shape[:-2] == columns.shape[:-2]
        and (left or not is_vector)
        and A.shape[-1] == columns.shape[-2 if left else -1]
    ):
        return None
    transpose = _factors_transpose(torch.ops.aten._linalg_solve_ex, arguments=2) and A.is_contiguous()
    if left and not transpose:
        X, LU, pivots, info = ops.solve_ex(A, columns, True, True)
    else:
        LU, pivots, info = ops.lu_factor_ex(A.mT if transpose else A, True)
        X = ops.lu_solve(LU, pivots, columns, left, transpose)
    return _checked((X.squeeze(-1) if is_vector else X, LU, pivots, info), "torch.linalg.solve_ex", check_errors, A)


def _inv(A, *, check_errors=False):
    return _checked(ops.inv_ex(A), "linalg.inv_ex", check_errors, A) if _takes_square(A) else None


def _determinant_of(op, operator):
    def take(A):
        if _takes_square(A):
            return op(A.mT if _factors_transpose(operator) and A.is_contiguous() else A)

    return take


def _eigh(A, UPLO="L", compute_v=True):
    return ops.eigh(A, UPLO, compute_v) if _takes_square(A) and UPLO in ("L", "U") else None


def _svd(A, full_matrices=False, compute_uv=True, *, driver=None):
    return ops.svd(A, full_matrices, compute_uv) if _takes(A) and driver is None else None


# As in _override_kernels.py.
OPERATORS = {
    "qr": [("linalg_qr", False, _outermost(_qr))],
    "solve_triangular": [("linalg_solve_triangular", False, _outermost(_solve_triangular))],
    "cholesky": [("linalg_cholesky_ex", False, _outermost(_cholesky))],
    "lu_factor": [("linalg_lu_factor_ex", False, _outermost(_lu_factor))],
    "lu_solve": [("linalg_lu_solve", False, _outermost(_lu_solve))],
    "solve": [("_linalg_solve_ex", False, _outermost(_solve))],
    "inv": [("linalg_inv_ex", False, _outermost(_inv))],
    "det": [("_linalg_det", False, _outermost(_determinant_of(ops.det, torch.ops.aten._linalg_det)))],
    "slogdet": [("_linalg_slogdet", False, _outermost(_determinant_of(ops.slogdet, torch.ops.aten._linalg_slogdet)))],
    "eigh": [("_linalg_eigh", False, _outermost(_eigh))],
    "svd": [("_linalg_svd", False, _outermost(_svd))],
}
