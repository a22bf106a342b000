"""Linear algebra with the arguments, results and errors of torch.linalg."""

from ._cholesky import cholesky, cholesky_ex, cholesky_solve
from ._lstsq import lstsq
from ._qr import qr
from ._syrk import syrk
from ._triangular import solve_triangular, trsm

__all__ = [
    "cholesky",
    "cholesky_ex",
    "cholesky_solve",
    "lstsq",
    "qr",
    "solve_triangular",
    "syrk",
    "trsm",
]
