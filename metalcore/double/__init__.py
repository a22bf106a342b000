"""Numbers of 48 bits on GPUs without float64: pairs of float32.

`Double` is a tensor of them. The functions are the operators that it is made of, on tensors whose last dimension has
the pairs.
"""

from __future__ import annotations

from ._double import Double
from ._operators import double_function, double_matmul, double_sum

__all__ = ["Double", "double_function", "double_matmul", "double_sum"]
