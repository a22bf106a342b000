"""Gated activations: silu(gate) * up and gelu(gate) * up.

Where other pointwise operations are beside them, all are left to one generated kernel, which moves less memory.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from ..ir import accelerated, value
from ..matching import Call, Either, Match, Product, Value
from ..pointwise import is_elementwise, supports
from ..rewriting import Pattern

GATE, UP = Value("gate"), Value("up")
SILU = Either(Call("silu", GATE), Product(GATE, Call("sigmoid", GATE)))
GELU = Call("gelu", GATE, approximate="none")
GELU_TANH = Call("gelu", GATE, approximate="tanh")
KINDS = {"silu": Product(SILU, UP), "gelu": Product(GELU, UP), "gelu_tanh": Product(GELU_TANH, UP)}


def _in_a_chain(node, match):
    """Returns whether an operation that a generated kernel can take reads the product, or makes an operand for it
    alone."""
    shape = value(node).shape
    alone = [source for source in (match["gate"], match["up"]) if {*match.nodes}.issuperset(source.users)]
    others = (other for other in (*node.users, *alone) if is_elementwise(other))
    return any(value(other).shape == shape and supports(other) is None for other in others)


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
            fits = gate.shape == up.shape and gate.dtype == up.dtype
            if fits and accelerated(match["gate"], match["up"]) and not _in_a_chain(node, match):
                return match.bind("kind", kind)
        return None

    def emit(self, match, emit):
        return emit(torch.ops.metalcore.gated.default, match["gate"], match["up"], match["kind"])
