"""Layer and group normalization: PyTorch's operators, and the layer norm written out."""

from __future__ import annotations

import torch
from torch.fx import Node

from ..ir import accelerated, argument, name_of, value
from ..matching import Call, Cast, Either, Match, Number, Product, Sum, Value
from ..rewriting import Pattern

X, WEIGHT, BIAS, EPS = Value("x"), Value("weight"), Value("bias"), Number("eps")
CENTERED = Call("sub", X, Call("mean", X, Number("dims"), True))
SQUARE = Either(Call("pow", CENTERED, 2), Product(CENTERED, CENTERED), Call("square", CENTERED))
VARIANCE = Sum(
    Either(
        Call("mean", SQUARE, Number("dims"), True),
        Call("var", X, Number("dims"), correction=0, keepdim=True),
        Call("var", X, Number("dims"), unbiased=False, keepdim=True),
    ),
    EPS,
)
NORMAL = Either(Product(CENTERED, Call("rsqrt", VARIANCE)), Call("div", CENTERED, Call("sqrt", VARIANCE)))
WRITTEN = (Sum(Product(Cast(NORMAL), WEIGHT), BIAS),)


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
        for expression in WRITTEN:
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
