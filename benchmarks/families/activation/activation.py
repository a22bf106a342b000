"""Activations of single elements, forward, backward and both through autograd."""

import functools
import math
from inspect import signature

import torch

from metalcore._core.registry import OPS

from ...harness.case import DTYPES, Comparison, backward, forward_backward, of_all, size_text


@functools.cache
def elementwise():
    """{name: (ours, PyTorch's)} of the activations of single elements, in each of their modes. Softmaxes, which have a
    dimension, are not among them, and neither are those of several tensors or halves (gated.py)."""
    return {
        " ".join([op.name, *options.values()]): tuple(
            functools.partial(function, **options) for function in (op.function, op.reference)
        )
        for op in OPS.values()
        if op.function.__module__.startswith("metalcore.activation.")
        and not op.function.__module__.endswith(("._gated", "._biased"))
        and "dim" not in signature(op.function).parameters
        for options in (sample.options for sample in op.samples())
    }


# Passes over an array of the input's size: the kernel reads x (and grad), and writes y (or x.grad).
PASSES = {"forward": (functools.partial, 2), "backward": (backward, 3), "forward+backward": (forward_backward, 5)}
SHAPES = {"gpu": [(4096, 4096), (32768, 1024), (64, 1024)], "simulator": [(1024, 4096)], "quick": [(4, 64)]}
TARGETS = {"share": 0.9, "speedup": 0.98}  # as fast: runs at the memory's limit differ by 2%


def cases(scale):
    return of_all(case, scale, elementwise(), PASSES, SHAPES[scale], DTYPES)


def case(op, kind, shape, dtype, scale):
    bind, passes = PASSES[kind]
    ours, theirs = elementwise()[op]
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
