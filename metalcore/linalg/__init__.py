"""Linear algebra with the arguments, results and errors of torch.linalg."""

from ._cholesky import cholesky, cholesky_ex, cholesky_solve
from ._det import det, slogdet
from ._lstsq import lstsq
from ._lu import lu, lu_factor, lu_factor_ex, lu_solve
from ._qr import qr
from ._solve import inv, inv_ex, solve, solve_ex
from ._syrk import syrk
from ._triangular import solve_triangular, trsm

__all__ = [
    "cholesky",
    "cholesky_ex",
    "cholesky_solve",
    "det",
    "inv",
    "inv_ex",
    "lstsq",
    "lu",
    "lu_factor",
    "lu_factor_ex",
    "lu_solve",
    "qr",
    "slogdet",
    "solve",
    "solve_ex",
    "solve_triangular",
    "syrk",
    "trsm",
]
