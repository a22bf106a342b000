"""Rotary embeddings: llama.cpp's keys and factors as transformers' rope_parameters, and back."""

from __future__ import annotations

import math
from typing import Any

from ._metadata import Metadata
from ._reader import GGUFError

__all__ = ["FACTORS", "rope_keys", "rope_parameters"]

# Tensors of factors that divide the frequencies. They are part of the configuration.
FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
# Llama 3.1 to 3.3: https://huggingface.co/meta-llama/Llama-3.1-8B/blob/main/config.json
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def rope_parameters(metadata: Metadata, head_dim: int) -> dict[str, Any]:
    """Returns transformers' rope_parameters of a file."""
    theta = metadata.number("rope.freq_base", 10000.0)
    rotated = metadata.count("rope.dimension_count", head_dim)
    if rotated > head_dim or rotated % 2:
        raise GGUFError(f"{metadata.file.path}: {rotated} of {head_dim} numbers of a head cannot be rotated")
    parameters: dict[str, Any] = {"rope_theta": theta, **_scaling(metadata, theta, rotated)}
    if rotated != head_dim:
        parameters["partial_rotary_factor"] = rotated / head_dim
    return parameters


def _scaling(metadata, theta, rotated):
    context = metadata.count("rope.scaling.original_context_length", metadata.count("context_length"))
    factor = metadata.number("rope.scaling.factor", metadata.number("rope.scale_linear", 0.0)) or 1.0
    if factor <= 0 or theta <= 0:
        raise GGUFError(f"{metadata.file.path}: rope.scaling.factor and rope.freq_base are more than 0")
    attention = metadata.number("rope.scaling.attn_factor", 1.0)
    kind = metadata.get("rope.scaling.type", str, "linear")
    freqs, long, short = (metadata.factors(name, rotated // 2) for name in FACTORS)
    if freqs is not None:
        if factor != 1 and kind != "none":
            raise GGUFError(f"{metadata.file.path}: rope_freqs together with a scaling of type {kind!r} is unknown")
        return _by_factors(freqs, theta, rotated, context)
    if (long is None) != (short is None):
        raise GGUFError(f"{metadata.file.path}: one of the tensors {FACTORS[1]} and {FACTORS[2]} is missing")
    if long is not None:
        factors = {"long_factor": long, "short_factor": short}
        return {
            "rope_type": "longrope",
            "original_max_position_embeddings": context,
            "attention_factor": attention,
            **factors,
        }
    if kind == "none" or (kind == "linear" and factor == 1):
        return {"rope_type": "default"}
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        if theta <= 1:
            raise GGUFError(f"{metadata.file.path}: YaRN needs a rope.freq_base above 1, not {theta}")
        return {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": context,
            "attention_factor": attention * _mscale(factor, 1),
            "beta_fast": metadata.number("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": metadata.number("rope.scaling.yarn_beta_slow", 1.0),
            "truncate": True,  # as llama.cpp does for every model
        }
    raise GGUFError(f"{metadata.file.path}: rope scaling of type {kind!r} is unknown, or its factors are missing")


def _by_factors(factors, theta, rotated, context):
    """Returns Llama 3's rule where the factors follow it, or else the factors."""
    parameters = {"rope_type": "llama3", "factor": float(max(1, round(max(factors)))), **_LLAMA3}
    expected = _llama3_factors(parameters, theta, rotated)
    if len(factors) == len(expected) and all(math.isclose(a, b, rel_tol=1e-6) for a, b in zip(factors, expected)):
        return parameters
    return {
        "rope_type": "longrope",
        "long_factor": factors,
        "short_factor": factors,
        "attention_factor": 1.0,
        "original_max_position_embeddings": context,
    }


def _llama3_factors(parameters, theta, rotated):
    """Returns what Llama 3's rule divides each frequency by."""
    context, factor = parameters["original_max_position_embeddings"], parameters["factor"]
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    factors = []
    for i in range(0, rotated, 2):
        turns = context / (2 * math.pi * theta ** (i / rotated))
        smooth = min(max((turns - low) / (high - low), 0), 1)
        factors.append(1 / ((1 - smooth) / factor + smooth))
    return factors


def _mscale(factor, scale):
    return 1 + 0.1 * scale * math.log(factor) if factor > 1 else 1.0


def _yarn_attention(parameters, factor):
    """Returns what transformers multiplies rotations by."""
    attention, own, every = (parameters.get(name) for name in ("attention_factor", "mscale", "mscale_all_dim"))
    if attention is not None:
        return attention
    return _mscale(factor, own) / _mscale(factor, every) if own and every else _mscale(factor, 1)


def rope_keys(parameters: dict[str, Any], head_dim: int) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """Returns what a file says of rope_parameters: keys without the architecture's name, and tensors of factors.

    Raises:
        ValueError: llama.cpp has no such rotation.
    """
    kind = parameters.get("rope_type", "default")
    rotated = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
    keys: dict[str, Any] = {"rope.freq_base": float(parameters["rope_theta"]), "rope.dimension_count": rotated}
    if kind == "default":
        return keys, {}
    if kind == "linear":
        return {**keys, "rope.scaling.type": "linear", "rope.scaling.factor": float(parameters["factor"])}, {}
    if kind == "llama3":
        return keys, {FACTORS[0]: _llama3_factors(parameters, parameters["rope_theta"], rotated)}
    context = parameters.get("original_max_position_embeddings")
    if kind == "yarn":
        factor = float(parameters["factor"])
        plain = _mscale(factor, 1)
        return {
            **keys,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": factor,
            "rope.scaling.original_context_length": context,
            "rope.scaling.attn_factor": _yarn_attention(parameters, factor) / plain,
            "rope.scaling.yarn_beta_fast": float(parameters.get("beta_fast") or 32),
            "rope.scaling.yarn_beta_slow": float(parameters.get("beta_slow") or 1),
        }, {}
    if kind == "longrope":
        long, short = parameters["long_factor"], parameters["short_factor"]
        attention = parameters.get("attention_factor")
        if long == short and attention == 1:
            return keys, {FACTORS[0]: long}
        keys["rope.scaling.original_context_length"] = context
        if attention is not None:
            keys["rope.scaling.attn_factor"] = float(attention)
        return keys, {FACTORS[1]: long, FACTORS[2]: short}
    raise ValueError(f"llama.cpp has no rotary embedding of type {kind!r}")
