"""Linear layers, with what follows them: an activation, or the sum with a residual."""

from __future__ import annotations

from torch.fx import Node

from ...gemm import linear, matmul
from ..ir import accelerated, name_of, value
from ..matching import Call, Either, Match, Sum, Value
from ..rewriting import Pattern

LINEAR = Either(Call("linear", Value("x"), Value("weight"), Value("bias")), Call("linear", Value("x"), Value("weight")))
WITH_ACTIVATION = {
    "relu": Call("relu", LINEAR),
    "silu": Call("silu", LINEAR),
    "gelu": Call("gelu", LINEAR, approximate="none"),
    "gelu_tanh": Call("gelu", LINEAR, approximate="tanh"),
}
WITH_RESIDUAL = Sum(LINEAR, Value("residual"))


class Linear(Pattern):
    name = "linear"
    summary = "linear, with the relu, gelu, silu or sum with a residual that follows, is metalcore.matmul"
    anchors = frozenset({"linear", "relu", "silu", "gelu", "add"})
    # The libraries of Apple and NVIDIA do large products; ours is faster or slower, which is not measured.
    by_name_on = frozenset({"cuda", "mps"})

    def match(self, node: Node) -> Match | None:
        if name_of(node) == "linear":
            match = LINEAR.match(node)
            if match is None or not self._takes(match) or self._has_follower(node):
                return None
            return match.bind("activation", None)
        for activation, expression in WITH_ACTIVATION.items():
            match = expression.match(node)
            if match is not None:
                return match.bind("activation", activation) if self._takes(match) else None
        match = WITH_RESIDUAL.match(node)
        if match is None or not self._takes(match):
            return None
        return match if value(match["residual"]).shape == value(node).shape else None

    def _has_follower(self, node):
        """Returns whether the operation after it belongs to the same product."""
        users = list(node.users)
        return len(users) == 1 and name_of(users[0]) in self.anchors - {"linear"} and self.match(users[0]) is not None

    def _takes(self, match):
        tensors = [match[name] for name in ("x", "weight", "bias", "residual") if name in match]
        return (
            accelerated(*tensors) and len({value(t).dtype for t in tensors}) == 1 and value(match["weight"]).dim() == 2
        )

    def emit(self, match, emit):
        bias = match.get("bias")
        if "residual" in match:

            def product(x, weight, bias, residual):
                return matmul(x, weight.T, bias=bias, residual=residual)

            return emit.traced(product, match["x"], match["weight"], bias, match["residual"])

        def activated(x, weight, bias):
            return linear(x, weight, bias, activation=match["activation"])

        return emit.traced(activated, match["x"], match["weight"], bias)
