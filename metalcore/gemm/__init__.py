"""Products of matrices."""

from ._grouped import grouped_gemm
from ._matmul import linear, matmul

__all__ = ["grouped_gemm", "linear", "matmul"]
