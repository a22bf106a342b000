"""conv2d: convolutions of images, with what mostly follows them in the same kernel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._core.operators import autograd, cpu_kernel, fake_kernel, needs_gradient
from .._core.registry import Op, Sample, register
from .._core.routing import INT32_MAX, alike, autocast_operands, require_tensors
from .._core.tensors import like
from ..gemm._matmul import ACTIVATIONS, reference_activation
from ..recording import on_meta
from ._gradients import conv2d_backward, is_channels_last, padded

__all__ = ["conv2d", "weight_order"]

_convolve = torch.nn.functional.conv2d


def conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int, int] = 1,
    padding: int | tuple[int, int] | str = 0,
    dilation: int | tuple[int, int] = 1,
    groups: int = 1,
    *,
    scale: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """Computes activation(scale * convolution + bias + residual), as torch.nn.functional.conv2d does without the last
    three.

    The convolution is a product of matrices whose left one is gathered from the input, tile by tile (implicit GEMM).
    Groups with one channel, as depthwise convolutions have, and groups with up to four outputs have kernels of their
    own. Input and weight are read with the strides that they have. 16 bytes are read at a time of a channels_last input
    if the weight is channels_last too. Where units multiply tensors of 16 bits, a window of one pixel at each pixel is
    a product of matrices as matmul's, and channels_last input with packs of 8 channels has tiles of units; contiguous
    input, and then the result, is copied in the other order for that. Sums are float32, in an order that does not
    change from run to run. PyTorch's ops take input that kernels do not, and compute the gradients, on CUDA without
    TF32 and with the same bits on every run. There is no override: PyTorch's own kernels may be faster, which is not
    measured.

    Args:
        input: (N, C, H, W) or (C, H, W): float32, float16 or bfloat16, any strides.
        weight: (K, C / groups, R, S) of the input's dtype, any strides. A weight is copied if its terms have no single
            distance in memory, as those of a slice.
        bias: (K,), or None.
        stride, padding, dilation, groups: as torch.nn.functional.conv2d has them.
        scale: (K,), or None: the factors of channels.
        residual: a tensor that broadcasts to the result's shape, or None.
        activation: "relu", "gelu", "gelu_tanh", "silu" or None. Where autograd needs a derivative, it is an op of its
            own, whose input was rounded to the input's dtype.

    Returns:
        A tensor (N, K, P, Q) or (K, P, Q). It is channels_last if the input or the weight is, or else contiguous. It
        has gradients of any order.

    Raises:
        ValueError: the activation is unknown.
        TypeError: input or weight is no tensor.
        RuntimeError: shapes do not match.

    Example:
        >>> image, weight = torch.randn(1, 3, 8, 8, device="mps"), torch.randn(4, 3, 3, 3, device="mps")
        >>> metalcore.conv2d(image, weight, padding=1, activation="relu").shape
        torch.Size([1, 4, 8, 8])
    """
    if activation not in ACTIVATIONS:
        names = ", ".join(repr(name) for name in ACTIVATIONS)
        raise ValueError(f"conv2d: activation must be one of {names}, not {activation!r}")
    name, apply = ACTIVATIONS[activation]
    input, weight, bias, scale, residual = autocast_operands(input, weight, bias, scale, residual)
    call = call_of(input, weight, scale, bias, residual, stride, padding, dilation, groups)
    if call is None:
        require_tensors("conv2d", optional=True, scale=scale, residual=residual)
        result = _by_torch(input, weight, scale, bias, residual, stride, padding, dilation, groups)
        return apply(result)
    *options, shape = call
    if scale is not None and scale.shape != weight.shape[:1]:
        raise RuntimeError(f"conv2d: scale of shape {list(scale.shape)} does not go with {weight.shape[0]} channels")
    batched = input.dim() == 4
    x = input if batched else input[None]
    if residual is not None:
        residual = residual.expand(shape if batched else shape[1:])
        residual = residual.view_as(residual) if batched else residual[None]
    channels_last = is_channels_last(x) or is_channels_last(weight)
    differentiated = name != "none" and any(map(_needs, (x, weight, bias, scale, residual)))
    fused = "none" if differentiated else name
    result = _conv2d(x, weight, scale, bias, residual, *options, groups, fused, channels_last)
    result = apply(result) if differentiated else result
    return result if batched else result[0]


def _needs(x):
    return x is not None and needs_gradient(x)


def _pair(value):
    """Returns two numbers, or None if it is anything else."""
    if type(value) is int:
        return [value, value]
    if not isinstance(value, (tuple, list)) or len(value) not in (1, 2) or any(type(one) is not int for one in value):
        return None
    return [*value] * (3 - len(value))


def call_of(x, weight, scale, bias, residual, stride, padding, dilation, groups):
    """Returns the operator's stride, padding and dilation, and the shape of its result; None if PyTorch takes the
    call."""
    if weight is None or not alike(x, weight, scale, bias, residual):
        return None
    size, window = x.shape, weight.shape
    if len(size) not in (3, 4) or len(window) != 4 or type(groups) is not int or groups < 1 or weight.numel() == 0:
        return None
    stride, dilation = _pair(stride), _pair(dilation)
    if stride is None or dilation is None or min(*stride, *dilation) < 1:
        return None
    if padding == "same" and stride == [1, 1]:
        total = [d * (n - 1) for d, n in zip(dilation, window[2:])]
        padding = [*(n // 2 for n in total), *(n - n // 2 for n in total)]
    else:
        padding = [0, 0] if padding == "valid" else _pair(padding)
        if padding is None or min(padding) < 0:
            return None
        padding = padding * 2
    channels = window[0]
    if size[-3] != window[1] * groups or channels % groups:
        return None
    if bias is not None and bias.shape != (channels,):
        return None
    images = size[0] if len(size) == 4 else 1
    height, width = _out_sizes(size, window, stride, padding, dilation)
    shape = (images, channels, height, width)
    fits = min(height, width) > 0 and images * channels * height * width <= INT32_MAX
    return (stride, padding, dilation, shape) if fits and all(map(_is_counted, (x, weight, residual))) else None


def _out_sizes(x, weight, stride, padding, dilation):
    """Returns the height and the width of the result for these shapes."""
    height = (x[-2] + padding[0] + padding[2] - dilation[0] * (weight[2] - 1) - 1) // stride[0] + 1
    width = (x[-1] + padding[1] + padding[3] - dilation[1] * (weight[3] - 1) - 1) // stride[1] + 1
    return height, width


def _is_counted(x):
    """Returns whether kernels can count how far the elements of an image are apart."""
    if x is None or x.is_contiguous() and 0 < x.numel() <= INT32_MAX:
        return True
    return sum(stride * max(size - 1, 0) for size, stride in zip(x.shape[-3:], x.stride()[-3:])) <= INT32_MAX


def _by_torch(input, weight, scale, bias, residual, stride, padding, dilation, groups):
    if scale is None:
        result = _convolve(input, weight, bias, stride, padding, dilation, groups)
    else:
        result = _convolve(input, weight, None, stride, padding, dilation, groups) * scale[:, None, None]
        result = result if bias is None else result + bias[:, None, None]
    return result if residual is None else result + residual


def _reference(
    input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1, *, scale=None, residual=None, activation=None
):
    result = _by_torch(input, weight, scale, bias, residual, stride, padding, dilation, groups)
    return reference_activation(ACTIVATIONS[activation][0], result)


def _check(x, weight, stride, padding, dilation, groups, activation):
    """Returns what the operator's kernels check."""
    if x.dim() != 4 or weight.dim() != 4 or x.shape[1] != groups * weight.shape[1] or weight.shape[0] % groups:
        raise RuntimeError(
            f"metalcore::conv2d: x of shape {list(x.shape)} does not go with weight of shape {list(weight.shape)} in "
            f"{groups} groups"
        )
    if (len(stride), len(padding), len(dilation)) != (2, 4, 2) or min(*stride, *dilation) < 1 or min(padding) < 0:
        raise RuntimeError("metalcore::conv2d: stride and dilation must be 2 numbers from 1 on, padding 4 from 0 on")
    if activation not in {name for name, _ in ACTIVATIONS.values()}:
        raise RuntimeError(f"metalcore::conv2d: activation must not be {activation!r}")
    sizes = _out_sizes(x.shape, weight.shape, stride, padding, dilation)
    if min(sizes) < 1:
        raise RuntimeError(f"metalcore::conv2d: weight of shape {list(weight.shape)} does not fit into {list(x.shape)}")
    return (x.shape[0], weight.shape[0], *sizes)


@cpu_kernel("conv2d")
def _(x, weight, scale, bias, residual, stride, padding, dilation, groups, activation, channels_last):
    _check(x, weight, stride, padding, dilation, groups, activation)
    wide = torch.promote_types(x.dtype, torch.float32)
    tensors = [None if t is None else t.to(wide) for t in (weight, scale, bias, residual)]
    whole, padding = padded(x.to(wide), padding)
    result = _by_torch(whole, *tensors, stride, padding, dilation, groups)  # pyright: ignore[reportCallIssue]
    result = reference_activation(activation, result).to(x.dtype)
    return result.contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)


@fake_kernel("conv2d")
def _(x, weight, scale, bias, residual, stride, padding, dilation, groups, activation, channels_last):
    images, channels, height, width = shape = _check(x, weight, stride, padding, dilation, groups, activation)
    return x.new_empty((images, height, width, channels)).permute(0, 3, 1, 2) if channels_last else x.new_empty(shape)


def _save(ctx, inputs, output):
    x, weight, scale, bias, residual, *ctx.options, ctx.groups, ctx.activation, _ = inputs
    ctx.presence = bias is not None, residual is not None
    ctx.save_for_backward(x, weight, scale)


def _backward(ctx, grad):
    if ctx.activation != "none":
        raise RuntimeError("metalcore::conv2d has a derivative only without an activation")
    x, weight, scale = ctx.saved_tensors
    by_x = by_weight = by_scale = None
    wanted = ctx.needs_input_grad
    if wanted[0] or wanted[1]:
        scaled = grad if scale is None else grad * scale[:, None, None]
        by_x, by_weight = conv2d_backward(scaled, x, weight, *ctx.options, ctx.groups, wanted[0], wanted[1])
        by_x = like(by_x, x) if wanted[0] else None
        by_weight = like(by_weight, weight) if wanted[1] else None
    if scale is not None and wanted[2]:
        products = _conv2d(x, weight, None, None, None, *ctx.options, ctx.groups, "none", is_channels_last(x))
        by_scale = (grad * products).sum((0, 2, 3))
    by_bias = grad.sum((0, 2, 3)) if wanted[3] and ctx.presence[0] else None
    by_residual = grad if wanted[4] and ctx.presence[1] else None
    return by_x, by_weight, by_scale, by_bias, by_residual, None, None, None, None, None, None


_conv2d = autograd("conv2d", _backward, _save)


def weight_order(
    x: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    channels_last: bool,
) -> tuple[int, ...] | None:
    """Returns the order of the weight's dimensions, from the outermost one on, in which units that multiply tensors
    take it, or else in which its kernel reads 16 bytes at a time (csrc/ops/conv/plan.cpp). None if the kernel gains
    nothing by that.

    Args:
        x: (N, C, H, W), and weight: (K, C / groups, R, S), for their shapes, strides, dtype and device.
        stride, padding, dilation, groups: those of the operator.
        channels_last: whether the result is.
    """
    outputs, channels = weight.shape[0] // groups, weight.shape[1]
    pack = 16 // weight.element_size()
    if groups > 1 and channels == 1 or outputs <= 4:
        return (2, 3, 1, 0) if channels == outputs == 1 and channels_last else None
    if weight.element_size() == 2:
        on_device = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        packed = torch.empty(weight.shape, dtype=weight.dtype, device="meta", memory_format=torch.channels_last)
        with on_meta(x.device.type) as recorder:
            options = (stride, padding, dilation, groups, "none", channels_last)
            torch.ops.metalcore.conv2d(on_device, packed, None, None, None, *options)
        if any("_unit_" in kernel for kernel in recorder.recording.kernels):
            return 0, 2, 3, 1
    terms = (2, 3, 1) if x.stride(1) == 1 and channels % pack == 0 else (1, 2, 3)
    return (*terms, 0) if outputs % pack == 0 else (0, *terms)


def _channels_last(x, weight, *others):
    """Returns x and weight channels_last, from tensors whose dimensions lie in memory in that order."""
    return x.permute(0, 3, 1, 2), weight.permute(0, 3, 1, 2), *others


def _channels_inside(x, weight, *others):
    """Returns a channels_last x, and a weight whose outputs lie next to each other."""
    return x.permute(0, 3, 1, 2), weight.permute(3, 2, 0, 1), *others


def _samples() -> tuple[Sample, ...]:
    return (
        Sample("tiles", ((2, 5, 9, 8), (70, 5, 3, 3), (70,)), {"padding": 1}, terms=144),
        Sample("groups", ((1, 12, 7, 9), (16, 6, 3, 2)), {"groups": 2, "stride": 2, "dilation": 2}, terms=36),
        Sample("same", ((6, 8, 7), (8, 6, 4, 3), (8,)), {"padding": "same"}, terms=72),
        Sample("channels last", ((2, 6, 7, 16), (24, 3, 3, 16), (24,)), {"padding": (0, 2)}, _channels_last, terms=144),
        Sample("outputs last", ((1, 6, 7, 8), (2, 2, 8, 16)), {"stride": (2, 1)}, _channels_inside, terms=72),
        Sample("depthwise", ((2, 5, 8, 9), (5, 1, 3, 3), (5,)), {"groups": 5, "padding": 1}, terms=90),
        Sample(
            "depthwise, channels last",
            ((1, 7, 9, 8), (3, 3, 1, 8)),
            {"groups": 8, "stride": 2},
            _channels_inside,
            terms=12,
        ),
        Sample("few outputs", ((1, 6, 7, 8), (3, 6, 2, 3)), terms=36),
        Sample("silu", ((1, 8, 7, 8), (8, 8, 1, 1)), {"activation": "silu"}, terms=56, roundings=2),
        Sample("no images", ((0, 3, 5, 5), (4, 3, 2, 2))),
    )


def _production(images: int = 1, channels: int = 64, size: int = 28, outputs: int = 64) -> Sample:
    shapes = ((images, channels, size, size), (outputs, channels, 3, 3), (outputs,))
    return Sample("", shapes, {"padding": 1}, terms=9 * channels * max(1, size))


register(
    Op(
        "conv2d",
        conv2d,
        namesake="torch.nn.functional.conv2d",
        reference=_reference,
        operators=("conv2d", "conv2d_backward"),
        samples=_samples,
        production=_production,
    )
)
