"""Normalizations with parameters, forward, backward and both, against PyTorch's ops."""

import torch.nn.functional as F

import metalcore

from ...harness.case import RowsOp, family, over_rows
from ..activation.activation import ROW_SHAPES, ROW_TARGETS


def after_sum(norm):
    """Returns a function that computes PyTorch's norm of x + residual, and the sum."""

    def function(x, residual, *parameters):
        total = x + residual
        return norm(total, *parameters), total

    return function


def their_layer_norm(x, weight, bias):
    return F.layer_norm(x, weight.shape, weight, bias)


def their_rms_norm(x, weight):
    return F.rms_norm(x, weight.shape, weight)


# Passes of the norms: x, y; backward grad, x, x.grad. With a residual: x, residual, total, y; backward both grads,
# total, x.grad, which is the residual's too.
WITH_RESIDUAL = (4, 4)
LAYER_NORMS = {
    "layer_norm": RowsOp(
        ours=lambda x, weight, bias: metalcore.layer_norm(x, weight.shape, weight, bias),
        theirs=their_layer_norm,
        tensors="xcc",
    ),
    "add_layer_norm": RowsOp(
        ours=metalcore.add_layer_norm, theirs=after_sum(their_layer_norm), tensors="xxcc", passes=WITH_RESIDUAL
    ),
}
GROUPS = 32
GROUP_NORM = {
    "group_norm": RowsOp(
        ours=lambda x, weight, bias: metalcore.group_norm(x, GROUPS, weight, bias),
        theirs=lambda x, weight, bias: F.group_norm(x, GROUPS, weight, bias),
        tensors="xcc",
    )
}


@family
def layer_norm(scale):
    """Times layer_norm, add_layer_norm and group_norm, forward, backward and both, against PyTorch's ops."""
    rows = {"gpu": [(4096, 4096), (32768, 1024)], "simulator": [(1024, 1024)], "quick": [(4, 64)]}
    images = {
        "gpu": [(8, 320, 64, 64), (16, 512, 32, 32), (2, 1280, 16, 16)],
        "simulator": [(2, 64, 32, 32)],
        "quick": [(2, 64, 4, 4)],
    }
    return [
        *over_rows(scale, LAYER_NORMS, rows, lambda shape: {"share": 0.8, "speedup": 1.0}),
        *over_rows(scale, GROUP_NORM, images, lambda shape: {"speedup": 1.0}),
    ]


def their_gated_rms_norm(x, gate, weight):
    """Computes Mamba 2's gated norm in float32, as libraries write it."""
    gated = x.float() * F.silu(gate.float())
    return weight * F.rms_norm(gated, weight.shape, None, 1e-6).to(x.dtype)


RMS_NORMS = {
    "rms_norm": RowsOp(
        ours=lambda x, weight: metalcore.rms_norm(x, weight.shape, weight),
        theirs=their_rms_norm,
        tensors="xc",
        explained=lambda x, weight: metalcore.explain("rms_norm", x, weight, normalized_shape=weight.shape).variant,
    ),
    "add_rms_norm": RowsOp(
        ours=metalcore.add_rms_norm,
        theirs=after_sum(their_rms_norm),
        tensors="xxc",
        passes=WITH_RESIDUAL,
        explained=lambda *tensors: metalcore.explain("add_rms_norm", *tensors).variant,
    ),
    "rms_norm_gated": RowsOp(
        ours=lambda x, gate, weight: metalcore.rms_norm_gated(x, gate, weight, norm_before_gate=False),
        theirs=their_gated_rms_norm,
        tensors="xxc",
        passes=(3, 5),  # x, gate, y; backward grad, x, gate and both gradients
    ),
}


@family
def rms_norm(scale):
    """Times rms_norm, add_rms_norm and rms_norm_gated with a weight, forward, backward and both, against F.rms_norm
    (after x + residual, or after a gate)."""
    return over_rows(scale, RMS_NORMS, ROW_SHAPES, lambda shape: ROW_TARGETS.get(shape, {}))
