"""PyTorch's operators that have a namesake among metalcore's, one to one."""

from __future__ import annotations

import torch
from torch.fx import Node

from ...loss import cross_entropy
from ..ir import accelerated, argument, value
from ..matching import Match
from ..rewriting import Pattern


def _softmax(operator):
    def make(node, emit):
        x, dim, dtype = (argument(node, name) for name in ("self", "dim", "dtype"))
        if not value(x).dim() or dtype not in (None, value(x).dtype, torch.float32):
            return None
        return emit(operator, x, dim, dtype is torch.float32 and value(x).dtype is not torch.float32)

    return make


def _group_norm(node, emit):
    names = ("input", "num_groups", "weight", "bias", "eps")
    x, groups, weight, bias, eps = (argument(node, name) for name in names)
    tensors = [value(n) for n in (x, weight, bias) if n is not None]
    if len({t.dtype for t in tensors}) != 1 or not accelerated(x, weight, bias):
        return None
    return emit.item(emit(torch.ops.metalcore.group_norm.default, x, groups, weight, bias, eps), 0)


_MAKERS = {
    "softmax": _softmax(torch.ops.metalcore.softmax.default),
    "log_softmax": _softmax(torch.ops.metalcore.log_softmax.default),
    "group_norm": _group_norm,
}


class Kernels(Pattern):
    name = "kernels"
    summary = "torch.softmax, log_softmax and group_norm are metalcore's"
    anchors = frozenset(_MAKERS)

    def match(self, node: Node) -> Match | None:
        x = node.args[0]
        if not accelerated(x) or not value(x).numel():
            return None
        tensors = {f"argument {i}": arg for i, arg in enumerate(node.args) if isinstance(arg, Node)}
        return Match(tensors, [node])

    def emit(self, match, emit):
        node = match.nodes[0]
        return _MAKERS[node.target._schema.name.removeprefix("aten::")](node, emit)  # pyright: ignore[reportAttributeAccessIssue, reportFunctionMemberAccess]


_REDUCTIONS = ("none", "mean", "sum")


class CrossEntropy(Pattern):
    name = "cross_entropy"
    summary = "torch.nn.functional.cross_entropy is metalcore.cross_entropy"
    anchors = frozenset({"cross_entropy_loss"})

    def match(self, node: Node) -> Match | None:
        logits, target, weight = (argument(node, name) for name in ("self", "target", "weight"))
        if not accelerated(logits, weight) or not value(logits).numel() or value(target).is_floating_point():
            return None
        return Match({"logits": logits, "target": target, "weight": weight}, [node])

    def emit(self, match, emit):
        names = ("reduction", "ignore_index", "label_smoothing")
        reduction, ignored, smoothing = (argument(match.nodes[0], name) for name in names)

        def loss(logits, target, weight):
            return cross_entropy(
                logits,
                target,
                weight,
                ignore_index=ignored,
                reduction=_REDUCTIONS[reduction],
                label_smoothing=smoothing,
            )

        return emit.traced(loss, match["logits"], match["target"], match["weight"])
