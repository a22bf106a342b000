"""Attention: PyTorch's scaled_dot_product_attention, and softmax(q kᵀ scale + mask) v written out."""

from __future__ import annotations

import math

import torch
from torch.fx import Node

from ...attention import scaled_dot_product_attention
from ..ir import accelerated, argument, value
from ..matching import Call, Cast, Either, Match, Number, Product, Sum, Value
from ..rewriting import Pattern

LEAST_KEYS = 32  # from which on the kernels for few queries are used
Q, K, V, MASK = Value("q"), Value("k"), Value("v"), Value("mask")
TRANSPOSED = Either(Call("transpose", K, Number("a"), Number("b")), Call("permute", K, Number("order")), Call("mT", K))
PRODUCT = Call("matmul", Q, TRANSPOSED)
SCORES = Either(
    Product(PRODUCT, Number("scale")),
    Call("div", PRODUCT, Number("divisor")),
    Call("matmul", Product(Q, Number("scale")), TRANSPOSED),
    Call("matmul", Call("div", Q, Number("divisor")), TRANSPOSED),
    PRODUCT,
)
MASKED = Either(Sum(SCORES, MASK), SCORES)


class _Softmax(Call):
    """A softmax over any dimension, in float32 or in the scores' dtype."""

    def _others_agree(self, node):
        return True

    def matches(self, thing, match):
        for extended in super().matches(thing, match):
            bound = extended.bind("dtype", argument(thing, "dtype"))
            if bound is not None:
                yield bound


# Each head several times, so that there are as many as of queries.
REPEATED = Either(
    Call("reshape view", Call("expand", Call("unsqueeze", Value("x"), 2), Number("repeated")), Number("shape")),
    Call("repeat_interleave", Value("x"), Number("times"), 1),
)
WEIGHTS = Cast(_Softmax("softmax", Cast(MASKED), Number("dim")))


class Attention(Pattern):
    name = "attention"
    summary = "torch.nn.functional.scaled_dot_product_attention is metalcore's"
    anchors = frozenset({"scaled_dot_product_attention"})
    exclusive = False
    by_name_on = frozenset({"cuda"})

    def match(self, node: Node) -> Match | None:
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
        q, k, v, mask, dropout, causal, scale, gqa = (argument(node, name) for name in names)
        if not accelerated(q, k, v) or dropout or not all(value(x).numel() and value(x).dim() >= 3 for x in (q, k, v)):
            return None
        heads_of, nodes = _unrepeated(k, v)
        options = {"causal": causal, "scale": scale, "gqa": gqa or bool(nodes)}
        return Match({"q": q, **dict(zip("kv", heads_of)), "mask": mask, **options}, [node, *nodes])

    def is_faster(self, match, device_type):
        """Returns True also for one query, whose kernels read each head once and take any mask."""
        is_one = value(match["q"]).shape[-2] == 1 and value(match["k"]).shape[-2] >= LEAST_KEYS
        return is_one and (match["mask"] is not None or len(match.nodes) > 1) or super().is_faster(match, device_type)

    def emit(self, match, emit):
        def attend(q, k, v, mask):
            return scaled_dot_product_attention(
                q, k, v, mask, is_causal=match["causal"], scale=match["scale"], enable_gqa=match["gqa"]
            )

        return emit.traced(attend, match["q"], match["k"], match["v"], match["mask"])


def _unrepeated(k, v):
    """Returns keys and values without the repetition of their heads, and the operations that repeat them, if any."""
    matches = [match for node in (k, v) if (match := REPEATED.match(node)) is not None and _repeats_heads(match)]
    if len(matches) < 2:
        return (k, v), []
    return [match["x"] for match in matches], [node for match in matches for node in match.nodes]


def _repeats_heads(match):
    tensor, repeated = value(match["x"]), value(match.nodes[0])
    if tensor.dim() != 4 or "times" in match:
        return tensor.dim() == 4
    batch, heads, *others = tensor.shape
    times = value(match.nodes[1]).shape[2]
    return value(match.nodes[1]).shape == (batch, heads, times, *others) and repeated.shape == (
        batch,
        heads * times,
        *others,
    )


class WrittenAttention(Pattern):
    name = "written_attention"
    summary = "softmax(q @ k.transpose(-1, -2) * scale + mask) @ v is metalcore.scaled_dot_product_attention"
    anchors = frozenset({"matmul"})

    def match(self, node: Node) -> Match | None:
        weights, v = node.args[:2]
        match = WEIGHTS.match(weights)
        whole = match and match.bind("v", v)
        if whole is None:
            return None
        whole.nodes = [node, *match.nodes]  # pyright: ignore[reportOptionalMemberAccess]
        return whole if self._fits(whole) else None

    def _fits(self, match):
        q, k, v, mask = match["q"], match["k"], match["v"], match.get("mask")
        if not accelerated(q, k, v):
            return False
        a, b, c = value(q), value(k), value(v)
        if not (a.dim() == b.dim() == c.dim() and a.dim() in (3, 4)) or len({a.dtype, b.dtype, c.dtype}) != 1:
            return False
        if not (a.numel() and b.numel() and c.numel()) or a.shape[:-2] != b.shape[:-2] or b.shape[:-1] != c.shape[:-1]:
            return False
        if not self._transposes(match, b.dim()) or match["dim"] % a.dim() != a.dim() - 1:
            return False
        if match.get("dtype") not in (None, torch.float32):
            return False
        number = match.get("scale", match.get("divisor", 1.0))
        if not isinstance(number, (int, float)) or not math.isfinite(number) or number == 0:
            return False
        return mask is None or self._broadcasts(value(mask), a, b)

    def _transposes(self, match, rank):
        if "order" in match:
            order = [d % rank for d in match["order"]]
            return order == [*range(rank - 2), rank - 1, rank - 2]
        return "a" not in match or {match["a"] % rank, match["b"] % rank} == {rank - 2, rank - 1}

    def _broadcasts(self, mask, q, k):
        scores = (*q.shape[:-1], k.shape[-2])
        try:
            fits = torch.broadcast_shapes(mask.shape, scores) == torch.Size(scores)
        except RuntimeError:
            return False
        return fits and mask.dtype in (q.dtype, torch.float32) and mask.device == q.device

    def emit(self, match, emit):
        scale = float(match["scale"]) if "scale" in match else 1.0 / float(match.get("divisor", 1.0))

        def attend(q, k, v, mask):
            return scaled_dot_product_attention(q, k, v, mask, scale=scale)

        return emit.traced(attend, match["q"], match["k"], match["v"], match.get("mask"))
