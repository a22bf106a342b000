"""DeepSeek's layout "deepseek2": versions 2 and 3, which are told by how experts are chosen.

Keys and values of all heads are made from one short row for each token, by kv_b. llama.cpp's files have kv_b as two
tensors, of which the keys' is transposed; older files have it as transformers does.
Source of keys and names: github.com/ggml-org/llama.cpp, conversion/deepseek.py and src/models/deepseek2.cpp.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch import Tensor

from ._metadata import Metadata
from ._reader import GGUFError
from ._rope import rope_parameters

__all__ = ["HONOURED", "attention", "config", "divided", "expected", "joined", "keys", "sources", "version"]

_SOFTMAX, _SIGMOID = 1, 2
_EPS = 1e-6  # of the norms of short rows, whatever the model's is
# Keys that other layouts have one value for.
HONOURED = (
    "expert_group_count",
    "expert_group_used_count",
    "expert_weights_scale",
    "leading_dense_block_count",
    "rope.scaling.yarn_log_multiplier",
)
_KV_B = "attn_kv_b.weight"


def version(metadata: Metadata) -> str:
    """Returns transformers' name of a file's model."""
    return "deepseek_v3" if metadata.get("expert_gating_func", int, 0) == _SIGMOID else "deepseek_v2"


def attention(metadata: Metadata, heads: int, layers: int) -> dict[str, Any]:
    """Returns the fields of heads and rotary embeddings."""
    file = metadata.file
    short, rotated = metadata.count("attention.kv_lora_rank"), metadata.count("rope.dimension_count")
    ours = "_mla" if metadata.get("attention.key_length_mla", int) is not None else ""
    key, value = (metadata.count(f"attention.{which}_length{ours}") for which in ("key", "value"))
    query_rank = metadata.count("attention.q_lora_rank") if "blk.0.attn_q_a.weight" in file.tensors else None
    name = f"blk.0.attn_q{'' if query_rank is None else '_b'}.weight"
    query = file.tensors.get(name)
    if query is None or heads * key > query.shape[0]:
        raise GGUFError(f"{file.path}: {name} is not there, or has not {heads} heads of {key} for queries")
    if not rotated < key:
        raise GGUFError(f"{file.path}: {rotated} of {key} numbers of a head cannot be rotated")
    if ours:
        sizes = tuple(metadata.count(f"attention.{which}", expected) for which, expected in _shared(short, rotated))
        if sizes != (1, short + rotated, short):
            raise GGUFError(
                f"{file.path}: head_count_kv, key_length and value_length {sizes} do not go with rows of {short}"
            )
    return {
        "num_key_value_heads": heads,
        "head_dim": rotated,
        "kv_lora_rank": short,
        "q_lora_rank": query_rank,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": key - rotated,
        "v_head_dim": value,
        "rope_parameters": _rope(metadata, rotated),
    }


def _shared(short, rotated):
    """Returns keys and values of llama.cpp's one head, which all heads share."""
    return ("head_count_kv", 1), ("key_length", short + rotated), ("value_length", short)


def _rope(metadata, rotated):
    parameters = rope_parameters(metadata, rotated)
    if parameters["rope_type"] == "yarn":
        log = metadata.number("rope.scaling.yarn_log_multiplier", 0.0)
        if log:  # ten times too small in files; it was rounded to float32
            scale = float(f"{log * 10:.7g}")
            parameters.update(attention_factor=1.0, mscale=scale, mscale_all_dim=scale)
    elif (kind := parameters["rope_type"]) != "default":
        raise GGUFError(f"{metadata.file.path}: rope scaling of type {kind!r} is unknown for deepseek2")
    return parameters


def config(metadata: Metadata, fields: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of experts."""
    file = metadata.file
    count, used = metadata.count("expert_count"), metadata.count("expert_used_count")
    groups, chosen = metadata.count("expert_group_count", 1), metadata.count("expert_group_used_count", 1)
    dense = metadata.get("leading_dense_block_count", int, 0)
    if used > count or count % groups or chosen > groups:
        raise GGUFError(f"{file.path}: {used} of {count} experts in {chosen} of {groups} groups cannot be used")
    if not 0 <= dense <= fields["num_hidden_layers"]:
        raise GGUFError(f"{file.path}: {dense} of {fields['num_hidden_layers']} layers cannot be dense")
    if not math.isclose(fields["rms_norm_eps"], _EPS, rel_tol=1e-5):
        raise GGUFError(
            f"{file.path}: attention.layer_norm_rms_epsilon is {fields['rms_norm_eps']}, and transformers' has {_EPS}"
        )
    third = version(metadata) == "deepseek_v3"
    more = {"num_mtp_layers": 0} if third else {"topk_method": "greedy" if groups == 1 else "group_limited_greedy"}
    return {
        **more,
        "rms_norm_eps": _EPS,
        "n_routed_experts": count,
        "num_experts_per_tok": used,
        "n_group": groups,
        "topk_group": chosen,
        "n_shared_experts": metadata.count("expert_shared_count"),
        "moe_intermediate_size": metadata.count("expert_feed_forward_length"),
        "first_k_dense_replace": dense,
        "routed_scaling_factor": metadata.number("expert_weights_scale", 1.0) or 1.0,
        "norm_topk_prob": third and bool(metadata.get("expert_weights_norm", (bool, int), False)),
    }


def expected(model_type: str) -> dict[str, tuple[Any, ...]]:
    """Returns keys with one value for a version, and that value."""
    gating = (_SIGMOID,) if model_type == "deepseek_v3" else (0, _SOFTMAX)
    return {"expert_gating_func": gating, "rope.scaling.attn_factor": (1,)}


def keys(config: Any, of_rope: dict[str, Any], require: Any) -> dict[str, Any]:
    """Returns the keys of a configuration, without the architecture's name.

    Args:
        of_rope: those of rotary embeddings.
        require: a function of a layout, a setting's name, its value and the one it must have.
    """
    kind, third = config.model_type, config.model_type == "deepseek_v3"
    short, rotated = config.kv_lora_rank, config.qk_rope_head_dim
    require(kind, "attention_bias", config.attention_bias, False)
    require(kind, "rms_norm_eps", float(f"{config.rms_norm_eps:.6g}"), _EPS)
    require(kind, "num_key_value_heads", config.num_key_value_heads, config.num_attention_heads)
    if third:
        require(kind, "rope_interleave", config.rope_interleave, True)
    else:
        require(kind, "mlp_bias", config.mlp_bias, False)
        require(kind, "norm_topk_prob", bool(config.norm_topk_prob), False)
    values = {
        **{f"attention.{key}": value for key, value in _shared(short, rotated)},
        "attention.key_length_mla": config.qk_nope_head_dim + rotated,
        "attention.value_length_mla": config.v_head_dim,
        "attention.kv_lora_rank": short,
        "expert_count": config.n_routed_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_shared_count": config.n_shared_experts,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_weights_scale": float(config.routed_scaling_factor),
        "expert_weights_norm": third and bool(config.norm_topk_prob),
        "expert_gating_func": _SIGMOID if third else _SOFTMAX,
        "leading_dense_block_count": config.first_k_dense_replace,
        **_rope_keys(config, of_rope, require),
    }
    if config.q_lora_rank is not None:
        values["attention.q_lora_rank"] = config.q_lora_rank
    if third or config.topk_method == "group_limited_greedy":
        values["expert_group_count"], values["expert_group_used_count"] = config.n_group, config.topk_group
        if not third and config.n_group > 1:
            warnings.warn(
                "llama.cpp chooses groups by their two best experts, and deepseek_v2 by the best: logits will differ",
                stacklevel=6,
            )
    return values


def _rope_keys(config, of_rope, require):
    rope = config.rope_parameters
    kind = rope.get("rope_type", "default")
    if kind == "default":
        return {}
    if kind != "yarn":
        raise ValueError(f"llama.cpp's deepseek2 has no rotary embedding of type {kind!r}")
    # What rope_keys divided by YaRN's usual factor is what transformers multiplies rotations by.
    plain = 1 + 0.1 * math.log(rope["factor"]) if rope["factor"] > 1 else 1.0
    factor, every = of_rope["rope.scaling.attn_factor"] * plain, rope.get("mscale_all_dim") or 0.0
    wanted = 1.0 if every else plain
    require("deepseek2", "attention factor of YaRN", round(factor, 6), round(wanted, 6))
    return {"rope.scaling.attn_factor": 1.0, "rope.scaling.yarn_log_multiplier": 0.1 * every}


def sources(name: str, tensors: Any) -> tuple[str, ...]:
    """Returns the tensors of a file that a parameter is made of, given llama.cpp's name of it as one."""
    if not name.endswith(_KV_B) or name in tensors:
        return (name,)
    return tuple(name.replace("attn_kv_b", f"attn_{which}_b") for which in "kv")


def joined(keys: Tensor, values: Tensor) -> Tensor:
    """Returns kv_b's weight of the file's two tensors (heads, row, size) and (heads, size, row)."""
    return torch.cat([keys.mT, values], 1).flatten(0, 1)


def divided(weight: Tensor, config: Any) -> tuple[Tensor, Tensor]:
    """Divides kv_b's weight into the file's two tensors, as `joined` takes them."""
    sizes = [config.qk_nope_head_dim, config.v_head_dim]
    keys, values = weight.unflatten(0, (config.num_attention_heads, -1)).split(sizes, 1)
    return keys.mT.contiguous(), values.contiguous()
