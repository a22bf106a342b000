"""The cross entropy of logits, which are read once."""

from __future__ import annotations

from torch.fx import Node

from ...loss import cross_entropy
from ..ir import accelerated, argument, value
from ..matching import Match
from ..rewriting import Pattern

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
