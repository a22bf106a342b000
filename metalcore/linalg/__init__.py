"""Linear algebra with the arguments, results and errors of torch.linalg."""

from ._householder import geqrf, householder_product, larfb, larft, ormqr
from ._qr import qr

__all__ = [
    "geqrf",
    "householder_product",
    "larfb",
    "larft",
    "ormqr",
    "qr",
]
