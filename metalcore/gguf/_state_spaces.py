"""Layouts with states: mamba (also FalconMamba), mamba2, granitehybrid (also Bamba), falcon-h1, and qwen3next's delta
rule.

llama.cpp stores -exp(A_log), and each layer's norm of states by groups. Its Falcon-H1 has the multipliers in the
weights; its hybrids say for each layer how many heads of keys it has, which is none in a layer of state spaces.
Source of keys, names and numbers: github.com/ggml-org/llama.cpp, its conversion of mamba, granite, falcon_h1 and qwen.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Container, Sequence
from typing import Any

import torch
from torch import Tensor

from ._metadata import Metadata
from ._reader import GGUFError

__all__ = [
    "HONOURED",
    "STORED",
    "WITHOUT_ATTENTION",
    "config",
    "delta_rule",
    "delta_rule_keys",
    "expected",
    "file_shape",
    "is_bamba",
    "keys",
    "layer_types",
    "multiplier",
    "recurrent_layers",
    "row_order",
    "sizes",
    "sources",
]

# Keys of granitehybrid that other layouts have one value for.
HONOURED = ("attention.scale", "embedding_scale", "residual_scale", "logit_scale")
WITHOUT_ATTENTION = ("mamba", "falcon_mamba", "mamba2")
_KERNEL, _INNER, _STATE = "ssm.conv_kernel", "ssm.inner_size", "ssm.state_size"
_QKVZ = "ssm_qkvz"
_HEADS, _GROUPS = "ssm.time_step_rank", "ssm.group_count"
# A parameter's last name: what turns it to the numbers of a file, and back.
STORED: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "A_log": (lambda logarithms: -logarithms.float().exp(), lambda rates: rates.float().neg().log())
}
_MULTIPLIERS = ("embedding", "lm_head", "key", "attention_in", "attention_out", "ssm_in", "ssm_out")


def _check_rates(metadata, name, numbers):
    info = metadata.file.tensors.get(name)
    if info is None or info.type.name != "F32" or math.prod(info.shape) != numbers:
        raise GGUFError(f"{metadata.file.path}: tensor {name!r} must be {numbers} numbers of type F32")


def config(metadata: Metadata, fields: dict[str, Any], model_type: str) -> dict[str, Any]:
    """Returns the fields of state spaces."""
    inner, hidden = metadata.count(_INNER), fields["hidden_size"]
    states, kernel, heads = (metadata.count(key) for key in (_STATE, _KERNEL, _HEADS))
    of_first = model_type in ("mamba", "falcon_mamba")
    if model_type not in ("falcon_h1", "nemotron_h") and inner % hidden:
        raise GGUFError(f"{metadata.file.path}: {_INNER} is {inner}, which is no multiple of {hidden}")
    groups = 1 if of_first else metadata.count(_GROUPS)
    if not of_first and (inner % heads or heads % groups):
        raise GGUFError(f"{metadata.file.path}: {inner} numbers cannot be {heads} heads in {groups} groups")
    kinds = ["linear_attention"] if model_type == "falcon_h1" else fields.get("layer_types", ["linear_attention"])
    if "linear_attention" not in kinds:
        raise GGUFError(f"{metadata.file.path}: attention.head_count_kv leaves no layer of state spaces")
    _check_rates(metadata, f"blk.{kinds.index('linear_attention')}.ssm_a", inner * states if of_first else heads)
    if model_type in WITHOUT_ATTENTION:
        common = {
            "layer_norm_epsilon": fields["rms_norm_eps"],
            "state_size": states,
            "conv_kernel": kernel,
            "expand": inner // hidden,
        }
        if model_type == "mamba2":
            return {**common, "num_heads": heads, "head_dim": inner // heads, "n_groups": groups}
        own = {"mixer_rms_eps": fields["rms_norm_eps"]} if model_type == "falcon_mamba" else {}
        return {**common, **own, "time_step_rank": heads}
    if model_type == "nemotron_h":
        own = {"mamba_num_heads": heads, "mamba_head_dim": inner // heads, "n_groups": groups}
        return {**own, "ssm_state_size": states, "conv_kernel": kernel}
    common = {
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_n_groups": groups,
        "mamba_d_state": states,
        "mamba_d_conv": kernel,
    }
    if model_type == "falcon_h1":
        norm = "blk.0.ssm_norm.weight" in metadata.file.tensors
        return {**common, "mamba_d_ssm": inner, "mamba_rms_norm": norm, "mamba_norm_before_gate": False}
    own = _bamba(fields) if model_type == "bamba" else _granite(metadata, fields)
    return {**common, "mamba_expand": inner // hidden, **own}


def is_bamba(metadata: Metadata) -> bool:
    """Returns whether a file of granitehybrid is Bamba's, which has rotary embeddings and none of Granite's scales."""
    return metadata.get("rope.scaling.finetuned", bool, True) and metadata.get("attention.scale", float) is None


def _bamba(fields):
    """Returns the layers of attention, which a configuration has in the place of each layer's kind."""
    return {"attn_layer_indices": [i for i, kind in enumerate(fields.pop("layer_types")) if kind == "full_attention"]}


def _granite(metadata, fields):
    """Returns the fields of Granite's multipliers, experts and positions."""
    experts, used = metadata.experts() if metadata.get("expert_count", int, 0) else (0, 0)
    width = fields["intermediate_size"]
    rotates = metadata.get("rope.scaling.finetuned", bool, True)
    return {
        "position_embedding_type": "rope" if rotates else None,
        "attention_multiplier": metadata.number("attention.scale", 0.0) or fields["head_dim"] ** -0.5,
        "embedding_multiplier": metadata.number("embedding_scale", 0.0) or 1.0,
        "residual_multiplier": metadata.number("residual_scale", 0.0) or 1.0,
        "logits_scaling": metadata.number("logit_scale", 0.0) or 1.0,
        "num_local_experts": experts,
        "num_experts_per_tok": used,
        "shared_intermediate_size": metadata.count("expert_shared_feed_forward_length") if experts else width,
    }


def expected(model_type: str) -> dict[str, tuple[Any, ...]]:
    """Returns keys with one value for a model, and that value."""
    return {"ssm.dt_b_c_rms": (model_type == "falcon_mamba",)}


def keys(config: Any, require: Any) -> dict[str, Any]:
    """Returns the keys of a configuration, without the architecture's name.

    Args:
        require: a function of a layout, a setting's name, its value and the one it must have.
    """
    kind = config.model_type
    if kind in WITHOUT_ATTENTION:
        return _keys_without_attention(config, require)
    of_falcon = kind == "falcon_h1"
    inner = config.mamba_d_ssm if of_falcon else config.mamba_expand * config.hidden_size
    require(kind, "mamba_conv_bias", config.mamba_conv_bias, True)
    require(kind, "mamba_proj_bias", config.mamba_proj_bias, False)
    require(kind, "attention_bias", config.attention_bias, False)
    require(kind, "time_step_limit", tuple(config.time_step_limit), (0.0, math.inf))
    values: dict[str, Any] = sizes(
        config.mamba_d_conv, inner, config.mamba_d_state, config.mamba_n_heads, config.mamba_n_groups
    )
    if of_falcon:
        require(kind, "mamba_norm_before_gate", config.mamba_rms_norm and config.mamba_norm_before_gate, False)
        require(kind, "mlp_bias", config.mlp_bias, False)
        require(kind, "projectors_bias", config.projectors_bias, False)
        return values
    values["attention.head_count_kv"] = [
        0 if one == "linear_attention" else config.num_key_value_heads for one in config.layer_types
    ]
    if kind == "bamba":
        require(kind, "mlp_bias", config.mlp_bias, False)
        return {**values, "rope.scaling.finetuned": True}
    values.update(
        {
            "rope.scaling.finetuned": config.position_embedding_type == "rope",
            "attention.scale": float(config.attention_multiplier),
            "embedding_scale": float(config.embedding_multiplier),
            "residual_scale": float(config.residual_multiplier),
            "logit_scale": float(config.logits_scaling),
        }
    )
    if config.num_local_experts:
        values["expert_count"], values["expert_used_count"] = config.num_local_experts, config.num_experts_per_tok
        values["expert_shared_feed_forward_length"] = config.shared_intermediate_size
    else:
        values["feed_forward_length"] = config.shared_intermediate_size
    return values


def sizes(kernel: int, inner: int, states: int, heads: int, groups: int) -> dict[str, int]:
    """Returns the keys of the sizes of a second Mamba's layers."""
    return {_KERNEL: kernel, _INNER: inner, _STATE: states, _HEADS: heads, _GROUPS: groups}


def _keys_without_attention(config, require):
    kind, second = config.model_type, config.model_type == "mamba2"
    require(kind, "use_bias", config.use_bias, False)
    require(kind, "use_conv_bias", config.use_conv_bias, True)
    require(kind, "hidden_act", config.hidden_act, "silu")
    require(kind, "expand", config.expand, 2)
    if second:
        require(kind, "time_step_limit", tuple(config.time_step_limit), (0.0, math.inf))
    else:  # a configuration may have a number of its own, which no key has
        require(kind, "intermediate_size", config.intermediate_size, config.expand * config.hidden_size)
    if kind == "falcon_mamba" and config.mixer_rms_eps != config.layer_norm_epsilon:
        warnings.warn(
            f"llama.cpp's falcon_mamba has one epsilon, and the model {config.layer_norm_epsilon} and "
            f"{config.mixer_rms_eps}: logits will differ",
            stacklevel=6,
        )
    values = {
        "context_length": 2**20,  # llama.cpp needs one
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": 0,
        "attention.head_count": 0,
        "attention.layer_norm_rms_epsilon": float(config.layer_norm_epsilon),
        "vocab_size": config.vocab_size,
        _KERNEL: config.conv_kernel,
        _INNER: config.expand * config.hidden_size,
        _STATE: config.state_size,
        _HEADS: config.num_heads if second else config.time_step_rank,
    }
    return {**values, **({_GROUPS: config.n_groups} if second else {"ssm.dt_b_c_rms": kind == "falcon_mamba"})}


def file_shape(parameter: str, shape: Sequence[int], config: Any) -> tuple[int, ...]:
    """Returns the shape that a file has a parameter in."""
    if config.model_type not in ("mamba2", "granitemoehybrid", "bamba", "falcon_h1", "nemotron_h"):
        return tuple(shape)
    if parameter.endswith(("mixer.norm.weight", "mamba.norm.weight")):
        groups = config.n_groups if config.model_type in ("mamba2", "nemotron_h") else config.mamba_n_groups
        return groups, shape[0] // groups
    return (*shape, 1) if parameter.endswith((".A_log", ".D")) else tuple(shape)


def sources(name: str, tensors: Container[str]) -> tuple[str, ...]:
    """Returns the tensors of a file whose rows are a parameter, given llama.cpp's name of it as one."""
    if name.endswith(f"{_QKVZ}.weight"):
        old = name.replace(_QKVZ, "ssm_in")  # in transformers' order
        return (old,) if old in tensors else tuple(name.replace(_QKVZ, f"attn_{part}") for part in ("qkv", "gate"))
    if "ffn_gate_up" not in name:
        return (name,)
    return tuple(name.replace("gate_up", part) for part in ("gate", "up"))


def row_order(name: str, config: Any) -> Tensor | None:
    """Returns which of a parameter's rows a file has one after the other, or None where it has them in their order.

    transformers' Qwen3-Next has, head of keys by head of keys, rows of queries, keys, values and gates.
    """
    if not name.endswith(f"{_QKVZ}.weight"):
        return None
    keys, values = config.linear_key_head_dim, config.linear_value_head_dim
    heads = config.linear_num_key_heads
    of_values = values * (config.linear_num_value_heads // heads)
    sizes = [keys, keys, of_values, of_values]
    rows = torch.arange(heads * sum(sizes)).view(heads, -1)
    return torch.cat([part.flatten() for part in rows.split(sizes, 1)])


def delta_rule(metadata: Metadata) -> dict[str, Any]:
    """Returns the fields of Qwen3-Next's delta rule."""
    inner, states, kernel = (metadata.count(key) for key in (_INNER, _STATE, _KERNEL))
    values, keys = metadata.count(_HEADS), metadata.count(_GROUPS)
    if inner != values * states or values % keys:
        raise GGUFError(
            f"{metadata.file.path}: {inner} numbers cannot be {values} heads of {states} for values, {keys} for keys"
        )
    return {
        "linear_conv_kernel_dim": kernel,
        "linear_key_head_dim": states,
        "linear_value_head_dim": states,
        "linear_num_key_heads": keys,
        "linear_num_value_heads": values,
    }


def delta_rule_keys(config: Any, require: Any) -> dict[str, Any]:
    """Returns the keys of Qwen3-Next's delta rule."""
    kind = config.model_type
    require(kind, "linear_value_head_dim", config.linear_value_head_dim, config.linear_key_head_dim)
    require(kind, "attention_bias", config.attention_bias, False)
    kinds = list(config.layer_types)
    # Without a layer of attention, llama.cpp has no interval, and the layers differ from those of any.
    interval = kinds.index("full_attention") + 1 if "full_attention" in kinds else 1
    require(kind, "layer_types", kinds, layer_types(recurrent_layers(interval, len(kinds))))
    return {
        "full_attention_interval": interval,
        _KERNEL: config.linear_conv_kernel_dim,
        _STATE: config.linear_key_head_dim,
        _GROUPS: config.linear_num_key_heads,
        _HEADS: config.linear_num_value_heads,
        _INNER: config.linear_value_head_dim * config.linear_num_value_heads,
    }


def recurrent_layers(interval: int, layers: int) -> list[bool]:
    """Returns which layers are recurrent, where those at the end of an interval have attention."""
    return [(i + 1) % interval != 0 for i in range(layers)]


def layer_types(recurrent: Sequence[Any]) -> list[str]:
    """Returns transformers' kinds of layers, of which some are recurrent."""
    return ["linear_attention" if one else "full_attention" for one in recurrent]


def multiplier(parameter: str, config: Any) -> Tensor | float:
    """Returns what llama.cpp's Falcon-H1 multiplies a parameter by: a number, or one for each row."""
    if config.model_type != "falcon_h1" or not parameter.endswith("weight"):
        return 1.0
    of = {name: getattr(config, f"{name}_multiplier") for name in _MULTIPLIERS}
    module = parameter.split(".")[-2]
    if module == "in_proj":
        inner, states = config.mamba_d_ssm, config.mamba_n_groups * config.mamba_d_state
        counts = torch.tensor([inner, inner, states, states, config.mamba_n_heads])
        factors = torch.tensor(config.ssm_multipliers) * of["ssm_in"]
        return factors.repeat_interleave(counts)[:, None] if factors.ne(1).any() else 1.0
    return {
        "embed_tokens": of["embedding"],
        "lm_head": of["lm_head"],
        "q_proj": of["attention_in"],
        "k_proj": of["attention_in"] * of["key"],
        "v_proj": of["attention_in"],
        "o_proj": of["attention_out"],
        "out_proj": of["ssm_out"],
        "gate_proj": config.mlp_multipliers[0],
        "down_proj": config.mlp_multipliers[1],
    }.get(module, 1.0)
