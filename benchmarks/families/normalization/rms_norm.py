"""rms_norm and add_rms_norm with a weight, forward, backward and both, against F.rms_norm (after x + residual)."""

import functools
import math

import torch
import torch.nn.functional as F

import metalcore

from ...harness.case import DTYPES, Comparison, backward, forward_backward, of_all, size_text
from ..activation.softmax import SHAPES, TARGETS

KINDS = {"forward": functools.partial, "backward": backward, "forward+backward": forward_backward}
# Passes over an array of the input's size. rms_norm: x, y; backward grad, x, x.grad. add_rms_norm: x, residual, total,
# y; backward both grads, total, x.grad, which is the residual's too. Numbers per row or per column do not count.
PASSES = {"rms_norm": {"forward": 2, "backward": 3}, "add_rms_norm": {"forward": 4, "backward": 4}}
for _passes in PASSES.values():
    _passes["forward+backward"] = sum(_passes.values())


def ours(x, weight):
    return metalcore.rms_norm(x, weight.shape, weight)


def theirs(x, weight):
    return F.rms_norm(x, weight.shape, weight)


def our_sum(x, residual, weight):
    return metalcore.add_rms_norm(x, residual, weight)


def their_sum(x, residual, weight):
    total = x + residual
    return F.rms_norm(total, weight.shape, weight), total


OPS = {"rms_norm": (ours, theirs), "add_rms_norm": (our_sum, their_sum)}


def cases(scale):
    return of_all(case, scale, OPS, KINDS, SHAPES[scale], DTYPES)


def case(op, kind, shape, dtype, scale):
    arrays = 1 if op == "rms_norm" else 2

    def inputs(device):
        rows = [torch.randn(shape, device=device).to(dtype) for _ in range(arrays)]
        return *rows, torch.randn(shape[-1], device=device).to(dtype)

    return Comparison(
        name=f"{op} {kind}",
        shape=size_text(shape),
        dtype=dtype,
        ours=OPS[op][0],
        theirs=OPS[op][1],
        bind=KINDS[kind],
        inputs=inputs,
        bytes=PASSES[op][kind] * math.prod(shape) * dtype.itemsize,
        variant=None if kind == "backward" else lambda *tensors: explain(op, *tensors).variant,
        targets=TARGETS.get(shape, {}) if scale == "gpu" else {},
    )


def explain(op, *tensors):
    if op == "rms_norm":
        return metalcore.explain(op, *tensors, normalized_shape=tensors[-1].shape)
    return metalcore.explain(op, *tensors)
