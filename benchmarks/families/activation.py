"""silu and gelu, forward, backward and both through autograd."""

import functools
import math

import torch
import torch.nn.functional as F

import metalcore

from ..harness.case import DTYPES, Comparison, backward, forward_backward, size_text

OPS = {
    "silu": (metalcore.silu, F.silu),
    "gelu": (metalcore.gelu, F.gelu),
    "gelu tanh": tuple(functools.partial(gelu, approximate="tanh") for gelu in (metalcore.gelu, F.gelu)),
}
# Passes over an array of the input's size: the kernel reads x (and grad), and writes y (or x.grad).
PASSES = {"forward": (functools.partial, 2), "backward": (backward, 3), "forward+backward": (forward_backward, 5)}
SHAPES = {"gpu": [(4096, 4096), (32768, 1024), (64, 1024)], "simulator": [(1024, 4096)], "quick": [(4, 64)]}
TARGETS = {"share": 0.9, "speedup": 0.98}  # as fast: runs at the memory's limit differ by 2%


def cases(scale):
    return [
        case(op, kind, shape, dtype, scale)
        for op in OPS
        for kind in PASSES
        for shape in SHAPES[scale]
        for dtype in DTYPES
    ]


def case(op, kind, shape, dtype, scale):
    bind, passes = PASSES[kind]
    ours, theirs = OPS[op]
    large = scale == "gpu" and math.prod(shape) >= 1 << 24
    return Comparison(
        name=f"{op} {kind}",
        shape=size_text(shape),
        dtype=dtype,
        ours=ours,
        theirs=theirs,
        bind=bind,
        inputs=lambda device: (torch.randn(shape, device=device).to(dtype),),
        bytes=passes * math.prod(shape) * dtype.itemsize,
        targets=TARGETS if large else {},
    )
