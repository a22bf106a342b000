"""Rotary position embedding of a query and a key, as in Llama (halves) and GPT-J (neighbours)."""

from __future__ import annotations

import torch
from torch.fx import Node

from ...rotary import rope
from ..ir import accelerated, argument, name_of, value
from ..matching import Call, Match, Number, Product, Sum, Value
from ..rewriting import Pattern

X, COS, SIN = Value("x"), Value("cos"), Value("sin")
END = Number("end")
FIRST = Call("slice", X, Number("dim"), 0, Number("half"))
SECOND = Call("slice", X, Number("dim"), Number("half"), END)
HALVES = Sum(Product(X, COS), Product(Call("cat", [Call("neg", SECOND), FIRST], Number("cat")), SIN))


class Rope(Pattern):
    name = "rope"
    summary = "q * cos + rotate_half(q) * sin, and the same for k, is metalcore.rope"
    anchors = frozenset({"add"})

    def match(self, node: Node) -> Match | None:
        query = self._rotation(node)
        if query is None:
            return None
        for product in query["cos"].users:
            for other in product.users:
                if other is node or name_of(other) != "add" or not node < other:
                    continue
                key = self._rotation(other)
                if key and key["sin"] is query["sin"] and key["cos"] is query["cos"]:
                    pair = Match({"q": query["x"], "k": key["x"], "cos": query["cos"], "sin": query["sin"]})
                    pair.nodes = [other, node, *query.nodes, *key.nodes]
                    return pair if self._heads_dim(pair) else None
        return None

    def _rotation(self, node):
        match = HALVES.match(node)
        if match is None:
            return None
        x, cos, sin = (value(match[name]) for name in ("x", "cos", "sin"))
        if not (_is_doubled(match["cos"]) and _is_doubled(match["sin"])):
            return None
        if x.dim() != 4 or not accelerated(match["x"], match["cos"], match["sin"]) or value(node).dtype != x.dtype:
            return None
        size = x.shape[-1]
        halves = match["dim"] in (3, -1) and match["cat"] in (3, -1) and 2 * match["half"] == size <= match["end"]
        return match if halves and cos.shape == sin.shape and cos.shape[-1] == size and x.numel() else None

    def _heads_dim(self, match):
        """Returns the dimension of the heads, over which the tables are broadcast, or None."""
        q, k, cos = (value(match[name]) for name in ("q", "k", "cos"))
        if q.dtype != k.dtype:
            return None
        for heads in (1, 2):
            others = [d for d in (0, 1, 2, 3) if d != heads]
            if any(q.shape[d] != k.shape[d] for d in others):
                continue
            tokens = q.shape[3 - heads]
            if cos.dim() == 2 and heads == 1 and cos.shape[0] == tokens:
                return heads
            if cos.dim() == 4 and cos.shape[heads] == 1 and cos.shape[3 - heads] == tokens:
                if cos.shape[0] in (1, q.shape[0]):
                    return heads
        return None

    def outputs(self, node, match):
        return match.nodes[1], match.nodes[0]

    def emit(self, match, emit):
        heads = self._heads_dim(match)
        four = value(match["cos"]).dim() == 4

        def rotate(q, k, cos, sin):
            tables = (cos.squeeze(heads), sin.squeeze(heads)) if four else (cos, sin)
            return rope(q, k, *tables, unsqueeze_dim=heads)  # pyright: ignore[reportArgumentType]

        return emit.traced(rotate, match["q"], match["k"], match["cos"], match["sin"])


_SAME_ROWS = frozenset(
    "unsqueeze expand slice index index_select embedding view reshape squeeze clone contiguous".split()
)
_ELEMENTWISE = frozenset("cos sin mul div to _to_copy type_as neg".split())


def _is_doubled(node: Node) -> bool:
    """Returns whether both halves of each row of a table are the same, without which the formula is no rotation. It is
    known of what concatenates something with itself, and of constants."""
    name = name_of(node)
    if node.op == "get_attr":
        table = getattr(node.graph.owning_module, str(node.target))
        first, second = table.detach().tensor_split(2, -1)
        return first.shape == second.shape and bool(torch.equal(first, second))
    if name == "cat":
        parts, dim = argument(node, "tensors"), argument(node, "dim")
        return len(parts) == 2 and parts[0] is parts[1] and dim % value(node).dim() == value(node).dim() - 1
    if name not in _SAME_ROWS | _ELEMENTWISE:
        return False
    source = node.args[0]
    if name in _ELEMENTWISE and any(isinstance(other, Node) and name != "type_as" for other in node.args[1:]):
        return False
    same_length = value(node).dim() > 0 and value(node).shape[-1:] == value(source).shape[-1:]
    return same_length and _is_doubled(source)  # pyright: ignore[reportArgumentType]
