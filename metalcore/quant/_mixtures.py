"""Mixtures of GGML's types by llama.cpp's names: which type each weight of a model gets.

The rules are those of llama-quantize without an importance matrix (github.com/ggml-org/llama.cpp, src/llama-quant.cpp,
llama_tensor_get_type).
"""

from __future__ import annotations

from typing import NamedTuple

from ._types import BY_NAME, Type

__all__ = ["MIXTURES", "Shape", "Weight", "type_in"]

# A mixture's name and the type of most weights.
MIXTURES: dict[str, str] = {
    **{name.lower(): name for name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q6_K", "IQ4_NL", "IQ4_XS")},
    **{name.lower(): name[:4] for name in ("Q2_K_S", "Q3_K_S", "Q3_K_M", "Q3_K_L", "Q4_K_S", "Q4_K_M")},
    **{name.lower(): name[:4] for name in ("Q5_K_S", "Q5_K_M")},
    "mxfp4_moe": "MXFP4",
}
# What takes the place of a type whose blocks do not divide the rows.
_SMALLER_BLOCKS = {"Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0", "IQ4_XS": "IQ4_NL"}


class Shape(NamedTuple):
    """A model's, as far as rules ask.

    Attributes:
        layers: how many there are.
        group: heads of queries that share keys and values.
        experts: of a layer, or 0.
        values: how many weights make values (of attention): one of each layer.
        tied: the embedding's weight is the output's, too.
        falcon: whether it is a Falcon.
    """

    layers: int
    group: int = 1
    experts: int = 0
    values: int = 0
    tied: bool = False
    falcon: bool = False


class Weight(NamedTuple):
    """A weight.

    Attributes:
        role: "output", "embedding", "q", "k", "v" (also q, k and v in one), "attention" (attention's output), "gate",
            "up", "down", or "".
        length: of its rows.
        layer: where it stands, from 0 on; of weights that make values, how many came before.
        of_experts: it has weights of several experts.
    """

    role: str
    length: int
    layer: int = 0
    of_experts: bool = False


def type_in(mixture: str, weight: Weight, shape: Shape) -> Type | None:
    """Returns the type of a weight, or None if no type's blocks divide its rows."""
    type = _rule(mixture, weight, shape)
    if weight.length % BY_NAME[type].block:
        type = _SMALLER_BLOCKS.get(type)
    return None if type is None or weight.length % BY_NAME[type].block else BY_NAME[type]


def _more_bits(layer, layers):
    """Returns the first and the last eighth, and each third between."""
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2


def _rule(mixture, weight, shape):
    base = MIXTURES[mixture]
    if weight.role == "output" or weight.role == "embedding" and shape.tied:
        if mixture in ("mxfp4_moe", "q8_0") or shape.falcon or weight.length % BY_NAME[base].block:
            return "Q8_0"
        return "Q6_K"
    if mixture == "mxfp4_moe":
        return "MXFP4" if weight.of_experts else "Q8_0"
    rule = _OF_ROLE.get(weight.role)
    return (rule(mixture, weight, shape) if rule else None) or base


def _of_values(mixture, weight, shape):
    name = {
        "q2_k": "Q4_K" if shape.group >= 4 else "Q3_K",
        "q2_k_s": "Q4_K" if shape.group >= 4 else "Q2_K",
        "q3_k_m": "Q5_K" if weight.layer < 2 else "Q4_K",
        "q3_k_l": "Q5_K",
        "q4_k_s": "Q5_K" if weight.layer < 4 else "Q4_K",
    }.get(mixture, MIXTURES[mixture])
    if mixture in ("iq4_nl", "iq4_xs") and shape.group >= 4:
        name = "Q5_K"
    if mixture in ("q4_k_m", "q5_k_m") and _more_bits(weight.layer, shape.values):
        name = "Q6_K"
    if shape.layers == 80 and shape.group > 1 and name in ("Q3_K", "Q4_K"):  # models of 70B, whose values are small
        name = "Q5_K"
    return "Q8_0" if shape.experts == 8 else name


def _of_keys(mixture, weight, shape):
    return "Q8_0" if shape.experts == 8 else None


def _of_attention(mixture, weight, shape):
    if shape.falcon:
        return "Q4_K" if mixture == "q3_k_l" else None
    if shape.experts == 8:
        raised = ("q2_k", "q3_k_s", "q3_k_m", "q4_k_s", "q4_k_m", "iq4_nl", "iq4_xs")
        return "Q5_K" if mixture in raised else None
    return {"q2_k": "Q3_K", "q3_k_m": "Q4_K", "q3_k_l": "Q5_K"}.get(mixture)


def _of_down(mixture, weight, shape):
    layer, layers = weight.layer, shape.layers
    first, more = layer < layers // 8, _more_bits(layer, layers)
    if mixture == "q2_k":
        return "Q3_K"
    if mixture == "q3_k_m":
        return "Q5_K" if layer < layers // 16 else "Q4_K" if more or not shape.falcon else "Q3_K"
    if mixture == "q3_k_l":
        return "Q4_K" if shape.falcon else "Q5_K"
    if mixture == "q4_k_m" and shape.falcon:
        return "Q6_K" if layer < layers // 16 else "Q5_K" if more else "Q4_K"
    if mixture in ("q4_k_m", "q5_k_m"):
        return "Q6_K" if more else None
    if mixture == "q2_k_s":
        return "Q4_K" if first else None
    if mixture in ("iq4_nl", "iq4_xs") or mixture == "q4_k_s" and not shape.falcon:
        return "Q5_K" if first else None
    return None


_OF_ROLE = {"v": _of_values, "k": _of_keys, "attention": _of_attention, "down": _of_down}
