"""Linear algebra with the arguments, results and errors of torch.linalg."""

from ._cholesky import cholesky, cholesky_ex, cholesky_solve
from ._qr import qr
from ._syrk import syrk

__all__ = ["cholesky", "cholesky_ex", "cholesky_solve", "qr", "syrk"]
