"""Convolutions of ResNet-50, MobileNetV3 and ResNeXt, with bias, residual and relu, against PyTorch's.

cuDNN computes those of float32 without TF32, which PyTorch allows it by default: metalcore's are as accurate.
"""

import functools

import torch

import metalcore

from ...harness.case import DTYPES, Comparison, family

# images, channels, size, outputs, window, stride, groups
LAYERS = {
    "gpu": [
        (32, 3, 224, 64, 7, 2, 1),
        (32, 64, 56, 64, 3, 1, 1),
        (32, 256, 14, 1024, 1, 1, 1),
        (1, 256, 14, 256, 3, 1, 1),
        (32, 128, 56, 128, 3, 1, 32),
        (32, 240, 28, 240, 3, 1, 240),
    ],
    "simulator": [(1, 16, 16, 16, 3, 1, 1), (1, 32, 16, 32, 3, 1, 32)],
    "quick": [(1, 8, 5, 8, 3, 1, 1)],
}
FORMATS = {"": torch.contiguous_format, " channels_last": torch.channels_last}
PEAKS = {torch.float32: "matmul_float32", torch.float16: "matmul_bfloat16", torch.bfloat16: "matmul_bfloat16"}


def plain(function, x, weight, bias, residual, **options):
    return function(x, weight, bias, **options)


def block(function, x, weight, bias, residual, **options):
    if function is metalcore.conv2d:
        return function(x, weight, bias, residual=residual, activation="relu", **options)
    return torch.relu(function(x, weight, bias, **options) + residual)


def by_torch(*args, **options):
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=False, allow_tf32=False):
        return torch.nn.functional.conv2d(*args, **options)


@family
def conv(scale):
    return [
        case(kind, name, layer, dtype)
        for kind in (plain, block)
        for name in FORMATS
        for layer in LAYERS[scale]
        for dtype in DTYPES
    ]


def case(kind, name, layer, dtype):
    images, channels, size, outputs, window, stride, groups = layer
    options = {"stride": stride, "padding": window // 2, "groups": groups}
    out = (size - 1) // stride + 1

    def inputs(device):
        shapes = (images, channels, size, size), (outputs, channels // groups, window, window), (outputs,)
        x, weight, bias = (torch.randn(shape, device=device).to(dtype) for shape in shapes)
        residual = torch.randn((images, outputs, out, out), device=device).to(dtype)
        x, weight, residual = (t.contiguous(memory_format=FORMATS[name]) for t in (x, weight, residual))
        return x, weight, bias, residual

    results = images * outputs * out * out
    terms = channels // groups * window * window
    read = images * channels * size * size + outputs * terms + (results if kind is block else 0)
    return Comparison(
        name=("conv2d" if kind is plain else "conv2d + residual + relu") + name,
        shape=f"{images}x{channels}x{size}² to {outputs}, {window}²"
        + (f" by {stride}" if stride > 1 else "")
        + (f", {groups} groups" if groups > 1 else ""),
        dtype=dtype,
        ours=functools.partial(kind, metalcore.conv2d, **options),
        theirs=functools.partial(kind, by_torch, **options),
        inputs=inputs,
        bytes=(read + results) * dtype.itemsize,
        flops=2 * results * terms,
        peak=PEAKS[dtype],
    )
