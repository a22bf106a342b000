"""PyTorch's own functions, for calls that metalcore does not take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._core.tensors import call_on_cpu
from ._common import write_out

__all__ = ["by_torch"]


def _lacks(*operators):
    """Returns whether PyTorch has no MPS kernel of one of its operators. These are the overloads with `out`, on which
    others are built, and which no override replaces."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return not all(has_kernel(f"aten::{operator}", "MPS") for operator in operators)


_SVD, _EIGH, _LU = "_linalg_svd.U", "_linalg_eigh.eigenvalues", "linalg_lu_factor_ex.out"
_NEEDED = {
    torch.cholesky_solve: ("_cholesky_solve_helper",),
    torch.geqrf: ("geqrf.a",),
    torch.ormqr: ("ormqr.out",),
    torch.pca_lowrank: (_SVD, "linalg_qr.out"),
    torch.svd_lowrank: (_SVD, "linalg_qr.out"),
    torch.linalg.cholesky: ("linalg_cholesky_ex.L",),
    torch.linalg.cholesky_ex: ("linalg_cholesky_ex.L",),
    torch.linalg.cond: (_SVD, "linalg_inv_ex.inverse"),
    torch.linalg.det: ("_linalg_det.result",),
    torch.linalg.eigh: (_EIGH,),
    torch.linalg.eigvalsh: (_EIGH,),
    torch.linalg.householder_product: ("linalg_householder_product.out",),
    torch.linalg.inv: ("linalg_inv_ex.inverse",),
    torch.linalg.inv_ex: ("linalg_inv_ex.inverse",),
    torch.linalg.lstsq: ("linalg_lstsq.out",),
    torch.linalg.lu: ("linalg_lu.out",),
    torch.linalg.lu_factor: (_LU,),
    torch.linalg.lu_factor_ex: (_LU,),
    torch.linalg.lu_solve: ("linalg_lu_solve.out",),
    torch.linalg.matrix_rank: (_SVD, _EIGH),
    torch.linalg.pinv: (_SVD, _EIGH),
    torch.linalg.qr: ("linalg_qr.out",),
    torch.linalg.slogdet: ("_linalg_slogdet.sign",),
    torch.linalg.solve: ("_linalg_solve_ex.result",),
    torch.linalg.solve_ex: ("_linalg_solve_ex.result",),
    torch.linalg.solve_triangular: ("linalg_solve_triangular.out",),
    torch.linalg.svd: (_SVD,),
    torch.linalg.svdvals: (_SVD,),
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
