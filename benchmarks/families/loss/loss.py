"""Losses over rows of logits, forward and both passes through autograd."""

import functools

import torch
import torch.nn.functional as F

import metalcore

from ...harness.case import KINDS, RowsOp, family, over_rows

# Models' vocabularies; GPT-2's makes rows that begin at no multiple of 16 bytes.
TARGETS = {
    (4096, 4096): {"share": 0.85, "speedup": 1.0},
    (32768, 1024): {"share": 0.85, "speedup": 1.0},
    (4096, 32000): {"speedup": 1.0},
    (2048, 50257): {"speedup": 1.0},
    (4096, 128256): {"speedup": 1.0},
}
SHAPES = {"gpu": [*TARGETS], "simulator": [(2048, 1024), (64, 32768)], "quick": [(4, 64)]}


# Both sides' devices may differ.
@functools.lru_cache(maxsize=2)
def classes(shape, device):
    return torch.arange(shape[0], device=device) * 7 % shape[1]


@functools.lru_cache(maxsize=2)
def probabilities(shape, dtype, device):
    return torch.randn(shape, device=device).softmax(-1).to(dtype)


def of_classes(function):
    return lambda x: function(x, classes(x.shape, x.device))


def of_probabilities(function):
    return lambda x: function(x, probabilities(x.shape, x.dtype, x.device), reduction="batchmean")


# A pass reads each array, and the gradient is written.
OPS = {
    "cross_entropy": RowsOp(
        ours=of_classes(metalcore.cross_entropy), theirs=of_classes(F.cross_entropy), tensors="l", passes=(1, 2)
    ),
    "kl_div": RowsOp(
        ours=of_probabilities(metalcore.kl_div), theirs=of_probabilities(F.kl_div), tensors="l", passes=(2, 3)
    ),
}


@family
def loss(scale):
    """Losses over rows of logits, forward and both passes through autograd."""
    kinds = {kind: KINDS[kind] for kind in ("forward", "forward+backward")}
    return over_rows(scale, OPS, SHAPES, lambda shape: TARGETS.get(shape, {}), kinds)
