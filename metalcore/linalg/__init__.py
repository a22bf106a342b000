"""Linear algebra with the arguments, results and errors of torch.linalg."""

from ._lstsq import lstsq
from ._qr import qr
from ._triangular import solve_triangular, trsm

__all__ = [
    "lstsq",
    "qr",
    "solve_triangular",
    "trsm",
]
