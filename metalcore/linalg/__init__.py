"""Linear algebra with the arguments, results and errors of torch.linalg."""

from ._qr import qr
from ._triangular import solve_triangular

__all__ = [
    "qr",
    "solve_triangular",
]
