"""Configurations of transformers as keys of GGUF files: the inverse of _config.py."""

from __future__ import annotations

import warnings
from typing import Any

from . import _deepseek, _gemma4, _nemotron_h, _state_spaces
from ._layouts import Layout
from ._rope import rope_keys

__all__ = ["keys_of"]


def keys_of(config: Any, layout: Layout) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """Keys without the architecture's name, and tensors of factors of rotary embeddings.

    Raises:
        ValueError: llama.cpp's layout has another value of a setting, and no key for it.
    """
    kind = layout.model_type
    if kind in _state_spaces.WITHOUT_ATTENTION:
        return _state_spaces.keys(config, _require), {}
    if kind == "nemotron_h":
        return _nemotron_h.keys(config, _require), {}
    fourth = kind == "gemma4_text"
    heads = config.num_attention_heads
    keys = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": heads,
        "attention.layer_norm_rms_epsilon": float(config.norm_eps if kind == "lfm2" else config.rms_norm_eps),
        "vocab_size": config.vocab_size,
    }
    head_dim = 0 if fourth else getattr(config, "head_dim", None) or config.hidden_size // heads
    if not fourth:
        keys["attention.head_count_kv"] = config.num_key_value_heads
        keys["attention.key_length"] = keys["attention.value_length"] = head_dim
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    own, factors = _gemma4.rope_keys(config, _require) if fourth else rope_keys(rope, head_dim)
    keys.update(own)
    if kind not in ("phi3", "gemma4_text", "qwen3_next"):  # transformers rotates whole heads
        _require(kind, "partial_rotary_factor", rope.get("partial_rotary_factor", 1.0), 0.5 if kind == "bamba" else 1.0)
    _check_yarn(kind, rope)
    if not getattr(config, "is_causal", True):
        _require(f"{kind} that is not causal", "sliding_window", getattr(config, "sliding_window", None), None)
        keys["attention.causal"] = False
    _require(kind, "use_bidirectional_attention", getattr(config, "use_bidirectional_attention", None) or False, False)
    _require(kind, "hidden_act", _activation(config), "gelu_pytorch_tanh" if "gemma" in kind else "silu")
    if kind.startswith("deepseek"):
        keys.update(_deepseek.keys(config, keys, _require))
    elif fourth:
        keys.update(_gemma4.keys(config, _require))
    elif kind in ("falcon_h1", "granitemoehybrid", "bamba"):
        keys.update(_state_spaces.keys(config, _require))
    else:
        _MORE.get(kind, _no_window)(config, keys, head_dim)
    return keys, factors


def _activation(config):
    return getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", "silu")  # LFM2 has no other


def _require(kind, name, value, expected):
    if value != expected:
        raise ValueError(f"llama.cpp's {kind} has {name} {expected!r}, and the model {value!r}")


def _check_yarn(kind, rope):
    """Refuses a ramp of YaRN that does not end at whole frequencies, as llama.cpp's does, or warns of it."""
    if rope.get("rope_type") != "yarn" or rope.get("truncate", True):
        return
    if kind != "gpt_oss":
        _require(kind, "truncate of YaRN", False, True)
    warnings.warn("llama.cpp's gpt-oss has truncate of YaRN, and the model has not: logits will differ", stacklevel=5)


def _no_window(config, keys, head_dim):
    window = getattr(config, "sliding_window", None)
    layers = getattr(config, "layer_types", None) or ["sliding_attention"]
    if window and "sliding_attention" in layers and getattr(config, "use_sliding_window", True):
        warnings.warn(
            f"llama.cpp's {config.model_type} has no sliding window: texts of more than {window} tokens will differ",
            stacklevel=5,
        )


def _window(config, keys, period):
    """Writes the window's size, and which layers have one where these are not all except every `period`th."""
    slides = [kind == "sliding_attention" for kind in config.layer_types]
    keys["attention.sliding_window"] = config.sliding_window if any(slides) and config.sliding_window else 0
    if any(slides) and slides != [i % period < period - 1 for i in range(len(slides))]:
        keys["attention.sliding_window_pattern"] = slides


def _scalar(config, head_dim, largest):
    expected = config.hidden_size // config.num_attention_heads if config.num_hidden_layers == largest else head_dim
    _require(config.model_type, "query_pre_attn_scalar", config.query_pre_attn_scalar, expected)


def _gemma2(config, keys, head_dim):
    _scalar(config, head_dim, 46)
    _window(config, keys, 2)
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        value = getattr(config, name)
        if not value:
            raise ValueError(f"llama.cpp's gemma2 needs {name}")
        keys[name] = float(value)


def _gemma3(config, keys, head_dim):
    _scalar(config, head_dim, 62)
    _window(config, keys, 6)
    _require("gemma3", "attn_logit_softcapping", config.attn_logit_softcapping, None)
    if config.final_logit_softcapping:
        keys["final_logit_softcapping"] = float(config.final_logit_softcapping)
    local = config.rope_parameters["sliding_attention"]
    _require("gemma3", "rope_type of windows", local.get("rope_type", "default"), "default")
    keys["rope.freq_base_swa"] = float(local["rope_theta"])


def _phi3(config, keys, head_dim):
    keys["attention.sliding_window"] = config.sliding_window or 0
    if "rope.scaling.original_context_length" not in keys:
        keys["rope.scaling.original_context_length"] = config.original_max_position_embeddings
    long = config.rope_parameters.get("rope_type") == "longrope"
    if long and config.rope_parameters.get("attention_factor") is None:
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        keys["rope.scaling.attn_factor"] = float(ROPE_INIT_FUNCTIONS["longrope"](config)[1])


def _lfm2(config, keys, head_dim):
    _require("lfm2", "conv_bias", config.conv_bias, False)
    kinds = config.layer_types
    keys["attention.head_count_kv"] = [config.num_key_value_heads if kind != "conv" else 0 for kind in kinds]
    keys["shortconv.l_cache"] = config.conv_L_cache
    if config.block_auto_adjust_ff_dim:  # as Lfm2MLP does
        width, multiple = int(2 * config.intermediate_size / 3), config.block_multiple_of
        if config.block_ffn_dim_multiplier is not None:
            width = -(-int(config.block_ffn_dim_multiplier * width) // multiple) * multiple
        keys["feed_forward_length"] = width


def _moe(config, keys, head_dim):
    _no_window(config, keys, head_dim)
    kind = config.model_type
    _require(kind, "norm_topk_prob", config.norm_topk_prob, kind != "qwen2_moe")
    _require(kind, "decoder_sparse_step", config.decoder_sparse_step, 1)
    _require(kind, "mlp_only_layers", list(config.mlp_only_layers or ()), [])
    keys["expert_count"] = config.num_experts
    keys["expert_used_count"] = config.num_experts_per_tok
    keys["expert_feed_forward_length"] = config.moe_intermediate_size
    if kind == "qwen3_next":
        keys.update(_state_spaces.delta_rule_keys(config, _require))
    if kind in ("qwen2_moe", "qwen3_next"):
        keys["expert_shared_feed_forward_length"] = config.shared_expert_intermediate_size


def _mixtral(config, keys, head_dim):
    _no_window(config, keys, head_dim)
    keys["expert_count"] = config.num_local_experts
    keys["expert_used_count"] = config.num_experts_per_tok


def _gpt_oss(config, keys, head_dim):
    _window(config, keys, 2)
    _require("gpt_oss", "swiglu_alpha", getattr(config, "swiglu_alpha", 1.702), 1.702)
    _require("gpt_oss", "swiglu_limit", getattr(config, "swiglu_limit", 7.0), 7.0)
    keys["expert_count"] = config.num_local_experts
    keys["expert_used_count"] = config.num_experts_per_tok
    keys["expert_feed_forward_length"] = config.intermediate_size


_MORE = {
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "lfm2": _lfm2,
    "mixtral": _mixtral,
    "phi3": _phi3,
    "qwen2_moe": _moe,
    "qwen3_moe": _moe,
    "qwen3_next": _moe,
    "gpt_oss": _gpt_oss,
}
