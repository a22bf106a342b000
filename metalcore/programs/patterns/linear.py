"""Linear layers with what follows them: an activation, the sum with a residual, or a gate.

Linear layers of one row, as a token has, that read the same row are one product, with the norm before it. Each weight
is read once, and that is what such a product costs: what is beside it is as good as free, and what is apart from it
takes longer to start than to run.

Where other pointwise operations are beside a gated activation, all are left to one generated kernel, which moves less
memory.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch.fx import Node

from ...gemm import joined_linear, linear, matmul
from ..ir import accelerated, argument, arguments, name_of, value
from ..matching import Call, Either, Match, Product, Sum, Value
from ..pointwise import is_elementwise, supports
from ..rewriting import Pattern

GATE, UP = Value("gate"), Value("up")
SILU = Either(Call("silu", GATE), Product(GATE, Call("sigmoid", GATE)))
GELU = Call("gelu", GATE, approximate="none")
GELU_TANH = Call("gelu", GATE, approximate="tanh")
GATED = {"silu": Product(SILU, UP), "gelu": Product(GELU, UP), "gelu_tanh": Product(GELU_TANH, UP)}


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
        for kind, expression in GATED.items():
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


MOST_JOINED = 3  # weights that the kernel takes
PRODUCT_WITH_RESIDUAL = Sum(Value("product"), Value("residual"))


class _Joined(Pattern):
    name = "joined_linear"
    summary = "linear layers of one row, with rms_norm, a gate or a residual, are metalcore.joined_linear"
    # Apple's library may be faster, which is not measured.
    by_name_on = frozenset({"mps"})

    def _match(self, layers, nodes, residual=None, gate=None):
        """Returns the match of layers that read one row, if the kernel takes them, with the norm of the row if nobody
        else needs that."""
        x = layers[0].args[0]
        tensors = [tensor for layer in layers for tensor in arguments(layer)[:3] if tensor is not None]
        tensors += [] if residual is None else [residual]
        if value(x).numel() != value(x).shape[-1] or not value(x).numel() or not accelerated(*tensors):
            return None
        if len({value(tensor).dtype for tensor in tensors}) != 1 or any(value(w.args[1]).dim() != 2 for w in layers):
            return None
        match = Match({f"argument {i}": tensor for i, tensor in enumerate(tensors)}, nodes)
        match.update(layers=layers, residual=residual, gate=gate, norm=None)
        if _is_norm(x) and set(x.users) <= set(layers):
            match.nodes.append(x)
            match.update(norm=x, source=x.args[0], weight=argument(x, "weight"))
        return match

    def emit(self, match, emit):
        layers, norm = match["layers"], match["norm"]
        x, *options = (layers[0].args[0],) if norm is None else (norm.args[0], *arguments(norm)[2:5])

        def product(x, weights, biases, residual, weight=None, eps=0.0, offset=0.0):
            options = {"norm": weight, "eps": eps, "offset": offset, "gate": match["gate"], "residual": residual}
            return joined_linear(x, *weights, biases=biases, **options)

        weights, biases = ([arguments(layer)[i] for layer in layers] for i in (1, 2))
        return emit.traced(product, x, weights, biases, match["residual"], *options)


class GatedProducts(_Joined):
    anchors = frozenset({"mul"})

    def match(self, node: Node) -> Match | None:
        for kind, expression in GATED.items():
            match = expression.match(node)
            layers = [match[name] for name in ("gate", "up")] if match else []
            if layers and _read_one_row(layers) and value(layers[0]).shape == value(layers[1]).shape:
                return self._match(layers, [*match.nodes, *layers], gate=kind)  # pyright: ignore[reportOptionalMemberAccess]
        return None


class ProductsWithResidual(_Joined):
    anchors = frozenset({"add"})

    def match(self, node: Node) -> Match | None:
        for match in PRODUCT_WITH_RESIDUAL.matches(node, Match()):
            product, residual = match["product"], match["residual"]
            if _read_one_row([product]) and value(residual).shape == value(node).shape:
                return self._match([product], [node, product], residual)
        return None


class JoinedProducts(_Joined):
    anchors = frozenset({"linear"})

    def match(self, node: Node) -> Match | None:
        if not isinstance(node.args[0], Node):
            return None
        layers = [user for user in node.args[0].users if name_of(user) == "linear" and user.args[0] is node.args[0]]
        layers = sorted(layers)[:MOST_JOINED]
        return self._match(layers, layers[:])

    def outputs(self, node, match):
        return match["layers"]

    def emit(self, match, emit):
        layers = match["layers"]
        product = super().emit(match, emit)
        if product is None or len(layers) == 1:
            return product
        ends = [sum(value(layer).shape[-1] for layer in layers[:count]) for count in range(len(layers) + 1)]
        return [emit(torch.ops.aten.slice.Tensor, product, -1, *part) for part in pairwise(ends)]


def _read_one_row(layers):
    return all(name_of(layer) == "linear" and layer.args[0] is layers[0].args[0] for layer in layers)


def _is_norm(node):
    """Returns whether a node is the norm of a row with a weight of its dtype."""
    if name_of(node) != "metalcore.rms_norm" or arguments(node)[1] != 1:
        return False
    weight = argument(node, "weight")
    return weight is not None and value(weight).dtype == value(node).dtype
