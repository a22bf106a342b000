"""RMSNorm, layer and group normalization: PyTorch's operators, norms written out, and the norm of a sum."""

from __future__ import annotations

import operator

import torch
from torch import Tensor
from torch.fx import Node

from ..ir import accelerated, argument, arguments, name_of, value
from ..matching import Call, Cast, Either, Match, Number, Product, Sum, Value
from ..rewriting import Pattern

X, WEIGHT, EPS = Value("x"), Value("weight"), Number("eps")
WIDE = Cast(X)
SQUARE_OF_X = Either(Call("pow", WIDE, 2), Product(WIDE, WIDE), Call("square", WIDE))
MEAN_OF_SQUARES = Call("mean", SQUARE_OF_X, Number("dims"), True)
MEAN_SQUARE = Sum(MEAN_OF_SQUARES, EPS)
SCALE = Either(
    Call("rsqrt", MEAN_SQUARE), Call("reciprocal", Call("sqrt", MEAN_SQUARE)), Call("pow", MEAN_SQUARE, -0.5)
)
RMS_NORMAL = Cast(Either(Product(WIDE, SCALE), Call("div", WIDE, Call("sqrt", MEAN_SQUARE))))
ONE_PLUS = Sum(Cast(WEIGHT), Number("offset"))
RMS_WRITTEN = (Cast(Product(RMS_NORMAL, ONE_PLUS)), Cast(Product(RMS_NORMAL, Cast(WEIGHT))), RMS_NORMAL)


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
        for expression in RMS_WRITTEN:
            matches = [match for match in expression.matches(node, Match()) if self._fits(node, match)]
            if matches:
                return min(matches, key=lambda match: _reads_more(node, match))
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


BIAS = Value("bias")
CENTERED = Call("sub", X, Call("mean", X, Number("dims"), True))
SQUARE_OF_CENTERED = Either(Call("pow", CENTERED, 2), Product(CENTERED, CENTERED), Call("square", CENTERED))
VARIANCE = Sum(
    Either(
        Call("mean", SQUARE_OF_CENTERED, Number("dims"), True),
        Call("var", X, Number("dims"), correction=0, keepdim=True),
        Call("var", X, Number("dims"), unbiased=False, keepdim=True),
    ),
    EPS,
)
LAYER_NORMAL = Either(Product(CENTERED, Call("rsqrt", VARIANCE)), Call("div", CENTERED, Call("sqrt", VARIANCE)))
LAYER_WRITTEN = (Sum(Product(Cast(LAYER_NORMAL), WEIGHT), BIAS),)


class LayerNorm(Pattern):
    name = "layer_norm"
    summary = "torch.nn.functional.layer_norm, or (x - mean) / sqrt(variance + eps) * weight + bias, is metalcore's"
    anchors = frozenset({"layer_norm", "add"})

    def match(self, node: Node) -> Match | None:
        if name_of(node) == "layer_norm":
            names = ("input", "normalized_shape", "weight", "bias", "eps")
            x, shape, weight, bias, eps = (argument(node, name) for name in names)
            match = Match({"x": x, "dims": list(shape), "weight": weight, "bias": bias, "eps": eps}, [node])
            return match if self._takes(x, weight, bias) else None
        for expression in LAYER_WRITTEN:
            match = expression.match(node)
            if match is not None and self._is_last(match):
                return match
        return None

    def _takes(self, x, weight, bias):
        tensors = [value(n) for n in (x, weight, bias) if n is not None]
        return accelerated(x, weight, bias) and len({t.dtype for t in tensors}) == 1 and value(x).numel() > 0

    def _is_last(self, match):
        x, weight, bias, dims = (match[name] for name in ("x", "weight", "bias", "dims"))
        if not self._takes(x, weight, bias) or not isinstance(match["eps"], (int, float)) or value(x).dim() == 0:
            return False
        if value(x).dtype != torch.float32:
            return False
        rank = value(x).dim()
        dims = [dims] if isinstance(dims, int) else dims or []
        shape = value(x).shape[-1:]
        return [d % rank for d in dims] == [rank - 1] and value(weight).shape == value(bias).shape == shape

    def emit(self, match, emit):
        count = 1 if isinstance(match["dims"], int) else len(match["dims"])
        norm = emit(
            torch.ops.metalcore.layer_norm.default,
            match["x"],
            count,
            match["weight"],
            match["bias"],
            float(match["eps"]),
        )
        return emit.item(norm, 0)


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
        results = emit(_NORMS[name_of(norm)], match["x"], match["residual"], *arguments(norm)[1:])  # pyright: ignore[reportArgumentType]
        y, total = emit.item(results, 0), emit.item(results, 1)
        if name_of(norm) == "metalcore.layer_norm":
            return (*[y for user in norm.users], total)
        return y, total
