"""softmax and log_softmax along any dimension."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from .._core.operators import autograd, cpu_kernel, fake_kernel
from .._core.registry import Op, Override, Sample, register
from .._core.routing import INT32_MAX, accelerated, autocast_to_float32, too_many
from .._core.samples import rows

__all__ = ["log_softmax", "softmax"]

_aten = torch.ops.aten


def softmax(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None, *, temperature: float = 1.0) -> torch.Tensor:
    """Computes exp(x) / sum(exp(x)) along a dimension, as torch.softmax.

    The maximum is subtracted first, so that large values do not overflow. A row that has only -inf gives NaN.

    Args:
        x: float32, float16 or bfloat16, any shape and strides. It is computed in float32. Other input, and rows of 2^31
            elements and more, go to PyTorch's op.
        dim: the dimension to normalize.
        dtype: the dtype of the result, to which x is converted first. float32 from a 16-bit x costs no extra pass, and
            is the default if autocast is on.
        temperature: x is divided by this positive number first, at no extra pass.

    Returns:
        A tensor of x's shape, of x's dtype or `dtype`, with gradients of any order.

    Raises:
        IndexError: dim is out of range.
        ValueError: temperature is not positive.

    Example:
        >>> x = torch.zeros(2, 4, device="mps")
        >>> metalcore.softmax(x, dim=-1).tolist()
        [[0.25, 0.25, 0.25, 0.25], [0.25, 0.25, 0.25, 0.25]]
    """
    if temperature == 1.0:
        return _call(_softmax, torch.softmax, x, dim, dtype)
    if not (isinstance(temperature, (float, int)) and 0 < temperature < math.inf):
        raise ValueError(f"softmax: temperature must be a positive number, not {temperature!r}")
    scale = 1.0 / temperature

    def scaled(x, dim, half_to_float):
        return _softmax_scaled(x, dim, half_to_float, scale)

    def by_torch(x, dim, dtype=None):
        return torch.softmax(x / temperature, dim, dtype)

    by_torch.__name__ = "softmax"
    return _call(scaled, by_torch, x, dim, dtype)


def log_softmax(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Computes log(softmax(x)) along a dimension, as torch.log_softmax. Arguments, result and errors are those of
    `softmax`.

    Example:
        >>> x = torch.randn(3, 5, device="mps")
        >>> metalcore.log_softmax(x, dim=-1).shape
        torch.Size([3, 5])
    """
    return _call(_log_softmax, torch.log_softmax, x, dim, dtype)


def _call(op, torch_op, x, dim, dtype):
    if (
        not accelerated(x)
        or not _in_range(dim, x.dim())
        or dtype is not None
        and type(dtype) is not torch.dtype
        or x.numel() > INT32_MAX
        and too_many(x, x.shape[dim])
    ):
        return torch_op(x, dim, dtype=dtype)
    if dtype is None and autocast_to_float32(torch_op.__name__, x):
        dtype = torch.float32
    if dtype is None or dtype == x.dtype:
        return op(x, dim, False)
    if dtype == torch.float32:
        return op(x, dim, True)
    return _call(op, torch_op, x.to(dtype), dim, None)


def _in_range(dim, dims):
    dims = dims or 1  # a scalar counts as one row
    return type(dim) is int and -dims <= dim < dims


def _check_dim(name, dim, dims):
    """Raises what the kernel raises, so that a graph, or a program's file, with a wrong `dim` is refused at once."""
    if not _in_range(dim, dims):
        dims = dims or 1
        raise RuntimeError(f"metalcore::{name}: dim must be in [{-dims}, {dims - 1}], not {dim}")


def _register(name, aten_forward, aten_backward, double_backward):
    # PyTorch's CPU kernels have no half_to_float.
    @cpu_kernel(name)
    def _(x, dim, half_to_float):
        return aten_forward(x.float() if half_to_float else x, dim, False).contiguous()

    @cpu_kernel(f"{name}_backward")
    def _(grad, output, dim, input_dtype):
        return aten_backward(grad, output, dim, output.dtype).to(input_dtype).contiguous()

    @fake_kernel(name)
    def _(x, dim, half_to_float):
        _check_dim(name, dim, x.dim())
        dtype = torch.float32 if half_to_float else x.dtype
        return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)

    @fake_kernel(f"{name}_backward")
    def _(grad, output, dim, input_dtype):
        return torch.empty_like(output, dtype=input_dtype, memory_format=torch.contiguous_format)

    def save(ctx, inputs, output):
        x, ctx.dim, _ = inputs
        ctx.input_dtype = x.dtype
        ctx.save_for_backward(output)

    def backward(ctx, grad):
        (output,) = ctx.saved_tensors
        return gradient(grad, output, ctx.dim, ctx.input_dtype), None, None

    def save_backward(ctx, inputs, output):
        grad, y, ctx.dim, ctx.input_dtype = inputs
        ctx.save_for_backward(grad, y)

    def backward_of_backward(ctx, cotangent):
        grad, y = ctx.saved_tensors
        return *double_backward(cotangent.to(y.dtype), grad, y, ctx.dim), None, None

    gradient = autograd(f"{name}_backward", backward_of_backward, save_backward)
    return autograd(name, backward, save), gradient


# The backward operator is linear in grad. These are the gradients of grad and of the output y, for its cotangent v.


def _softmax_double_backward(v, grad, y, dim):
    vy = (v * y).sum(dim, keepdim=True)
    gy = (grad * y).sum(dim, keepdim=True)
    return y * (v - vy), v * (grad - gy) - grad * vy


def _log_softmax_double_backward(v, grad, y, dim):
    p = y.exp()
    vp = v * p
    return v - vp.sum(dim, keepdim=True), -vp * grad.sum(dim, keepdim=True)


_softmax, _softmax_gradient = _register(
    "softmax", _aten._softmax, _aten._softmax_backward_data, _softmax_double_backward
)
_log_softmax, _ = _register(  # pyright: ignore[reportAssignmentType]
    "log_softmax", _aten._log_softmax, _aten._log_softmax_backward_data, _log_softmax_double_backward
)


@cpu_kernel("softmax_scaled")
def _(x, dim, half_to_float, scale):
    y = (x.float() * scale).softmax(dim)
    return (y if half_to_float else y.to(x.dtype)).contiguous()


@fake_kernel("softmax_scaled")
def _(x, dim, half_to_float, scale):
    _check_dim("softmax_scaled", dim, x.dim())
    dtype = torch.float32 if half_to_float else x.dtype
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def _save_scaled(ctx, inputs, output):
    x, ctx.dim, _, ctx.scale = inputs
    ctx.input_dtype = x.dtype
    ctx.save_for_backward(output)


def _scaled_backward(ctx, grad):
    (output,) = ctx.saved_tensors
    return _softmax_gradient(grad, output, ctx.dim, ctx.input_dtype) * ctx.scale, None, None, None


_softmax_scaled = autograd("softmax_scaled", _scaled_backward, _save_scaled)


def _samples():
    return (
        *rows(lambda name, count, length: Sample(name, ((count, length),), {"dim": -1}, terms=length)),
        Sample("columns", ((64, 1000),), {"dim": 0}, terms=64),
        Sample("in float32", ((64, 1000),), {"dim": -1, "dtype": torch.float32}, terms=1000),
        Sample("empty", ((0, 8),), {"dim": -1}),
    )


def _logits(batch_size=8, vocab_size=50257):
    return Sample("", ((batch_size, vocab_size),), {"dim": -1}, terms=vocab_size)


def _scaled_logits(batch_size=8, vocab_size=50257, temperature=1.0):
    sample = _logits(batch_size, vocab_size)
    if temperature == 1:
        return sample
    # The gradient is a difference of rounded probabilities, divided by the temperature.
    return replace(sample, options={"dim": -1, "temperature": temperature}, roundings=math.ceil(1 / temperature))


def _reference(x, dim, dtype=None, temperature=1.0):
    return torch.softmax(x / temperature, dim, dtype=dtype)


def _op(function, **more):
    name = function.__name__
    return Op(
        name,
        function,
        namesake=f"torch.{name}",
        override=(Override(f"_{name}"), Override(f"_{name}_backward_data")),
        samples=_samples,
        **more,
    )


register(
    _op(
        softmax,
        reference=_reference,
        operators=("softmax", "softmax_backward", "softmax_scaled"),
        production=_scaled_logits,
    )
)
register(_op(log_softmax, operators=("log_softmax", "log_softmax_backward"), production=_logits))
