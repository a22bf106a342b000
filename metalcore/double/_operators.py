"""The three operators on pairs of float32: functions of elements, sums, and products of matrices."""

from __future__ import annotations

import torch
from torch import Tensor

from .._core.operators import cpu_kernel, fake_kernel, ops
from .._core.registry import Op, Sample, register

__all__ = ["double_function", "double_matmul", "double_sum", "joined", "split"]

_FUNCTIONS = {
    "add": torch.add,
    "mul": torch.mul,
    "div": torch.div,
    "sqrt": torch.sqrt,
    "exp": torch.exp,
    "log": torch.log,
    "sin": torch.sin,
    "cos": torch.cos,
    "tanh": torch.tanh,
}


def split(x: Tensor) -> Tensor:
    """Returns the pairs (*, 2) in float32 that are next to the numbers of a float64 tensor. Infinities and NaN have a
    rest of zero."""
    high = x.float()
    rest = (x - high.double()).float()
    return torch.stack((high, rest.where(high.isfinite(), 0.0)), -1)


def joined(pairs: Tensor) -> Tensor:
    """Returns the float64 numbers of a tensor of pairs (*, 2)."""
    return pairs[..., 0].double() + pairs[..., 1].double()


def _floats(op, **tensors):
    """Returns tensors as float32.

    Raises:
        TypeError: one is no tensor.
    """
    for name, value in tensors.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"metalcore.double.{op}: {name} must be a tensor, not {type(value).__name__}")
    return [value.float() for value in tensors.values()]


def double_function(x: Tensor, y: Tensor | None = None, name: str = "exp") -> Tensor:
    """Computes a function of each number, or of two numbers, to 48 bits.

    Args:
        x: (*, 2), pairs of float32 in the last dimension. 16-bit floats count as float32.
        y: pairs of the same shape, the second argument of "add", "mul" and "div".
        name: "add", "mul", "div", "sqrt", "exp", "log", "sin", "cos" or "tanh". The sine and the cosine of numbers
            beyond 2^23 are NaN.

    Returns:
        Pairs of the shape of x. There are no gradients.

    Raises:
        TypeError: an argument is no tensor.
        RuntimeError: a tensor is not of floats, its last dimension is not 2, shapes differ, or no function of so many
            arguments has this name.

    Example:
        >>> metalcore.double.double_function(torch.tensor([4.0, 0.0], device="mps"), None, "sqrt").tolist()
        [2.0, 0.0]
    """
    [x, *others] = _floats("double_function", x=x, **({} if y is None else {"y": y}))
    return ops.double_function(x, *(others or [None]), name)


@cpu_kernel("double_function")
def _(x, y, name):
    numbers = (joined(x.cpu()),) if y is None else (joined(x.cpu()), joined(y.cpu()))
    return split(_FUNCTIONS[name](*numbers)).to(x.device)


@fake_kernel("double_function")
def _(x, y, name):
    return x.new_empty(x.shape)


def double_sum(x: Tensor, y: Tensor | None = None) -> Tensor:
    """Sums rows of numbers, or of the products of two rows, to 48 bits of the sum of the terms' magnitudes.

    Args:
        x: (*, n, 2), pairs of float32 in the last dimension. 16-bit floats count as float32.
        y: factors of the terms, pairs of the same shape.

    Returns:
        (*, 2). There are no gradients.

    Raises:
        TypeError: an argument is no tensor.
        RuntimeError: a tensor is not of floats, its last dimension is not 2, or shapes differ.

    Example:
        >>> metalcore.double.double_sum(torch.tensor([[1.0, 0.0], [2.0, 0.0]], device="mps")).tolist()
        [3.0, 0.0]
    """
    [x, *others] = _floats("double_sum", x=x, **({} if y is None else {"y": y}))
    return ops.double_sum(x, *(others or [None]))


@cpu_kernel("double_sum")
def _(x, y):
    terms = joined(x.cpu()) if y is None else joined(x.cpu()) * joined(y.cpu())
    return split(terms.sum(-1)).to(x.device)


@fake_kernel("double_sum")
def _(x, y):
    return x.new_empty((*x.shape[:-2], 2))


def double_matmul(a: Tensor, b: Tensor) -> Tensor:
    """Multiplies matrices of numbers, with errors of 2^-48 of the products of the magnitudes.

    Sums are compensated as in Ogita, Rump and Oishi's Dot2 ("Accurate sum and dot product", 2005).

    Args:
        a: (batch, m, k, 2), pairs of float32 in the last dimension, any strides. 16-bit floats count as float32.
        b: (batch, k, n, 2).

    Returns:
        (batch, m, n, 2). There are no gradients.

    Raises:
        TypeError: an argument is no tensor.
        RuntimeError: a tensor is not of floats, or shapes do not fit each other.

    Example:
        >>> a = torch.tensor([[[[3.0, 0.0]]]], device="mps")
        >>> metalcore.double.double_matmul(a, a).flatten().tolist()
        [9.0, 0.0]
    """
    return ops.double_matmul(*_floats("double_matmul", a=a, b=b))


@cpu_kernel("double_matmul")
def _(a, b):
    return split(joined(a.cpu()) @ joined(b.cpu())).to(a.device)


@fake_kernel("double_matmul")
def _(a, b):
    return a.new_empty((a.shape[0], a.shape[1], b.shape[2], 2))


def _pairs(*tensors):
    """Returns pairs whose second floats are below the rounding of the first ones."""
    return tuple(torch.stack((x[..., 0], x[..., 0] * x[..., 1] * 2.0**-28), -1) for x in tensors)


def _positive(x, *others):
    return _pairs(x.abs() + 0.5, *others)


def _reference(function):
    return lambda *arguments, **options: _parts(function(*arguments, **options))


def _parts(numbers):
    high = numbers.float().double()
    return torch.stack((high, numbers - high), -1)


def _sample(name, shapes, terms=1, arguments=_pairs, options=None):
    # A rounding of 2^-48 is far below one of float32, and the parts have those of float32.
    return Sample(name, shapes, options or {}, arguments=arguments, terms=terms)


register(
    Op(
        "double_function",
        double_function,
        reference=_reference(
            lambda x, y=None, name="exp": _FUNCTIONS[name](*(joined(t) for t in (x, y) if t is not None))
        ),
        operators=("double_function",),
        backward=False,
        dtypes=frozenset({torch.float32}),
        edge=tuple,  # pairs have numbers of one magnitude
        samples=lambda: (
            *(
                _sample(name, ((7, 30, 2),), arguments=_positive, options={"name": name})
                for name in list(_FUNCTIONS)[3:]
            ),
            *(
                _sample(name, ((7, 30, 2),) * 2, arguments=_positive, options={"name": name})
                for name in list(_FUNCTIONS)[:3]
            ),
        ),
    )
)
register(
    Op(
        "double_sum",
        double_sum,
        reference=_reference(lambda x, y=None: (joined(x) if y is None else joined(x) * joined(y)).sum(-1)),
        operators=("double_sum",),
        backward=False,
        dtypes=frozenset({torch.float32}),
        edge=tuple,
        samples=lambda: (
            _sample("rows", ((5, 300, 2),), terms=300),
            _sample("products", ((5, 300, 2),) * 2, terms=300),
            _sample("parts of rows", ((2, 9000, 2),), terms=9000),
        ),
    )
)
register(
    Op(
        "double_matmul",
        double_matmul,
        reference=_reference(lambda a, b: joined(a) @ joined(b)),
        operators=("double_matmul",),
        backward=False,
        dtypes=frozenset({torch.float32}),
        edge=tuple,
        samples=lambda: (
            _sample("40x33x50", ((2, 40, 33, 2), (2, 33, 50, 2)), terms=33),
            _sample("columns", ((2, 33, 40, 2), (2, 50, 33, 2)), terms=33, arguments=_transposed),
        ),
    )
)


def _transposed(a, b):
    return tuple(x.transpose(1, 2) for x in _pairs(a, b))
