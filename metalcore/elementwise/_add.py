"""x + alpha y."""

from __future__ import annotations

import torch
from torch import Tensor

from .._core.operators import autograd, cpu_kernel, fake_kernel
from .._core.registry import Op, Sample, register
from .._core.routing import alike

__all__ = ["add"]


def add(input: Tensor, other: Tensor, *, alpha: float = 1) -> Tensor:
    """Computes input + alpha * other, as torch.add.

    It is there for programs without PyTorch, and to be compared with on devices. PyTorch's own op is as fast, so that
    it is never overridden.

    Args:
        input, other: float32, float16 or bfloat16, of one dtype, any strides. The shapes broadcast. PyTorch's op takes
            all other input.
        alpha: a number. The product and the sum are rounded once.

    Returns:
        A tensor of the shape that the arguments broadcast to. It has gradients of any order.

    Raises:
        As torch.add.

    Example:
        >>> x = torch.ones(3, device="mps")
        >>> metalcore.add(x, x, alpha=2).tolist()
        [3.0, 3.0, 3.0]
    """
    if type(alpha) not in (int, float) or other is None or not alike(input, other):
        return torch.add(input, other, alpha=alpha)
    if input.shape != other.shape:
        input, other = torch.broadcast_tensors(input, other)
    return _add(input, other, float(alpha))


@cpu_kernel("add")
def _(x, y, alpha):
    return torch.add(x, y, alpha=alpha)


@fake_kernel("add")
def _(x, y, alpha):
    return torch.empty_like(x)


def _save(ctx, inputs, output):
    *_, ctx.alpha = inputs


def _backward(ctx, grad):
    by_y = grad if ctx.alpha == 1 else add(torch.zeros_like(grad), grad, alpha=ctx.alpha)
    return grad, by_y, None


_add = autograd("add", _backward, _save)


register(
    Op(
        "add",
        add,
        namesake="torch.add",
        operators=("add",),
        samples=lambda: (
            Sample("rows", ((64, 1000), (64, 1000)), {"alpha": 0.5}),
            Sample("with a rest", ((1027,), (1027,))),
            Sample("not aligned", ((1003,), (1003,)), arguments=lambda x, y: (x[1:], y[1:])),
            Sample("broadcast", ((5, 1, 40), (30, 1))),
            Sample("empty", ((0, 8), (0, 8))),
        ),
        production=lambda batch_size=2, sequence_length=128, hidden_size=1024: Sample(
            "", ((batch_size, sequence_length, hidden_size),) * 2
        ),
    )
)
