"""Linear algebra with backward errors of at most 1e-13 on GPUs without float64.

The functions take float64 tensors on the CPU, or Doubles (metalcore.double), and return the like. metalcore.linalg's
kernels compute factors in float32 on the GPU, and products and residuals in pairs of float32 refine them. LAPACK
computes the matrices for which this does not converge, in float64 on the CPU, with a RefinementWarning;
`return_refined=True` returns which matrices the GPU refined. There are no gradients.
"""

from __future__ import annotations

from ._common import RefinementWarning
from ._qr import qr
from ._spectral import eigh, svd
from ._systems import cholesky_solve, inv, lstsq, solve

__all__ = ["RefinementWarning", "cholesky_solve", "eigh", "inv", "lstsq", "qr", "solve", "svd"]
