"""Linear algebra with the arguments, results and errors of torch.linalg."""

# The registry, and the tables that are made of it, have the order in which ops are imported.
# isort: off
from ._tridiagonal import eigh_tridiagonal
from ._triangular import solve_triangular, trsm
from ._qr import qr
from ._cholesky import cholesky, cholesky_ex, cholesky_solve
from ._lu import lu, lu_factor, lu_factor_ex, lu_solve
from ._solve import inv, inv_ex, solve, solve_ex
from ._det import det, slogdet
from ._eigh import eigh, eigvalsh
from ._eig import eig, eigvals
from ._schur import hessenberg, schur
from ._sylvester import solve_sylvester, sqrtm
from ._logm import logm
from ._ldl import ldl_factor, ldl_factor_ex, ldl_solve
from ._matrix_exp import matrix_exp
from ._svd import svd, svdvals
from ._polar import polar
from ._lstsq import lstsq
from ._rank import cond, matrix_rank, pinv
from ._products import matrix_norm, matrix_power, multi_dot, tensorinv, tensorsolve, vander
from ._lobpcg import lobpcg
from ._lowrank import pca_lowrank, svd_lowrank
from ._householder import geqrf, householder_product, ormqr
from ._block_reflector import larfb, larft
from ._syrk import herk, syrk
from ._schur import rsf2csf  # noqa: F401
from . import refined  # noqa: F401

__all__ = [
    "cholesky",
    "cholesky_ex",
    "cholesky_solve",
    "cond",
    "det",
    "eig",
    "eigh",
    "eigh_tridiagonal",
    "eigvals",
    "eigvalsh",
    "geqrf",
    "herk",
    "hessenberg",
    "householder_product",
    "inv",
    "inv_ex",
    "larfb",
    "larft",
    "ldl_factor",
    "ldl_factor_ex",
    "ldl_solve",
    "lobpcg",
    "logm",
    "lstsq",
    "lu",
    "lu_factor",
    "lu_factor_ex",
    "lu_solve",
    "matrix_exp",
    "matrix_norm",
    "matrix_power",
    "matrix_rank",
    "multi_dot",
    "ormqr",
    "pca_lowrank",
    "pinv",
    "polar",
    "qr",
    "schur",
    "slogdet",
    "solve",
    "solve_ex",
    "solve_sylvester",
    "solve_triangular",
    "sqrtm",
    "svd",
    "svd_lowrank",
    "svdvals",
    "syrk",
    "tensorinv",
    "tensorsolve",
    "trsm",
    "vander",
]
