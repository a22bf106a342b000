"""PyTorch's own functions: the calls that metalcore does not take, and helpers of the overrides of linear algebra (see
Override). An override returns all results of PyTorch's operator, in the form that its derivative expects.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import _C
from .._core import refused
from .._core.registry import Override
from .._core.routing import accelerated
from .._core.tensors import call_on_cpu
from ._common import raise_errors, write_out

__all__ = ["by_torch", "checked", "factored", "factored_ex", "factors_transpose", "override", "takes", "takes_square"]


def _lacks(*operators):
    """Returns whether PyTorch has no MPS kernel of one of its operators. These are the overloads with `out`, on which
    others are built, and which no override replaces."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return not all(has_kernel(f"aten::{operator}", "MPS") for operator in operators)


_SVD, _EIGH, _LU = "_linalg_svd.U", "_linalg_eigh.eigenvalues", "linalg_lu_factor_ex.out"
_LDL = "linalg_ldl_factor_ex.out"
_NEEDED = {
    torch.cholesky_solve: ("_cholesky_solve_helper",),
    torch.geqrf: ("geqrf.a",),
    torch.lobpcg: (_EIGH,),
    torch.ormqr: ("ormqr.out",),
    torch.pca_lowrank: (_SVD, "linalg_qr.out"),
    torch.svd_lowrank: (_SVD, "linalg_qr.out"),
    torch.linalg.cholesky: ("linalg_cholesky_ex.L",),
    torch.linalg.cholesky_ex: ("linalg_cholesky_ex.L",),
    torch.linalg.cond: (_SVD, "linalg_inv_ex.inverse"),
    torch.linalg.det: ("_linalg_det.result",),
    torch.linalg.eig: ("linalg_eig.out",),
    torch.linalg.eigh: (_EIGH,),
    torch.linalg.eigvals: ("linalg_eig.out", "_linalg_eigvals"),
    torch.linalg.eigvalsh: (_EIGH,),
    torch.linalg.householder_product: ("linalg_householder_product.out",),
    torch.linalg.inv: ("linalg_inv_ex.inverse",),
    torch.linalg.inv_ex: ("linalg_inv_ex.inverse",),
    torch.linalg.ldl_factor: (_LDL,),
    torch.linalg.ldl_factor_ex: (_LDL,),
    torch.linalg.ldl_solve: ("linalg_ldl_solve.out",),
    torch.linalg.lstsq: ("linalg_lstsq.out",),
    torch.linalg.lu: ("linalg_lu.out",),
    torch.linalg.lu_factor: (_LU,),
    torch.linalg.lu_factor_ex: (_LU,),
    torch.linalg.lu_solve: ("linalg_lu_solve.out",),
    torch.linalg.matrix_exp: ("linalg_matrix_exp",),
    torch.linalg.matrix_norm: (_SVD,),  # the orders of singular values
    torch.linalg.matrix_power: ("linalg_inv_ex.inverse",),
    torch.linalg.matrix_rank: (_SVD, _EIGH),
    torch.linalg.multi_dot: (),
    torch.linalg.pinv: (_SVD, _EIGH),
    torch.linalg.qr: ("linalg_qr.out",),
    torch.linalg.slogdet: ("_linalg_slogdet.sign",),
    torch.linalg.solve: ("_linalg_solve_ex.result",),
    torch.linalg.solve_ex: ("_linalg_solve_ex.result",),
    torch.linalg.solve_triangular: ("linalg_solve_triangular.out",),
    torch.linalg.svd: (_SVD,),
    torch.linalg.svdvals: (_SVD,),
    torch.linalg.tensorinv: ("linalg_inv_ex.inverse",),
    torch.linalg.tensorsolve: ("_linalg_solve_ex.result",),
    torch.linalg.vander: (),
}
# This module is imported before the simulated device, which has kernels of its own for all operators.
_ONLY_ON_THE_CPU = {function.__name__ for function, operators in _NEEDED.items() if _lacks(*operators)}


def by_torch(function: Callable, *arguments: Any, out: Any = None, **options: Any) -> Any:
    """Calls a function of PyTorch. Where PyTorch has no MPS kernel for it, `mps` tensors are copied to the CPU and the
    results back, by operations that derivatives and torch.func's transforms pass through."""
    tensors = [value for value in (*arguments, *options.values()) if isinstance(value, Tensor)]
    targets = out if isinstance(out, (tuple, list)) else () if out is None else (out,)
    everything = [*tensors, *(target for target in targets if isinstance(target, Tensor))]
    if (
        function.__name__ not in _ONLY_ON_THE_CPU
        or not tensors
        or not all(tensor.is_mps for tensor in everything)
        or not all(isinstance(target, Tensor) for target in targets)
    ):
        return function(*arguments, **options) if out is None else function(*arguments, **options, out=out)
    results = call_on_cpu(function, *arguments, **options)
    if out is None:
        return results
    written = write_out(function.__name__, out, lambda: results, *tensors)
    return written if isinstance(results, Tensor) else type(results)(written)


DTYPES = frozenset({torch.float32})
_inside = threading.local()


def override(operator, take, *, dtypes=DTYPES, **options) -> Override:
    """Returns the override of an operator of aten. `take` has the operator's arguments, and returns None for those that
    it does not take. For the options see Override."""
    return Override(operator, _outermost(take), dtypes=dtypes, **options)


def _outermost(take):
    """Returns what makes an override's kernel. A plan may choose PyTorch's operator, which is the overridden one. On
    a thread that is inside one of these kernels the previous kernel runs, so that no kernel calls itself."""

    def make(previous, count, decline):
        def kernel(keyset, *args, **kwargs):
            if getattr(_inside, "a_kernel", False):
                _inside.chose_torch = True
                return previous.call_boxed(keyset, *args, **kwargs)
            _inside.a_kernel, _inside.chose_torch = True, False
            calls_on_cpu = _C.calls_on_cpu()
            refused_before = refused.calls()
            try:
                result = take(*args, **kwargs)
                if result is None:
                    return decline(keyset, *args, **kwargs)
            finally:
                _inside.a_kernel = False
            if _C.calls_on_cpu() != calls_on_cpu:
                count.left["a size at which PyTorch's op on the CPU is faster (metalcore.explain tells)"] += 1
            elif _inside.chose_torch and refused.calls() == refused_before:
                count.left["a size at which PyTorch's op is faster (metalcore.explain tells)"] += 1
            else:
                count.ran_since(refused_before)
            return result

        return kernel

    return make


def takes(*tensors):
    return accelerated(*tensors, dtypes=DTYPES) and all(tensor.dim() >= 2 for tensor in tensors)


def takes_square(A, *others):
    return takes(A, *others) and A.shape[-2] == A.shape[-1]


def checked(results, name, check_errors, A):
    """Returns the results, the last of which is info. With `check_errors` it raises PyTorch's error if info is not
    0."""
    if check_errors:
        raise_errors(results[-1], name, A)
    return results


def factored(kind, factor, A, out, *inputs):
    """Returns a namesake's named tuple of what `factor` computes. Its last result, info, is not in the tuple: where it
    is not 0, PyTorch's error is raised. `out` and `inputs` are those of write_out()."""

    def factors():
        *results, info = factor()
        raise_errors(info, _namesake(kind), A)
        return tuple(results)

    return kind(tuple(write_out(kind.__name__, out, factors, *inputs)))


def factored_ex(kind, factor, A, check_errors, out, *inputs):
    """Returns the same with info, for which an error is raised with `check_errors` only."""

    def factors():
        return checked(factor(), _namesake(kind), check_errors, A)

    return kind(tuple(write_out(kind.__name__, out, factors, *inputs)))


def _namesake(kind):
    return kind.__name__.replace("linalg_", "torch.linalg.")


@functools.cache
def factors_transpose(operator, arguments=1):
    """Returns whether this PyTorch's operator factors the transpose of a row-major matrix, which its derivative then
    assumes. All `arguments` arguments of the operator are that matrix."""
    A = torch.tensor([[1.0, 0.5], [0.0, 1.0]], dtype=torch.float32, device="cpu")  # the defaults may differ
    LU = [result for result in operator(*[A] * arguments) if result.shape == A.shape][-1]
    return bool(LU[1, 0])
