"""Gemma 4's layout "gemma4", without experts: layers with a window and without have heads of different lengths, and the
last layers may share the keys and values of earlier ones.

Source of keys and names: github.com/ggml-org/llama.cpp, conversion/gemma.py and src/models/gemma4.cpp.
"""

from __future__ import annotations

import array
from typing import Any

from ._metadata import Metadata
from ._reader import GGUFError
from ._rope import FACTORS

__all__ = ["attention", "config", "expected", "keys", "rope_keys"]

_NEVER = 1e30  # what divides frequencies of numbers that are not rotated
_SLIDING, _FULL = "sliding_attention", "full_attention"


def attention(metadata: Metadata, heads: int, layers: int) -> dict[str, Any]:
    """Returns the fields of heads, layers' types, widths and rotary embeddings."""
    file = metadata.file
    pattern = metadata.get("attention.sliding_window_pattern", (list, array.array))
    if pattern is None or len(pattern) != layers or not all(one in (0, 1) for one in pattern) or pattern[-1]:
        raise GGUFError(
            f"{file.path}: attention.sliding_window_pattern must have a boolean for each of {layers} layers, and the "
            "last one no window"
        )
    types = [_SLIDING if slides else _FULL for slides in pattern]
    shared = metadata.get("attention.shared_kv_layers", int, 0)
    if not 0 <= shared < layers:
        raise GGUFError(f"{file.path}: attention.shared_kv_layers is {shared}, and there are {layers} layers")
    if problem := _sharing(types, shared):
        raise GGUFError(f"{file.path}: attention.shared_kv_layers is {shared}: {problem}")
    sizes = {_FULL: metadata.count("attention.key_length"), _SLIDING: metadata.count("attention.key_length_swa")}
    if metadata.count("attention.value_length") != sizes[_FULL]:
        raise GGUFError(f"{file.path}: heads whose keys and values have different lengths cannot be loaded")
    # Frequencies of rotary embeddings are made for heads of these lengths, before any tensor is looked at.
    for number, kind in enumerate(types):
        query = file.tensors.get(f"blk.{number}.attn_q.weight")
        if query is None or heads * sizes[kind] > query.shape[0]:
            raise GGUFError(f"{file.path}: blk.{number} has no weights of {heads} heads of {sizes[kind]} for queries")
    fields = {
        "head_dim": sizes[_SLIDING],
        "global_head_dim": sizes[_FULL],
        "layer_types": types,
        "num_kv_shared_layers": shared,
        "rope_parameters": _rope(metadata, sizes[_FULL]),
    }
    return {**fields, **_key_heads(metadata, heads, types, shared), **_widths(metadata, layers, shared)}


def _sharing(types, shared):
    """Returns why these layers cannot share, or None: llama.cpp takes what the two layers before them have."""
    if shared and types[: len(types) - shared][-2:] != [_SLIDING, _FULL]:
        return "the layers before must be one with a window and then one without"
    return None


def _per_layer(metadata, key, layers, default=None):
    value = metadata.get(key, (int, array.array), default)
    values = list(value) if isinstance(value, array.array) else [value] * layers
    if len(values) != layers or not all(type(one) is int and one >= 1 for one in values):
        raise GGUFError(
            f"{metadata.file.path}: key '{metadata.architecture}.{key}': it needs numbers of {layers} layers"
        )
    return values


def _key_heads(metadata, heads, types, shared):
    file, counts = metadata.file, _per_layer(metadata, "attention.head_count_kv", len(types), heads)
    by_type = {kind: {count for count, one in zip(counts, types) if one == kind} for kind in (_SLIDING, _FULL)}
    if any(len(kinds) > 1 for kinds in by_type.values()):
        raise GGUFError(f"{file.path}: key 'gemma4.attention.head_count_kv': layers of one kind differ")
    (full,) = by_type[_FULL]
    sliding = next(iter(by_type[_SLIDING]), full)
    own = [number for number, kind in enumerate(types[: len(types) - shared]) if kind == _FULL]
    alike = not any(f"blk.{number}.attn_v.weight" in file.tensors for number in own)
    if full != sliding and not alike:
        raise GGUFError(f"{file.path}: key 'gemma4.attention.head_count_kv': {full} and {sliding} need keys for values")
    fields: dict[str, Any] = {"num_key_value_heads": sliding, "attention_k_eq_v": alike}
    return fields | ({"num_global_key_value_heads": full} if full != sliding else {})


def _widths(metadata, layers, shared):
    widths = _per_layer(metadata, "feed_forward_length", layers)
    first, double = widths[0], len(set(widths)) > 1
    if widths != [first] * (layers - shared) + [first * (1 + double)] * shared:
        raise GGUFError(f"{metadata.file.path}: key 'gemma4.feed_forward_length': only layers that share may be double")
    return {"intermediate_size": first, "use_double_wide_mlp": double}


def _rope(metadata, size):
    path, factors = metadata.file.path, metadata.factors(FACTORS[0], size // 2)
    if factors is None:
        raise GGUFError(f"{path}: tensor {FACTORS[0]!r} is missing")
    rotated = sum(factor == 1 for factor in factors)
    if any(factor != 1 for factor in factors[:rotated]) or any(factor < _NEVER / 10 for factor in factors[rotated:]):
        raise GGUFError(f"{path}: tensor {FACTORS[0]!r} must have ones, and then numbers of about {_NEVER}")
    kind = metadata.get("rope.scaling.type", str, "linear")
    factor = metadata.get("rope.scaling.factor", (int, float), 0)
    if kind not in ("none", "linear") or (kind == "linear" and factor not in (0, 1)):
        raise GGUFError(f"{path}: rope scaling of type {kind!r} by {factor} is unknown for gemma4")
    theta = metadata.number("rope.freq_base", 10000.0)
    return {
        _FULL: {"rope_type": "proportional", "rope_theta": theta, "partial_rotary_factor": 2 * rotated / size},
        _SLIDING: {"rope_type": "default", "rope_theta": metadata.number("rope.freq_base_swa", theta)},
    }


def config(metadata: Metadata, fields: dict[str, Any]) -> dict[str, Any]:
    """Returns the other fields."""
    each = metadata.get("embedding_length_per_layer_input", int, 0)
    table = metadata.file.tensors.get("per_layer_token_embd.weight")
    if each and (table is None or len(table.shape) != 2):
        raise GGUFError(
            f"{metadata.file.path}: tensor 'per_layer_token_embd.weight' is missing, or has not two dimensions"
        )
    return {
        "sliding_window": metadata.count("attention.sliding_window"),
        "final_logit_softcapping": metadata.number("final_logit_softcapping", 0.0) or None,
        "hidden_size_per_layer_input": each,
        "vocab_size_per_layer_input": table.shape[0] if each and table is not None else fields["vocab_size"],
    }


def expected(fields: dict[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Returns keys with one value, and that value."""
    return {"expert_count": (0,), "rope.dimension_count": (fields["global_head_dim"],)}


def rope_keys(config: Any, require: Any) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """Returns keys and factors of rotary embeddings, as `_rope.rope_keys`."""
    full, sliding = (config.rope_parameters[kind] for kind in (_FULL, _SLIDING))
    size = _sizes(config, _FULL)[0]
    require("gemma4", "rope_type of layers without a window", full["rope_type"], "proportional")
    require("gemma4", "rope_type of windows", sliding.get("rope_type", "default"), "default")
    require("gemma4", "factor of rotary embeddings", full.get("factor", 1.0), 1.0)
    rotated = int(full.get("partial_rotary_factor", 1.0) * size // 2)
    keys = {
        "rope.freq_base": float(full["rope_theta"]),
        "rope.freq_base_swa": float(sliding["rope_theta"]),
        "rope.dimension_count": size,
        "rope.dimension_count_swa": _sizes(config, _SLIDING)[0],
    }
    return keys, {FACTORS[0]: [1.0] * rotated + [_NEVER] * (size // 2 - rotated)}


def _sizes(config, kind):
    """Returns (length, count) of the heads of keys of layers of a kind; all have the same.

    Raises:
        ValueError: they differ.
    """
    numbers = [number for number, one in enumerate(config.layer_types) if one == kind]
    if not numbers:  # the last layer has no window
        return _sizes(config, _FULL)
    sizes = {(each.head_dim, each.num_key_value_heads) for each in (config.per_layer_config[i] for i in numbers)}
    if len(sizes) > 1:
        raise ValueError(f"llama.cpp's gemma4 has one kind of heads for all layers of {kind}, and the model {sizes}")
    return sizes.pop()


def keys(config: Any, require: Any) -> dict[str, Any]:
    """Returns the keys of a configuration, without the architecture's name: see `_deepseek.keys`."""
    require("gemma4", "enable_moe_block", config.enable_moe_block, False)
    require("gemma4", "attention_bias", config.attention_bias, False)
    types, shared = config.layer_types, config.num_kv_shared_layers
    if problem := _sharing(types, shared):
        raise ValueError(f"llama.cpp's gemma4 cannot share keys and values of {shared} layers: {problem}")
    (full, full_heads), (sliding, sliding_heads) = _sizes(config, _FULL), _sizes(config, _SLIDING)
    each = config.hidden_size_per_layer_input or 0
    if each:
        require("gemma4", "vocab_size_per_layer_input", config.vocab_size_per_layer_input, config.vocab_size)
    values = {
        "attention.key_length": full,
        "attention.value_length": full,
        "attention.key_length_swa": sliding,
        "attention.value_length_swa": sliding,
        "attention.head_count_kv": sliding_heads,
        "attention.shared_kv_layers": shared,
        "attention.sliding_window": config.sliding_window,
        "attention.sliding_window_pattern": [kind == _SLIDING for kind in types],
        "embedding_length_per_layer_input": each,
    }
    if full_heads != sliding_heads:
        values["attention.head_count_kv"] = [sliding_heads if kind == _SLIDING else full_heads for kind in types]
    if config.use_double_wide_mlp and shared:
        width = config.intermediate_size
        values["feed_forward_length"] = [width] * (len(types) - shared) + [2 * width] * shared
    if config.final_logit_softcapping:
        values["final_logit_softcapping"] = float(config.final_logit_softcapping)
    return values
