"""RMSNorm: PyTorch's operator, and the norm written out as Llama's, T5's and Gemma's modules do."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import Node

from ..ir import accelerated, argument, name_of, value
from ..matching import Call, Cast, Either, Match, Number, Product, Sum, Value
from ..rewriting import Pattern

X, WEIGHT, EPS = Value("x"), Value("weight"), Number("eps")
WIDE = Cast(X)
SQUARE = Either(Call("pow", WIDE, 2), Product(WIDE, WIDE), Call("square", WIDE))
MEAN = Call("mean", SQUARE, Number("dims"), True)
VARIANCE = Sum(MEAN, EPS)
SCALE = Either(Call("rsqrt", VARIANCE), Call("reciprocal", Call("sqrt", VARIANCE)), Call("pow", VARIANCE, -0.5))
NORMAL = Cast(Either(Product(WIDE, SCALE), Call("div", WIDE, Call("sqrt", VARIANCE))))
ONE_PLUS = Sum(Cast(WEIGHT), Number("offset"))
WRITTEN = (Cast(Product(NORMAL, ONE_PLUS)), Cast(Product(NORMAL, Cast(WEIGHT))), NORMAL)


class RmsNorm(Pattern):
    name = "rms_norm"
    summary = "x * rsqrt(mean(x²) + eps) * weight, or torch.nn.functional.rms_norm, is metalcore.rms_norm"
    anchors = frozenset({"mul", "div", "to", "_to_copy", "rms_norm", "type_as"})
    exclusive = True

    def match(self, node: Node) -> Match | None:
        if name_of(node) == "rms_norm":
            return self._operator(node)
        if _grows(node):
            return None
        for expression in WRITTEN:
            found = [match for match in expression.matches(node, Match()) if self._fits(node, match)]
            if found:
                return min(found, key=lambda match: _reads_more(node, match))
        return None

    def _operator(self, node):
        x, shape, weight, eps = (argument(node, name) for name in ("input", "normalized_shape", "weight", "eps"))
        if not accelerated(x, weight) or weight is not None and value(weight).dtype != value(x).dtype:
            return None
        match = Match({"x": x, "dims": list(range(-len(shape), 0)), "eps": eps, "weight": weight}, [node])
        return match if value(x).numel() else None

    def _fits(self, node, match):
        x, weight, dims = match["x"], match.get("weight"), match["dims"]
        if not accelerated(x, weight) or not isinstance(match["eps"], (int, float)) or not value(x).numel():
            return False
        rank = value(x).dim()
        if not rank or dims is None or [d % rank for d in ([dims] if isinstance(dims, int) else dims)] != [rank - 1]:
            return False
        if not isinstance(match.get("offset", 0.0), (int, float)):
            return False
        if not _wide_enough(match, value(x)):
            return False
        return weight is None or value(weight).shape == value(x).shape[-1:]

    def emit(self, match, emit):
        dims, weight, eps = match["dims"], match.get("weight"), match["eps"]
        eps = torch.finfo(torch.float32).eps if eps is None else float(eps)
        count = 1 if isinstance(dims, int) else len(dims)
        norm = emit(
            torch.ops.metalcore.rms_norm.default, match["x"], count, weight, eps, float(match.get("offset", 0.0))
        )
        dtype = value(match.nodes[0]).dtype
        return norm if value(norm).dtype == dtype else emit(torch.ops.aten.to.dtype, norm, dtype)


def _wide_enough(match, x):
    """Returns whether the squares are computed in float32: in 16 bits, they are another function."""
    means = [node for node in match.nodes if name_of(node) == "mean"]
    return all(value(node).dtype == torch.float32 for node in means) and x.dtype != torch.float64


def _reads_more(node, match):
    """Orders the ways to see a norm. The best one begins before x is converted to float32, if nobody else needs that:
    the kernel reads 16 bits, and the sum before it may join it."""
    inside = set(match.nodes)
    others = any(user not in inside for part in match.nodes[1:] for user in part.users)
    return others, value(match["x"]).dtype != value(node).dtype


def _grows(node):
    """Returns whether the match would go on with the node's only user: its product with a weight, or a conversion."""
    if len(node.users) != 1:
        return False
    user = next(iter(node.users))
    if name_of(user) in ("to", "_to_copy", "type_as") and user.args[0] is node:
        return True
    if name_of(user) != "mul" or name_of(node) == "rms_norm":
        return False
    other = next((arg for arg in user.args if arg is not node), None)
    if not isinstance(other, Node) or not isinstance(value(other), Tensor):
        return False
    return value(other).dim() == 1 and value(node).dim() > 1
