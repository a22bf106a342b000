"""Nemotron-H: layers of state spaces, of attention without positions, and of one feed-forward network or of experts.

llama.cpp tells the kind of a layer by its heads of keys and its width, both of which are 0 in a layer of state spaces.
Experts have no gates. llama.cpp has them as an architecture of their own, nemotron_h_moe.
Source of keys and numbers: github.com/ggml-org/llama.cpp, conversion/nemotron.py and src/models/nemotron-h.cpp.
"""

from __future__ import annotations

import array
import math
from typing import Any

from . import _state_spaces
from ._metadata import Metadata
from ._reader import GGUFError

__all__ = ["HONOURED", "attention", "config", "epsilon", "expected", "keys"]

# Keys that other layouts have one value for.
HONOURED = ("expert_group_count", "expert_group_used_count", "expert_weights_scale")
_SIGMOID = 2
_EPSILON = "attention.layer_norm_epsilon"
_STATES, _ATTENTION = "linear_attention", "full_attention"


def epsilon(metadata: Metadata) -> float | None:
    """Returns the epsilon of norms under the key that llama.cpp requires of Nemotron-H, or None for other models."""
    return metadata.get(_EPSILON, float) if metadata.architecture in ("nemotron_h", "nemotron_h_moe") else None


def attention(metadata: Metadata, heads: int, layers: int) -> dict[str, Any]:
    """Returns the fields of heads, of the kinds of layers and of their width."""
    keys, widths = (
        list(metadata.get(key, array.array, ())) for key in ("attention.head_count_kv", "feed_forward_length")
    )
    groups, width = set(keys) - {0}, set(widths) - {0}
    if not (len(keys) == len(widths) == layers and len(groups) == len(width) == 1 and min(*groups, *width) > 0):
        raise GGUFError(
            f"{metadata.file.path}: attention.head_count_kv and feed_forward_length are not one number, or 0, of "
            "each layer"
        )
    head_dim = metadata.count("attention.key_length")
    feed_forward = "moe" if metadata.architecture == "nemotron_h_moe" else "mlp"
    kinds = [feed_forward if wide else _ATTENTION if key else _STATES for key, wide in zip(keys, widths)]
    for kind, part, least in ((_ATTENTION, "attn_q", heads * head_dim), (_STATES, "ssm_in", 1)):
        tensor = metadata.file.tensors.get(f"blk.{kinds.index(kind)}.{part}.weight") if kind in kinds else None
        if tensor is None or least > tensor.shape[0]:
            raise GGUFError(f"{metadata.file.path}: no layer has a tensor {part}.weight of at least {least} rows")
    if metadata.count("attention.value_length", head_dim) != head_dim:
        raise GGUFError(f"{metadata.file.path}: heads whose keys and values have different lengths cannot be loaded")
    return {
        "num_key_value_heads": groups.pop(),
        "head_dim": head_dim,
        "layer_types": kinds,
        "intermediate_size": width.pop(),
    }


def config(metadata: Metadata, fields: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of state spaces, feed-forward networks and experts."""
    common = {**_state_spaces.config(metadata, fields, "nemotron_h"), "layer_norm_epsilon": fields["rms_norm_eps"]}
    if "moe" not in fields["layer_types"]:
        return common
    count, used = metadata.count("expert_count"), metadata.count("expert_used_count")
    groups, of_groups = metadata.count("expert_group_count", 1), metadata.count("expert_group_used_count", 1)
    if used > count or count % groups or of_groups > groups:
        raise GGUFError(
            f"{metadata.file.path}: {used} of {count} experts, {of_groups} of {groups} groups cannot be used"
        )
    return {
        **common,
        "n_routed_experts": count,
        "num_experts_per_tok": used,
        "n_group": groups,
        "topk_group": of_groups,
        "n_shared_experts": metadata.count("expert_shared_count", 1),
        "norm_topk_prob": metadata.get("expert_weights_norm", bool, False),
        "routed_scaling_factor": metadata.number("expert_weights_scale", 1.0) or 1.0,
        "moe_intermediate_size": metadata.count("expert_feed_forward_length", fields["intermediate_size"]),
        "moe_shared_expert_intermediate_size": metadata.count("expert_shared_feed_forward_length"),
        "moe_latent_size": metadata.get("moe_latent_size", int) or None,
    }


def expected(model_type: str) -> dict[str, tuple[Any, ...]]:
    """Returns keys with one value for a model, and those that it may be."""
    return {"expert_gating_func": (0, _SIGMOID)} if model_type == "nemotron_h" else {}


def keys(config: Any, require: Any) -> dict[str, Any]:
    """Returns the keys of a configuration, without the architecture's name.

    Args:
        require: a function of a layout, a setting's name, its value and the one it must have.
    """
    kind, kinds = config.model_type, list(config.layer_types)
    experts = "moe" in kinds
    for name, value in (("mlp_hidden_act", "relu2"), ("use_conv_bias", True), ("use_bias", False), ("mlp_bias", False)):
        require(kind, name, getattr(config, name), value)
    require(kind, "time_step_limit", tuple(config.time_step_limit), (0.0, math.inf))
    require(kind, "layer_types", "mlp" in kinds and experts, False)
    width = config.moe_intermediate_size if experts else config.intermediate_size
    heads = config.mamba_num_heads
    inner = heads * config.mamba_head_dim
    values = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": len(kinds),
        "feed_forward_length": [width if one in ("mlp", "moe") else 0 for one in kinds],
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": [config.num_key_value_heads if one == _ATTENTION else 0 for one in kinds],
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        _EPSILON: float(config.layer_norm_epsilon),
        "attention.layer_norm_rms_epsilon": float(config.layer_norm_epsilon),
        "rope.scaling.finetuned": False,
        "vocab_size": config.vocab_size,
        **_state_spaces.sizes(
            config.conv_kernel, inner, config.ssm_state_size, config.mamba_num_heads, config.n_groups
        ),
    }
    if not experts:
        return values
    latent = {"moe_latent_size": config.moe_latent_size} if config.moe_latent_size else {}
    return {
        **values,
        **latent,
        "expert_count": config.n_routed_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_group_count": config.n_group,
        "expert_group_used_count": config.topk_group,
        "expert_shared_count": config.n_shared_experts,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_feed_forward_length": config.moe_shared_expert_intermediate_size,
        "expert_weights_norm": config.norm_topk_prob,
        "expert_weights_scale": float(config.routed_scaling_factor),
    }
