"""The named tuples that torch.linalg's functions return; _results.pyi has their fields, which PyTorch's stubs lack."""

# pyright: reportAttributeAccessIssue=false

from torch.return_types import (
    linalg_cholesky_ex,
    linalg_eig,
    linalg_eigh,
    linalg_inv_ex,
    linalg_ldl_factor,
    linalg_ldl_factor_ex,
    linalg_lstsq,
    linalg_lu,
    linalg_lu_factor,
    linalg_lu_factor_ex,
    linalg_qr,
    linalg_slogdet,
    linalg_solve_ex,
    linalg_svd,
)

__all__ = [
    "linalg_cholesky_ex",
    "linalg_eig",
    "linalg_eigh",
    "linalg_inv_ex",
    "linalg_ldl_factor",
    "linalg_ldl_factor_ex",
    "linalg_lstsq",
    "linalg_lu",
    "linalg_lu_factor",
    "linalg_lu_factor_ex",
    "linalg_qr",
    "linalg_slogdet",
    "linalg_solve_ex",
    "linalg_svd",
]
