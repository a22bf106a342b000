"""Losses over rows of logits, forward and both passes through autograd."""

import functools
import math

import torch
import torch.nn.functional as F

import metalcore

from ...harness.case import DTYPES, Comparison, forward_backward, of_all, size_text

# How often a pass over memory reads each array, and writes the gradient.
PASSES = {"forward": (functools.partial, 1, 0), "forward+backward": (forward_backward, 2, 1)}
# Models' vocabularies; GPT-2's makes rows that begin at no multiple of 16 bytes.
TARGETS = {
    (4096, 4096): {"share": 0.85, "speedup": 1.0},
    (32768, 1024): {"share": 0.85, "speedup": 1.0},
    (4096, 32000): {"speedup": 1.0},
    (2048, 50257): {"speedup": 1.0},
    (4096, 128256): {"speedup": 1.0},
}
SHAPES = {"gpu": [*TARGETS], "simulator": [(2048, 1024), (64, 32768)], "quick": [(4, 64)]}


def cases(scale):
    return of_all(case, scale, (cross_entropy, kl_div), PASSES, SHAPES[scale], DTYPES)


def case(op, kind, shape, dtype, scale):
    bind, reads, writes = PASSES[kind]
    ours, theirs, arrays = op(shape, dtype)
    return Comparison(
        name=f"{op.__name__} {kind}",
        shape=size_text(shape),
        dtype=dtype,
        ours=ours,
        theirs=theirs,
        bind=bind,
        inputs=lambda device: (torch.randn(shape, device=device).log_softmax(-1).to(dtype),),
        bytes=(reads * arrays + writes) * math.prod(shape) * dtype.itemsize,
        targets=TARGETS.get(shape, {}) if scale == "gpu" else {},
    )


def cross_entropy(shape, dtype):
    @functools.lru_cache(maxsize=1)
    def target(device):
        return torch.arange(shape[0], device=device) * 7 % shape[1]

    return (
        lambda x: metalcore.cross_entropy(x, target(x.device)),
        lambda x: F.cross_entropy(x, target(x.device)),
        1,
    )


def kl_div(shape, dtype):
    @functools.lru_cache(maxsize=1)
    def target(device):
        return torch.randn(shape, device=device).softmax(-1).to(dtype)

    return (
        lambda x: metalcore.kl_div(x, target(x.device), reduction="batchmean"),
        lambda x: F.kl_div(x, target(x.device), reduction="batchmean"),
        2,
    )
