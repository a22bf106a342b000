"""Products of matrices."""

from ._grouped import grouped_gemm
from ._joined import joined_linear
from ._matmul import linear, matmul

__all__ = ["grouped_gemm", "joined_linear", "linear", "matmul"]
