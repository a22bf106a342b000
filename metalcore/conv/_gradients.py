"""The derivative of conv2d by image and weight, as an operator that has one itself.

On CUDA, cuDNN's products would be TF32's by default, and some of its sums have another order in each run. What says
otherwise belongs to the process, and not to a call, except for the operators that are used here. So the image's
gradient is a transposed convolution, which takes that as arguments. The weight's is a product of matrices, one of which
is gathered from the image (im2col). It is as accurate as torch.set_float32_matmul_precision says, and by default has
all of float32's bits.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from .._core.operators import autograd, composed_kernel, fake_kernel, ops

__all__ = ["conv2d_backward", "gathered_product", "is_channels_last", "padded", "transposed"]

_GATHERED_BYTES = 256 << 20  # of the image's matrix; more images are multiplied one part after the other
_aten = torch.ops.aten


def is_channels_last(x: Tensor) -> bool:
    """Returns whether an image's channels lie next to each other, and can be told from contiguous ones."""
    return not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)


def padded(x: Tensor, padding: list[int]) -> tuple[Tensor, list[int]]:
    """Returns x with the zeros that stand below and right of it only, and the padding of all sides."""
    top, left, bottom, right = padding
    if (top, left) != (bottom, right):
        x = pad(x, (0, right - left, 0, bottom - top))
    return x, [top, left]


def transposed(grad: Tensor, x: Tensor, weight: Tensor, stride, padding, dilation, groups) -> Tensor:
    """Returns the gradient of the image x, in float32 and in the same order whatever the process has chosen for cuDNN.

    Args:
        padding: two numbers.
    """
    # How many of the image's last rows and columns no window reaches.
    beyond = [
        (x.shape[d + 2] + 2 * padding[d] - dilation[d] * (weight.shape[d + 2] - 1) - 1) % stride[d] for d in range(2)
    ]
    flags = {"benchmark": False, "deterministic": True, "cudnn_enabled": True, "allow_tf32": False}
    return _aten._convolution(
        *(grad, weight, None, stride, padding, dilation), transposed=True, output_padding=beyond, groups=groups, **flags
    )


def gathered_product(grad: Tensor, x: Tensor, weight: Tensor, stride, padding, dilation, groups) -> Tensor:
    """Returns the gradient of the weight: per group, grad as (outputs, places) times the image's windows as (places,
    terms).

    Args:
        padding: four numbers.
    """
    top, left, bottom, right = padding
    windows = pad(x, (left, right, top, bottom)) if any(padding) else x
    for d in range(2):
        windows = windows.unfold(d + 2, dilation[d] * (weight.shape[d + 2] - 1) + 1, stride[d])
        windows = windows if dilation[d] == 1 else windows[..., :: dilation[d]]
    images, channels, *others = windows.shape
    windows = windows.view(images, groups, channels // groups, *others)
    windows = windows.permute(1, 2, 5, 6, 0, 3, 4)  # g c r s n p q
    outputs = grad.view(images, groups, weight.shape[0] // groups, *others[:2]).permute(1, 2, 0, 3, 4)  # g k n p q
    step = max(1, _GATHERED_BYTES // max(windows.numel() // max(images, 1) * x.element_size(), 1))
    if images <= step:
        return _product(outputs, windows).view(weight.shape)
    parts = [
        _product(outputs[:, :, first : first + step], windows[:, :, :, :, first : first + step])
        for first in range(0, images, step)
    ]
    return torch.stack(parts).sum(0).view(weight.shape)


def _product(outputs: Tensor, windows: Tensor) -> Tensor:
    """Computes, for each group, (outputs, places) times the windows as (places, terms)."""
    groups, rows = outputs.shape[:2]
    terms = math.prod(windows.shape[1:4])
    return torch.bmm(outputs.reshape(groups, rows, -1), windows.reshape(groups, terms, -1).mT)


def _laid_as(gradient: Tensor, x: Tensor) -> Tensor:
    return gradient.contiguous(memory_format=torch.channels_last if is_channels_last(x) else torch.contiguous_format)


@composed_kernel("conv2d_backward")
def _(grad, x, weight, stride, padding, dilation, groups, by_x, by_weight):
    whole, symmetric = padded(x, padding)
    if x.is_cuda:
        gx = transposed(grad, whole, weight, stride, symmetric, dilation, groups) if by_x else None
        gw = gathered_product(grad, x, weight, stride, padding, dilation, groups) if by_weight else None
    else:
        gx, gw, _ = _aten.convolution_backward(
            *(grad, whole, weight, None, stride, symmetric, dilation, False, [0, 0], groups), [by_x, by_weight, False]
        )
    if gx is not None and whole is not x:
        gx = gx[..., : x.shape[2], : x.shape[3]]
    gx = x.new_empty(0) if gx is None else _laid_as(gx, x)
    return gx, x.new_empty(0) if gw is None else _laid_as(gw, weight)


@fake_kernel("conv2d_backward")
def _(grad, x, weight, stride, padding, dilation, groups, by_x, by_weight):
    return tuple(
        _laid_as(torch.empty_like(tensor), tensor) if wanted else x.new_empty(0)
        for tensor, wanted in ((x, by_x), (weight, by_weight))
    )


def _save(ctx, inputs, output):
    grad, x, weight, *ctx.options, ctx.by_x, ctx.by_weight = inputs
    ctx.save_for_backward(grad, x, weight)


def _double_backward(ctx, to_x, to_weight):
    """Returns the derivatives of the two gradients. These are linear in grad, and in weight or x, so that their
    derivatives are conv2d and gradients again."""
    grad, x, weight = ctx.saved_tensors
    *options, groups = ctx.options
    wanted = ctx.needs_input_grad
    by_grad = by_x = by_weight = None
    if ctx.by_x:
        if wanted[0]:
            by_grad = _convolved(to_x, weight, options, groups)
        if wanted[2]:
            by_weight = conv2d_backward(grad, to_x, weight, *ctx.options, False, True)[1]
    if ctx.by_weight:
        if wanted[0]:
            more = _convolved(x, to_weight, options, groups)
            by_grad = more if by_grad is None else by_grad + more
        if wanted[1]:
            by_x = conv2d_backward(grad, x, to_weight, *ctx.options, True, False)[0]
    return by_grad, by_x, by_weight, None, None, None, None, None, None


def _convolved(x, weight, options, groups):
    return ops.conv2d(x, weight, None, None, None, *options, groups, "none", is_channels_last(x))


conv2d_backward = autograd("conv2d_backward", _double_backward, _save)
