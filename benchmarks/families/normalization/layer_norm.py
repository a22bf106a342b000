"""layer_norm, add_layer_norm and group_norm with parameters, forward, backward and both, against PyTorch's ops."""

import functools
import math

import torch
import torch.nn.functional as F

import metalcore

from ...harness.case import DTYPES, Comparison, backward, forward_backward, size_text

KINDS = {"forward": functools.partial, "backward": backward, "forward+backward": forward_backward}


def ours(x, weight, bias):
    return metalcore.layer_norm(x, weight.shape, weight, bias)


def theirs(x, weight, bias):
    return F.layer_norm(x, weight.shape, weight, bias)


def their_sum(x, residual, weight, bias):
    total = x + residual
    return F.layer_norm(total, weight.shape, weight, bias), total


GROUPS = 32
# Ours, PyTorch's, how many large tensors they take, and the passes over an array of the input's size forward (x, y;
# with a residual x, residual, total, y) and backward (grad, x, x.grad; with a residual both grads, total, x.grad).
OPS = {
    "layer_norm": (ours, theirs, 1, (2, 3)),
    "add_layer_norm": (metalcore.add_layer_norm, their_sum, 2, (4, 4)),
    "group_norm": (
        lambda x, weight, bias: metalcore.group_norm(x, GROUPS, weight, bias),
        lambda x, weight, bias: F.group_norm(x, GROUPS, weight, bias),
        1,
        (2, 3),
    ),
}
ROWS = {"gpu": [(4096, 4096), (32768, 1024)], "simulator": [(1024, 1024)], "quick": [(4, 64)]}
IMAGES = {
    "gpu": [(8, 320, 64, 64), (16, 512, 32, 32), (2, 1280, 16, 16)],
    "simulator": [(2, 64, 32, 32)],
    "quick": [(2, 64, 4, 4)],
}
TARGETS = {"share": 0.8, "speedup": 1.0}


def cases(scale):
    return [
        case(op, kind, shape, dtype, scale)
        for op in OPS
        for kind in KINDS
        for shape in (IMAGES if op == "group_norm" else ROWS)[scale]
        for dtype in DTYPES
    ]


def case(op, kind, shape, dtype, scale):
    our_op, their_op, arrays, (forward_passes, backward_passes) = OPS[op]
    width = shape[1]
    passes = ("forward" in kind) * forward_passes + ("backward" in kind) * backward_passes

    def inputs(device):
        sizes = [shape] * arrays + [(width,)] * 2
        return tuple(torch.randn(size, device=device).to(dtype) for size in sizes)

    return Comparison(
        name=f"{op} {kind}",
        shape=size_text(shape),
        dtype=dtype,
        ours=our_op,
        theirs=their_op,
        bind=KINDS[kind],
        inputs=inputs,
        bytes=passes * math.prod(shape) * dtype.itemsize,
        targets=({"speedup": 1.0} if op == "group_norm" else TARGETS) if scale == "gpu" else {},
    )
