"""A sum and its normalization, in one pass over memory."""

from __future__ import annotations

import operator

import torch
from torch.fx import Node

from ..ir import accelerated, arguments, name_of, value
from ..matching import Match
from ..rewriting import Pattern

_NORMS = {
    "metalcore.rms_norm": torch.ops.metalcore.add_rms_norm.default,
    "metalcore.layer_norm": torch.ops.metalcore.add_layer_norm.default,
}


class AddNorm(Pattern):
    name = "add_norm"
    summary = "x + residual and the norm of the sum are metalcore.add_rms_norm or add_layer_norm"
    anchors = frozenset(_NORMS)
    exclusive = False

    def match(self, node: Node) -> Match | None:
        total = node.args[0]
        if not isinstance(total, Node) or name_of(total) != "add":
            return None
        x, residual, alpha = arguments(total)[:3]
        if alpha != 1 or not isinstance(x, Node) or not isinstance(residual, Node) or arguments(node)[1] != 1:
            return None
        if not accelerated(x, residual) or value(x).dtype != value(residual).dtype:
            return None
        if value(x).shape != value(residual).shape:
            return None
        norms = [user for user in total.users if name_of(user) in _NORMS]
        if norms != [node]:  # of several norms of one sum, none is special
            return None
        tensors = {f"parameter {i}": arg for i, arg in enumerate(node.args[1:]) if isinstance(arg, Node)}
        return Match({"x": x, "residual": residual, **tensors}, [node, total])

    def outputs(self, node, match):
        if name_of(node) == "metalcore.layer_norm":  # whose results are several
            first = [user for user in node.users if user.target is operator.getitem and user.args[1] == 0]
            return (*first, match.nodes[1])
        return node, match.nodes[1]

    def emit(self, match, emit):
        norm, _ = match.nodes
        if any(user.target is operator.getitem and user.args[1] != 0 for user in norm.users):
            return None
        made = emit(_NORMS[name_of(norm)], match["x"], match["residual"], *arguments(norm)[1:])  # pyright: ignore[reportArgumentType]
        y, total = emit.item(made, 0), emit.item(made, 1)
        if name_of(norm) == "metalcore.layer_norm":
            return (*[y for user in norm.users], total)
        return y, total
