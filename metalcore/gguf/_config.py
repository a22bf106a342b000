"""Metadata of GGUF files as configurations of transformers, and back.

What a file leaves out has llama.cpp's default (src/llama-hparams.h and src/models), since its writer relied on that.

Keys that change a model's results, and that its layout takes with one value alone, are compared with that value.
Source: what llama.cpp reads for these architectures (load_hparams and load_arch_hparams in src/llama-model.cpp and
src/models). What it reads and metalcore too is not in the table, nor what it only prints.
"""

from __future__ import annotations

import array
import functools
from collections.abc import Callable
from typing import Any

from . import _deepseek, _gemma4, _nemotron_h, _state_spaces
from ._layouts import LAYOUTS, MODEL_TYPES, Layout, of_model
from ._metadata import Metadata
from ._reader import GGUFError, GGUFFile
from ._rope import rope_parameters

__all__ = ["REFUSED", "check_keys", "config_of", "layout_of", "unread"]

# Values that change nothing, by key. A file with another one is refused.
REFUSED: dict[str, tuple[Any, ...]] = {
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.scale": (0,),
    "attention.temperature_scale": (0,),
    "embedding_scale": (0, 1),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_weights_scale": (0, 1),
    "leading_dense_block_count": (0,),
    "logit_scale": (0, 1),
    "nextn_predict_layers": (0,),
    "residual_scale": (0, 1),
    "rope.dimension_sections": (),
    "rope.scaling.alpha": (0, 1),
    "rope.scaling.yarn_attn_factor": (1,),
    "rope.scaling.yarn_ext_factor": (-1, 1),
    "rope.scaling.yarn_log_multiplier": (0,),
    "swiglu_clamp_exp": (),
    "swiglu_clamp_shexp": (),
    "use_parallel_residual": (False,),
}
# Keys with a value for layers with a window, which must be that of all layers: the key of this and its default.
_OF_WINDOWS = {
    "attention.key_length_swa": "head_dim",
    "attention.value_length_swa": "head_dim",
    "rope.dimension_count_swa": "head_dim",
    "embedding_length_out": "hidden_size",
}
_STOPS = ("ggml.eot_token_id", "ggml.eom_token_id")


def check_keys(metadata: Metadata, model_type: str, fields: dict[str, Any]) -> None:
    """Checks that a file's settings are those that its layout has.

    Args:
        fields: of transformers' configuration.

    Raises:
        GGUFError: one is another; the message names it.
    """
    deepseek = model_type.startswith("deepseek")
    honoured = _deepseek.HONOURED if deepseek else ()
    if model_type == "granitemoehybrid":
        honoured = _state_spaces.HONOURED
    if model_type == "nemotron_h":
        honoured = _nemotron_h.HONOURED
    expected: dict[str, tuple[Any, ...]] = {key: values for key, values in REFUSED.items() if key not in honoured}
    expected.update({key: (fields[name],) for key, name in _OF_WINDOWS.items() if name in fields})
    expected["expert_gating_func"] = (0, 3) if model_type == "gpt_oss" else (0, 1)  # softmax
    if "norm_topk_prob" in fields or model_type == "mixtral":
        expected["expert_weights_norm"] = (fields.get("norm_topk_prob", True),)
    # transformers rotates whole heads of the others, or Bamba's halves, and llama.cpp refuses llama's.
    if model_type not in ("phi3", "qwen3_next", "nemotron_h") and "head_dim" in fields:
        expected["rope.dimension_count"] = (fields["head_dim"] // (2 if model_type == "bamba" else 1),)
    if model_type not in ("gemma3_text", "gemma4_text") and "rope_parameters" in fields:
        expected["rope.freq_base_swa"] = (fields["rope_parameters"]["rope_theta"],)
    if deepseek:
        expected.update(_deepseek.expected(model_type))
    if model_type == "gemma4_text":
        expected.update(_gemma4.expected(fields))
    expected.update({**_state_spaces.expected(model_type), **_nemotron_h.expected(model_type)})
    for key, values in expected.items():
        value = metadata.get(key, (int, float, bool, list, array.array))
        if value is not None and value not in values:
            text = " or ".join(map(str, values)) or "nothing"
            raise GGUFError(
                f"{metadata.file.path}: key '{metadata.architecture}.{key}': {value!r} cannot be loaded for "
                f"{model_type}, which has {text}"
            )


def unread(metadata: Metadata, tokenizer: tuple[str, ...]) -> list[str]:
    """Returns the keys of a file's architecture and tokenizer that nothing has read, in their order; `tokenizer` are
    those that a tokenizer is made of."""
    keys = metadata.file.read | {f"tokenizer.{key}" for key in (*tokenizer, *_STOPS)}
    return [key for key in metadata.file.metadata if not key.startswith(("general.", "split.")) and key not in keys]


def layout_of(file: GGUFFile) -> Layout:
    """Returns the layout of a file's tensors.

    Raises:
        GGUFError: metalcore does not know it.
    """
    architecture = Metadata(file).architecture
    if architecture not in LAYOUTS:
        names = ", ".join(sorted(LAYOUTS))
        raise GGUFError(f"{file.path}: architecture {architecture!r} cannot be loaded; these can: {names}")
    if architecture == "llama" and Metadata(file).get("expert_count", int, 0):
        return MODEL_TYPES["mixtral"]
    if architecture == "deepseek2":
        return MODEL_TYPES[_deepseek.version(Metadata(file))]
    if architecture == "mamba" and Metadata(file).get("ssm.dt_b_c_rms", bool, False):
        return MODEL_TYPES["falcon_mamba"]
    if architecture == "granitehybrid" and _state_spaces.is_bamba(Metadata(file)):
        return MODEL_TYPES["bamba"]
    if architecture == "granitehybrid":
        return of_model("granitemoehybrid", Metadata(file).get("expert_count", int, 0)) or LAYOUTS[architecture]
    if architecture == "llama" and "mistral" in str(file.metadata.get("general.name")).lower():
        return MODEL_TYPES["mistral"]
    return LAYOUTS[architecture]


def config_of(file: GGUFFile, layout: Layout) -> dict[str, Any]:
    """Returns the fields of transformers' configuration of a file."""
    metadata = Metadata(file)
    fields = _sizes(metadata)
    if layout.model_type not in _state_spaces.WITHOUT_ATTENTION:
        fields.update(_attention(metadata, fields["num_hidden_layers"]))
    rope = {"rope_parameters": fields["rope_parameters"]} if "rope_parameters" in fields else {}
    fields.update(_MORE[layout.model_type](metadata, fields))
    check_keys(metadata, layout.model_type, {**fields, **rope})
    if not metadata.get("attention.causal", bool, True):
        if fields.get("sliding_window"):
            raise GGUFError(f"{file.path}: attention.causal is false, and windows that look ahead cannot be loaded")
        fields["is_causal"] = False
    return fields


def _sizes(metadata):
    """Returns the fields of every model."""
    file = metadata.file
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise GGUFError(f"{file.path}: tensor 'token_embd.weight' is missing, or has not two dimensions")
    layers = metadata.count("block_count")
    # A layer without tensors would be made for nothing, and there may be billions of them.
    if layers > len(file.tensors) or f"blk.{layers - 1}.attn_norm.weight" not in file.tensors:
        raise GGUFError(f"{file.path}: {layers} layers are promised, and tensors of the last are missing")
    eps = metadata.number("attention.layer_norm_rms_epsilon", _nemotron_h.epsilon(metadata))
    if eps < 0:
        raise GGUFError(f"{file.path}: attention.layer_norm_rms_epsilon is {eps}, which is less than 0")
    fields = {
        "vocab_size": embedding.shape[0],
        "hidden_size": metadata.count("embedding_length"),
        "num_hidden_layers": layers,
        "rms_norm_eps": eps,
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }
    for token, name in (("bos", "bos"), ("eos", "eos"), ("padding", "pad")):
        fields[f"{name}_token_id"] = metadata.token(token)
    return fields


def _attention(metadata, layers):
    """Returns the fields of models with attention."""
    heads = metadata.count("attention.head_count")
    fields = {
        "num_attention_heads": heads,
        "max_position_embeddings": metadata.count("context_length"),
        **_ATTENTION.get(metadata.architecture, _heads)(metadata, heads, layers),
    }
    if "intermediate_size" not in fields:
        fields["intermediate_size"] = metadata.count("feed_forward_length", 1)
    return fields


def _heads(metadata, heads, layers, first=0, groups=None):
    """Returns the fields of heads, which layer `first` has weights of; `groups` are those of keys."""
    file, hidden = metadata.file, metadata.count("embedding_length")
    head_dim = metadata.count("attention.key_length", max(1, hidden // heads))
    # Frequencies of rotary embeddings are made for a head of this length, before any tensor is looked at.
    query = file.tensors.get(f"blk.{first}.attn_q.weight") or file.tensors.get(f"blk.{first}.attn_qkv.weight")
    if query is None or heads * head_dim > query.shape[0]:
        raise GGUFError(f"{file.path}: blk.{first} has no weights of {heads} heads of {head_dim} for queries")
    if metadata.count("attention.value_length", head_dim) != head_dim:
        raise GGUFError(f"{file.path}: heads whose keys and values have different lengths cannot be loaded")
    return {
        "num_key_value_heads": groups or metadata.count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rope_parameters": rope_parameters(metadata, head_dim),
    }


def _heads_of_some(metadata, heads, layers, other):
    """Returns the fields of heads of a hybrid, whose layers without heads of keys are of the kind `other`."""
    groups = metadata.get("attention.head_count_kv", (int, array.array), heads)
    groups = [groups] * layers if isinstance(groups, int) else list(groups)
    kinds = set(groups) - {0}
    if len(groups) != layers or len(kinds) != 1 or min(groups) < 0:
        raise GGUFError(f"{metadata.file.path}: attention.head_count_kv is not one number, or 0, of each layer")
    [count] = kinds
    return {
        **_heads(metadata, heads, layers, groups.index(count), count),
        "layer_types": ["full_attention" if one else other for one in groups],
    }


def _qwen3_next_heads(metadata, heads, layers):
    """Returns the fields of heads, which every layer has at the end of an interval, or those that are not recurrent."""
    interval = metadata.count("full_attention_interval", 4)
    recurrent = metadata.get("attention.recurrent_layers", array.array)
    recurrent = _state_spaces.recurrent_layers(interval, layers) if recurrent is None else list(map(bool, recurrent))
    if len(recurrent) != layers or all(recurrent):
        raise GGUFError(f"{metadata.file.path}: {layers} layers must be recurrent or have attention, and one has it")
    return {
        **_heads(metadata, heads, layers, recurrent.index(False)),
        "layer_types": _state_spaces.layer_types(recurrent),
    }


def _qwen3_next(metadata, fields):
    shared = metadata.count("expert_shared_feed_forward_length", fields["intermediate_size"])
    return {
        **_experts(metadata, fields),
        **_state_spaces.delta_rule(metadata),
        "shared_expert_intermediate_size": shared,
        "norm_topk_prob": True,
    }


def _lfm2(metadata, fields):
    return {
        "norm_eps": fields["rms_norm_eps"],
        "conv_L_cache": metadata.count("shortconv.l_cache"),
        "block_auto_adjust_ff_dim": False,  # feed_forward_length is adjusted
    }


def _llama(metadata, fields):
    has = metadata.file.tensors
    return {"attention_bias": "blk.0.attn_q.bias" in has, "mlp_bias": "blk.0.ffn_gate.bias" in has}


def _qwen3(metadata, fields):
    return {"attention_bias": "blk.0.attn_q.bias" in metadata.file.tensors}


def _experts(metadata, fields):
    count, used = metadata.experts()
    return {
        "num_experts": count,
        "num_experts_per_tok": used,
        "moe_intermediate_size": metadata.count(
            "expert_feed_forward_length", max(1, fields["intermediate_size"] // used)
        ),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _mixtral(metadata, fields):
    count, used = metadata.experts()
    return {"num_local_experts": count, "num_experts_per_tok": used, "sliding_window": None}


def _qwen2_moe(metadata, fields):
    shared = metadata.count("expert_shared_feed_forward_length", fields["intermediate_size"])
    bias = "blk.0.attn_q.bias" in metadata.file.tensors
    return {
        **_experts(metadata, fields),
        "shared_expert_intermediate_size": shared,
        "norm_topk_prob": False,
        "qkv_bias": bias,
    }


def _qwen3_moe(metadata, fields):
    return {**_experts(metadata, fields), **_qwen3(metadata, fields), "norm_topk_prob": True}


def _sliding(metadata, layers, period, window):
    """Returns the window, and which layers have one."""
    window = metadata.get("attention.sliding_window", int, window)
    pattern = metadata.get("attention.sliding_window_pattern", (int, list, array.array), period)
    if isinstance(pattern, int):
        pattern = [pattern == 0 or i % pattern < pattern - 1 for i in range(layers)]
    if len(pattern) < layers:
        raise GGUFError(f"{metadata.file.path}: sliding_window_pattern has {len(pattern)} of {layers} layers")
    types = ["sliding_attention" if window and slides else "full_attention" for slides in pattern[:layers]]
    return {"sliding_window": window or None, "layer_types": types}


def _gemma(largest):
    """Returns the scale of a Gemma's attention, of which only the largest has one of its own."""

    def scalar(fields):
        if fields["num_hidden_layers"] == largest:
            return fields["hidden_size"] // fields["num_attention_heads"]
        return fields["head_dim"]

    return scalar


def _gemma2(metadata, fields):
    return {
        **_sliding(metadata, fields["num_hidden_layers"], 2, 4096),
        "query_pre_attn_scalar": _gemma(46)(fields),
        "attn_logit_softcapping": metadata.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": metadata.number("final_logit_softcapping", 30.0),
    }


def _gemma3(metadata, fields):
    window = _sliding(metadata, fields["num_hidden_layers"], 6, 0)
    theta = metadata.number("rope.freq_base_swa", 10000.0)
    return {
        **window,
        "query_pre_attn_scalar": _gemma(62)(fields),
        "final_logit_softcapping": metadata.number("final_logit_softcapping", 0.0) or None,
        "rope_parameters": {
            "full_attention": fields["rope_parameters"],
            "sliding_attention": {"rope_type": "default", "rope_theta": theta},
        },
    }


def _phi3(metadata, fields):
    rope = fields["rope_parameters"]
    context = rope.get("original_max_position_embeddings", fields["max_position_embeddings"])
    window = metadata.get("attention.sliding_window", int, 0)
    return {"sliding_window": window or None, "original_max_position_embeddings": context}


def _gpt_oss(metadata, fields):
    count, used = metadata.experts()
    return {
        **_sliding(metadata, fields["num_hidden_layers"], 2, 128),
        "num_local_experts": count,
        "num_experts_per_tok": used,
        "intermediate_size": metadata.count("expert_feed_forward_length"),
    }


_MORE: dict[str, Callable[[Metadata, dict[str, Any]], dict[str, Any]]] = {
    "llama": _llama,
    "mistral": lambda metadata, fields: {"sliding_window": None},
    "mixtral": _mixtral,
    "qwen2": lambda metadata, fields: {},
    "qwen2_moe": _qwen2_moe,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "qwen3_next": _qwen3_next,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "lfm2": _lfm2,
    "phi3": _phi3,
    "gpt_oss": _gpt_oss,
    "deepseek_v2": _deepseek.config,
    "deepseek_v3": _deepseek.config,
    "gemma4_text": _gemma4.config,
    **{
        kind: functools.partial(_state_spaces.config, model_type=kind)
        for kind in (*_state_spaces.WITHOUT_ATTENTION, "falcon_h1", "granitemoehybrid", "bamba")
    },
    "nemotron_h": _nemotron_h.config,
}
# The fields of heads and rotary embeddings, where they are not as in other layouts.
_ATTENTION = {
    "deepseek2": _deepseek.attention,
    "gemma4": _gemma4.attention,
    "granitehybrid": functools.partial(_heads_of_some, other="linear_attention"),
    "lfm2": functools.partial(_heads_of_some, other="conv"),
    "nemotron_h": _nemotron_h.attention,
    "nemotron_h_moe": _nemotron_h.attention,
    "qwen3next": _qwen3_next_heads,
}
