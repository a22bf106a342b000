"""Gated activations: silu(gate) * up and gelu(gate) * up."""

from __future__ import annotations

import torch
from torch.fx import Node

from ..ir import accelerated, value
from ..matching import Call, Either, Match, Product, Value
from ..rewriting import Pattern

GATE, UP = Value("gate"), Value("up")
SILU = Either(Call("silu", GATE), Product(GATE, Call("sigmoid", GATE)))
GELU = Call("gelu", GATE, approximate="none")
GELU_TANH = Call("gelu", GATE, approximate="tanh")
KINDS = {"silu": Product(SILU, UP), "gelu": Product(GELU, UP), "gelu_tanh": Product(GELU_TANH, UP)}


class Gated(Pattern):
    name = "gated"
    summary = "silu(gate) * up and gelu(gate) * up are metalcore.swiglu and geglu"
    anchors = frozenset({"mul"})

    def match(self, node: Node) -> Match | None:
        for kind, expression in KINDS.items():
            match = expression.match(node)
            if match is None:
                continue
            gate, up = value(match["gate"]), value(match["up"])
            if accelerated(match["gate"], match["up"]) and gate.shape == up.shape and gate.dtype == up.dtype:
                return match.bind("kind", kind)
        return None

    def emit(self, match, emit):
        return emit(torch.ops.metalcore.gated.default, match["gate"], match["up"], match["kind"])
