"""Tensors of numbers with 48 bits, as pairs of float32, for GPUs without float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._operators import double_function, double_matmul, double_sum, joined, split

__all__ = ["Double"]

_Other = Any  # a Double, a tensor, or a number


class Double:
    """A tensor of numbers with 48 bits, each of which is the sum of two float32: `hi`, the float32 next to it, and
    `lo`. It stays on the device of the pairs, which may lack float64.

    Sums of two numbers, products, quotients and roots have relative errors of at most 2^-48, 3.6e-15, and elementwise
    functions of at most 1e-14. Sums of rows and `matmul` have errors of a few 2^-48 of the magnitudes of their terms.
    Numbers have float32's range, 1e38. Below about 1e-24 the rest underflows: there are fewer bits. There are no
    gradients.

    Args:
        x: a float64 tensor on any device, another floating-point tensor, or a number.
        device: where the pairs lie; by default x's device.

    Raises:
        TypeError: x is complex, or is neither a tensor nor a number.

    Example:
        >>> x = metalcore.double.Double(torch.tensor([1.0, 3.0], dtype=torch.float64), device="mps")
        >>> (x / x).double().tolist()
        [1.0, 1.0]
    """

    def __init__(self, x: Tensor | float, device: torch.device | str | None = None):
        if isinstance(x, (int, float)):
            x = torch.tensor(x, dtype=torch.float64, device="cpu")
        if not isinstance(x, Tensor):
            raise TypeError(f"Double: x must be a tensor or a number, not {type(x).__name__}")
        if x.is_complex():
            raise TypeError(f"Double: x must be real, not {str(x.dtype).removeprefix('torch.')}")
        device = x.device if device is None else device
        x = x.detach()
        if x.dtype in (torch.float32, torch.float16, torch.bfloat16):
            high = x.float()
            pairs = torch.stack((high, torch.zeros_like(high)), -1)
        else:
            pairs = split(x.double())
        self.pairs = pairs.to(device)

    @staticmethod
    def of_pairs(pairs: Tensor) -> Double:
        """Returns the Double whose pairs are the last dimension of a float32 tensor (*, 2)."""
        if pairs.dtype != torch.float32 or pairs.ndim == 0 or pairs.shape[-1] != 2:
            raise TypeError(f"Double.of_pairs: pairs must be float32 of shape (*, 2), not {tuple(pairs.shape)}")
        made = Double.__new__(Double)
        made.pairs = pairs
        return made

    hi = property(lambda self: self.pairs[..., 0], doc="The float32 next to each number.")
    lo = property(lambda self: self.pairs[..., 1], doc="What `hi` leaves.")
    shape = property(lambda self: self.pairs.shape[:-1])
    ndim = property(lambda self: self.pairs.ndim - 1)
    device = property(lambda self: self.pairs.device)

    def double(self) -> Tensor:
        """Returns the numbers as a float64 tensor on the CPU."""
        return joined(self.pairs.cpu())

    def float(self) -> Tensor:
        """Returns the numbers as a float32 tensor on the device."""
        return self.hi.contiguous()

    def to(self, device: torch.device | str) -> Double:
        """Returns the numbers on another device."""
        return Double.of_pairs(self.pairs.to(device))

    def __repr__(self):
        return f"Double({self.double()}, device={str(self.device)!r})"

    def __len__(self):
        return len(self.pairs) if self.ndim else 0

    # What only moves numbers moves pairs.

    def __getitem__(self, index: Any) -> Double:
        index = index if isinstance(index, tuple) else (index,)
        whole = (slice(None),) if any(entry is Ellipsis for entry in index) else (..., slice(None))
        return Double.of_pairs(self.pairs[(*index, *whole)])

    def __setitem__(self, index: Any, value: _Other) -> None:
        index = index if isinstance(index, tuple) else (index,)
        whole = (slice(None),) if any(entry is Ellipsis for entry in index) else (..., slice(None))
        self.pairs[(*index, *whole)] = self._like(value).pairs

    def reshape(self, *shape: int) -> Double:
        """Returns the numbers in another shape."""
        return Double.of_pairs(self.pairs.reshape([*shape, 2]))

    def expand(self, *shape: int) -> Double:
        """Returns the numbers broadcast to a shape."""
        return Double.of_pairs(self.pairs.expand(*shape, 2))

    def transpose(self, first: int, second: int) -> Double:
        """Returns the numbers with two dimensions exchanged."""
        return Double.of_pairs(self.pairs.transpose(self._dim(first), self._dim(second)))

    def unsqueeze(self, dim: int) -> Double:
        """Returns the numbers with a new dimension of one."""
        return Double.of_pairs(self.pairs.unsqueeze(dim if dim >= 0 else dim - 1))

    mT = property(lambda self: self.transpose(-2, -1))

    def _dim(self, dim):
        if not -self.ndim <= dim < self.ndim:
            raise IndexError(f"Double: dimension {dim} is out of range for {self.ndim} dimensions")
        return dim % self.ndim

    def _like(self, other):
        return other if isinstance(other, Double) else Double(other, self.device)

    # Arithmetic

    def _with(self, other, name):
        if not isinstance(other, (Double, Tensor, int, float)):
            return NotImplemented
        x, y = torch.broadcast_tensors(self.pairs, self._like(other).pairs)
        return Double.of_pairs(double_function(x, y, name))

    def __add__(self, other: _Other) -> Double:
        return self._with(other, "add")

    def __sub__(self, other: _Other) -> Double:
        return self._with(-other, "add")

    def __mul__(self, other: _Other) -> Double:
        return self._with(other, "mul")

    def __truediv__(self, other: _Other) -> Double:
        return self._with(other, "div")

    def __rsub__(self, other: _Other) -> Double:
        return (-self)._with(other, "add")

    def __rtruediv__(self, other: _Other) -> Double:
        return self._like(other) / self

    __radd__, __rmul__ = __add__, __mul__
    # The operators of tensors leave these to Double.
    __array_priority__ = 1000

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return NotImplemented

    def __neg__(self) -> Double:
        return Double.of_pairs(-self.pairs)

    def abs(self) -> Double:
        """Returns the magnitudes."""
        return Double.of_pairs(self.pairs.where(self.pairs[..., :1] >= 0, -self.pairs))

    __abs__ = abs

    def sqrt(self) -> Double:
        """Returns the square roots."""
        return self._function("sqrt")

    def exp(self) -> Double:
        """Returns e to the power of each number."""
        return self._function("exp")

    def log(self) -> Double:
        """Returns the natural logarithms."""
        return self._function("log")

    def sin(self) -> Double:
        """Returns the sines, which are NaN for numbers beyond 2^23."""
        return self._function("sin")

    def cos(self) -> Double:
        """Returns the cosines, which are NaN for numbers beyond 2^23."""
        return self._function("cos")

    def tan(self) -> Double:
        """Returns the tangents, which are NaN for numbers beyond 2^23."""
        return self.sin() / self.cos()

    def tanh(self) -> Double:
        """Returns the hyperbolic tangents."""
        return self._function("tanh")

    def _function(self, name):
        return Double.of_pairs(double_function(self.pairs, None, name))

    # Comparisons: a number's pair is unique, since lo is at most half of hi's last bit.

    def _compare(self, other, first, second):
        other = self._like(other)
        return first(self.hi, other.hi) | (self.hi == other.hi) & second(self.lo, other.lo)

    def __lt__(self, other: _Other) -> Tensor:
        return self._compare(other, torch.lt, torch.lt)

    def __le__(self, other: _Other) -> Tensor:
        return self._compare(other, torch.lt, torch.le)

    def __gt__(self, other: _Other) -> Tensor:
        return self._compare(other, torch.gt, torch.gt)

    def __ge__(self, other: _Other) -> Tensor:
        return self._compare(other, torch.gt, torch.ge)

    def __eq__(self, other: _Other) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        other = self._like(other)
        return (self.hi == other.hi) & (self.lo == other.lo)

    def __ne__(self, other: _Other) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ~(self == other)

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    # Reductions

    def sum(self, dim: int | None = None) -> Double:
        """Returns the sum over a dimension, or of all numbers."""
        return Double.of_pairs(double_sum(self._rows(dim)))

    def dot(self, other: Double, dim: int | None = -1) -> Double:
        """Returns the sum of the products with `other` over a dimension, or with None over all numbers."""
        x, y = torch.broadcast_tensors(self.pairs, self._like(other).pairs)
        return Double.of_pairs(double_sum(Double.of_pairs(x)._rows(dim), Double.of_pairs(y)._rows(dim)))

    def norm(self, dim: int | None = None) -> Double:
        """Returns the Euclidean norm over a dimension, or of all numbers. Squares have to be in float32's range."""
        return self.dot(self, dim).sqrt()

    def _rows(self, dim):
        if dim is None:
            return self.pairs.reshape(-1, 2)
        return self.pairs.movedim(self._dim(dim), -2)

    def __matmul__(self, other: Double) -> Double:
        return self.matmul(other)

    def matmul(self, other: Double) -> Double:
        """Returns the products of matrices (*, m, k) and (*, k, n), whose batches broadcast; or with a vector of k
        numbers, (*, m)."""
        if other.ndim == 1:
            return Double.of_pairs(self.matmul(other.reshape(-1, 1)).pairs[..., 0, :])
        if self.ndim < 2 or other.ndim < 2:
            raise RuntimeError(
                f"Double.matmul: a and b must be matrices, not of {self.ndim} and {other.ndim} dimensions"
            )
        batch = torch.broadcast_shapes(self.shape[:-2], other.shape[:-2])
        factors = [x.pairs.expand(*batch, *x.pairs.shape[-3:]).reshape(-1, *x.pairs.shape[-3:]) for x in (self, other)]
        product = double_matmul(*factors)
        return Double.of_pairs(product.reshape(*batch, *product.shape[1:]))
