"""Gated activations and activations of x + bias, forward, backward and both, against PyTorch's separate ops."""

import functools
import math

import torch
import torch.nn.functional as F

import metalcore

from ...harness.case import DTYPES, Comparison, backward, forward_backward, of_all, size_text

KINDS = {"forward": functools.partial, "backward": backward, "forward+backward": forward_backward}


def tanh(x):
    return F.gelu(x, approximate="tanh")


# Ours, PyTorch's, the tensors that they take (of x's shape, twice as wide, or a row of it), and the passes over an
# array of the result's size: forward gate, up, y; backward grad, gate, up and both gradients. Biases do not count.
OPS = {
    "swiglu": (metalcore.swiglu, lambda gate, up: F.silu(gate) * up, "xx", (3, 5)),
    "geglu": (metalcore.geglu, lambda gate, up: F.gelu(gate) * up, "xx", (3, 5)),
    "geglu tanh": (
        functools.partial(metalcore.geglu, approximate="tanh"),
        lambda gate, up: tanh(gate) * up,
        "xx",
        (3, 5),
    ),
    "silu_and_mul": (
        metalcore.silu_and_mul,
        lambda x: F.silu(x[..., : x.shape[-1] // 2]) * x[..., x.shape[-1] // 2 :],
        "w",
        (3, 5),
    ),
    "bias_gelu": (metalcore.bias_gelu, lambda x, bias: F.gelu(x + bias), "xb", (2, 3)),
    "bias_silu": (metalcore.bias_silu, lambda x, bias: F.silu(x + bias), "xb", (2, 3)),
}
SHAPES = {"gpu": [(4096, 4096), (32768, 1024)], "simulator": [(1024, 1024)], "quick": [(4, 64)]}
TARGETS = {"share": 0.85, "speedup": 1.0}


def cases(scale):
    return of_all(case, scale, OPS, KINDS, SHAPES[scale], DTYPES)


def case(op, kind, shape, dtype, scale):
    ours, theirs, kinds, (forward_passes, backward_passes) = OPS[op]
    sizes = {"x": shape, "w": (shape[0], 2 * shape[1]), "b": shape[1:]}
    passes = ("forward" in kind) * forward_passes + ("backward" in kind) * backward_passes
    return Comparison(
        name=f"{op} {kind}",
        shape=size_text(shape),
        dtype=dtype,
        ours=ours,
        theirs=theirs,
        bind=KINDS[kind],
        inputs=lambda device: tuple(torch.randn(sizes[which], device=device).to(dtype) for which in kinds),
        bytes=passes * math.prod(shape) * dtype.itemsize,
        targets=TARGETS if scale == "gpu" else {},
    )
