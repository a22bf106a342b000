"""Linear algebra with the arguments, results and errors of torch.linalg."""

from ._eigh import eigh, eigvalsh
from ._lowrank import pca_lowrank, svd_lowrank
from ._pinv import pinv
from ._qr import qr
from ._rank import cond, matrix_rank
from ._svd import svd, svdvals

__all__ = [
    "cond",
    "eigh",
    "eigvalsh",
    "matrix_rank",
    "pca_lowrank",
    "pinv",
    "qr",
    "svd",
    "svd_lowrank",
    "svdvals",
]
