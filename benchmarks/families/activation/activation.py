"""Activations: of single elements, gated or of x + bias, and softmax over rows."""

import functools
import math
from inspect import signature

import torch.nn.functional as F

import metalcore
from metalcore._core.registry import OPS

from ...harness.case import RowsOp, family, over_rows

# 0.98 is as fast as PyTorch: two kernels at the memory's limit are within 2% of each other.
AS_FAST = 0.98


@functools.cache
def elementwise():
    """Returns {name: op} of the activations of single elements, in each of their modes. Softmaxes, which have a
    dimension, are not among them, and neither are those of several tensors or halves."""
    return {
        " ".join([op.name, *options.values()]): RowsOp(
            ours=functools.partial(op.function, **options), theirs=functools.partial(op.reference, **options)
        )
        for op in OPS.values()
        if op.family == "activation"
        and not op.function.__module__.endswith(("._gated", "._biased"))
        and "dim" not in signature(op.function).parameters
        for options in (sample.options for sample in op.samples())
    }


@family
def activation(scale):
    """Times activations of single elements, forward, backward and both through autograd."""
    shapes = {"gpu": [(4096, 4096), (32768, 1024), (64, 1024)], "simulator": [(1024, 4096)], "quick": [(4, 64)]}

    def targets(shape):
        return {"share": 0.9, "speedup": AS_FAST} if math.prod(shape) >= 1 << 24 else {}

    return over_rows(scale, elementwise(), shapes, targets)


def halves(x):
    return x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]


def tanh(x):
    return F.gelu(x, approximate="tanh")


def gate(ours, theirs, tensors="xx"):
    """Counts the elements that are moved. Forward: gate, up, y; backward: grad, gate, up and both gradients."""
    return RowsOp(ours=ours, theirs=theirs, tensors=tensors, passes=(3, 5))


GATED = {
    "swiglu": gate(metalcore.swiglu, lambda gate, up: F.silu(gate) * up),
    "geglu": gate(metalcore.geglu, lambda gate, up: F.gelu(gate) * up),
    "geglu tanh": gate(functools.partial(metalcore.geglu, approximate="tanh"), lambda gate, up: tanh(gate) * up),
    "silu_and_mul": gate(metalcore.silu_and_mul, lambda x: F.silu(halves(x)[0]) * halves(x)[1], "w"),
    "bias_gelu": RowsOp(ours=metalcore.bias_gelu, theirs=lambda x, bias: F.gelu(x + bias), tensors="xc"),
    "bias_silu": RowsOp(ours=metalcore.bias_silu, theirs=lambda x, bias: F.silu(x + bias), tensors="xc"),
}


@family
def gated(scale):
    """Times gated activations and those of x + bias, forward, backward and both, against PyTorch's separate ops."""
    shapes = {"gpu": [(4096, 4096), (32768, 1024)], "simulator": [(1024, 1024)], "quick": [(4, 64)]}
    return over_rows(scale, GATED, shapes, lambda shape: {"share": 0.85, "speedup": 1.0})


USUAL = {"share": 0.8, "speedup": AS_FAST}
# GPT-2's vocabulary makes rows that begin at no multiple of 16 bytes. 7 rows are fewer than a GPU's multiprocessors.
ROW_TARGETS = {
    (4096, 4096): USUAL,
    (32768, 1024): USUAL,
    (512, 50257): {"speedup": 1.0},
    (2048, 50257): {"speedup": 1.0},
    (7, 1 << 20): {"share": 0.4},
}
ROW_SHAPES = {
    "gpu": [*ROW_TARGETS, (1024, 128), (256, 65536), (4096, 1001)],
    "simulator": [(16384, 128), (2048, 1024), (512, 4096), (64, 32768)],
    "quick": [(4, 64)],
}


def over_last(name):
    return RowsOp(
        ours=functools.partial(getattr(metalcore, name), dim=-1),
        theirs=functools.partial(getattr(F, name), dim=-1),
        explained=lambda x: metalcore.explain(name, x, dim=-1).variant,
    )


@family
def softmax(scale):
    """Times softmax and log_softmax over rows, forward, backward and both through autograd."""
    ops = {name: over_last(name) for name in ("softmax", "log_softmax")}
    return over_rows(scale, ops, ROW_SHAPES, lambda shape: ROW_TARGETS.get(shape, {}))
