"""softmax and log_softmax over rows, forward, backward and both through autograd."""

import functools
import math

import torch
import torch.nn.functional as F

import metalcore

from ...harness.case import DTYPES, Comparison, backward, forward_backward, of_all, size_text

OPS = {"softmax": (metalcore.softmax, F.softmax), "log_softmax": (metalcore.log_softmax, F.log_softmax)}
# Passes over an array of the input's size: x, y; backward y, grad, x.grad.
PASSES = {"forward": (functools.partial, 2), "backward": (backward, 3), "forward+backward": (forward_backward, 5)}
# 0.98 is as fast as PyTorch: two kernels at the memory's limit are within 2% of each other.
USUAL = {"share": 0.8, "speedup": 0.98}
# GPT-2's vocabulary makes rows that begin at no multiple of 16 bytes. 7 rows are fewer than a GPU's multiprocessors.
TARGETS = {
    (4096, 4096): USUAL,
    (32768, 1024): USUAL,
    (512, 50257): {"speedup": 1.0},
    (2048, 50257): {"speedup": 1.0},
    (7, 1 << 20): {"share": 0.4},
}
SHAPES = {
    "gpu": [*TARGETS, (1024, 128), (256, 65536), (4096, 1001)],
    "simulator": [(16384, 128), (2048, 1024), (512, 4096), (64, 32768)],
    "quick": [(4, 64)],
}


def cases(scale):
    return of_all(case, scale, OPS, PASSES, SHAPES[scale], DTYPES)


def case(op, kind, shape, dtype, scale):
    bind, passes = PASSES[kind]
    ours, theirs = (functools.partial(function, dim=-1) for function in OPS[op])
    return Comparison(
        name=f"{op} {kind}",
        shape=size_text(shape),
        dtype=dtype,
        ours=ours,
        theirs=theirs,
        bind=bind,
        inputs=lambda device: (torch.randn(shape, device=device).to(dtype),),
        bytes=passes * math.prod(shape) * dtype.itemsize,
        variant=None if kind == "backward" else lambda x: metalcore.explain(op, x, dim=-1).variant,
        targets=TARGETS.get(shape, {}) if scale == "gpu" else {},
    )
