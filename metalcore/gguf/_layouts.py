"""What llama.cpp calls the parameters of transformers' models, layout by layout.

Source of the names and of what is done to the numbers: github.com/ggml-org/llama.cpp, convert_hf_to_gguf.py.

llama.cpp's llama rotates neighbours in a head of q or k, and transformers rotates the number i with i + half. Rows are
whole in packed weights, so that reordering them permutes bytes as well as numbers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

__all__ = ["LAYOUTS", "MODEL_TYPES", "Layout", "from_interleaved", "of_model", "to_interleaved"]


class Layout(NamedTuple):
    """A layout of a model's tensors in GGUF files.

    Attributes:
        architecture: general.architecture of the files.
        model_type: transformers' name of the model.
        layer: transformers' modules and parameters of a layer, without "model.layers.N.", and llama.cpp's of them,
            without "blk.N.". A parameter's name is whole, and a module's lacks ".weight" or ".bias".
        permuted: whether rows of q and k are stored so that neighbours are rotated together.
        norm_offset: what the file's weights of norms are larger by.
        experts: the path of the module of experts within a layer, or None.
        buffers: names of buffers that files have.
        gated: whether experts have gates.
    """

    architecture: str
    model_type: str
    layer: dict[str, str]
    permuted: bool = False
    norm_offset: float = 0.0
    experts: str | None = None
    buffers: tuple[str, ...] = ()
    gated: bool = True

    def name(self, parameter: str) -> str | None:
        """Returns llama.cpp's name of a parameter of the model ("model.layers.0.self_attn.q_proj.weight"), or None."""
        parameter = parameter.replace("backbone.", "model.", 1)
        if parameter.startswith("model.layers."):
            _, _, number, rest = parameter.split(".", 3)
            names, prefix = self.layer, f"blk.{number}."
        else:
            names, prefix, rest = _OUTSIDE, "", parameter
        if rest in names:
            return prefix + names[rest]
        module, _, leaf = rest.rpartition(".")
        return f"{prefix}{names[module]}.{leaf}" if module in names else None

    def rotated(self, parameter: str, config: Any) -> int | None:
        """Returns the number of heads of a parameter whose rows are permuted, or None."""
        if not self.permuted or ".self_attn." not in parameter:
            return None
        module = parameter.rsplit(".", 2)[1]
        return {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(module)

    def shifted(self, parameter: str) -> float:
        """Returns what the file's numbers of a parameter are larger by."""
        shifts = parameter.endswith("norm.weight") and not parameter.endswith("linear_attn.norm.weight")
        return self.norm_offset if shifts else 0.0


_OUTSIDE = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "model.embedding_norm": "token_embd_norm",
    "model.embeddings": "token_embd",
    "model.norm_f": "output_norm",
    "model.final_layernorm": "output_norm",
    "lm_head": "output",
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
}
_ATTENTION = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
}
_HEAD_NORMS = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
_MLP = {"mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
_GEMMA = {
    **_ATTENTION,
    **_MLP,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_GEMMA4 = {
    **_GEMMA,
    **_HEAD_NORMS,
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
    "layer_scalar": "layer_output_scale.weight",
}
_PHI3 = {
    "input_layernorm": "attn_norm",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_SHARED_EXPERT = {
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}
_GPT_OSS = {
    **_ATTENTION,
    "post_attention_layernorm": "post_attention_norm",
    "self_attn.sinks": "attn_sinks.weight",
    "mlp.router": "ffn_gate_inp",
}
_ROUTER = {"mlp.gate": "ffn_gate_inp"}
_DEEPSEEK = {
    **_ATTENTION,
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    **_MLP,
    **_ROUTER,
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
}
_LFM2 = {
    "operator_norm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.out_proj": "attn_output",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "conv.in_proj": "shortconv.in_proj",
    "conv.conv": "shortconv.conv",
    "conv.out_proj": "shortconv.out_proj",
    "ffn_norm": "ffn_norm",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w2": "ffn_down",
    "feed_forward.w3": "ffn_up",
}

_STATE_SPACE = {
    "in_proj": "ssm_in",
    "conv1d": "ssm_conv1d",
    "x_proj": "ssm_x",
    "dt_proj": "ssm_dt",
    "dt_bias": "ssm_dt.bias",
    "A_log": "ssm_a",
    "D": "ssm_d",
    "norm": "ssm_norm",
    "out_proj": "ssm_out",
}
_MAMBA = {"norm": "attn_norm", **{f"mixer.{module}": name for module, name in _STATE_SPACE.items()}}
_WITHIN = {f"mamba.{module}": name for module, name in _STATE_SPACE.items()}
_QWEN3_NEXT = {
    **_ATTENTION,
    **_HEAD_NORMS,
    **_ROUTER,
    **_SHARED_EXPERT,
    **{f"linear_attn.{module}": name for module, name in _STATE_SPACE.items()},
    "post_attention_layernorm": "post_attention_norm",
    "linear_attn.in_proj_qkvz": "ssm_qkvz",
    "linear_attn.in_proj_ba": "ssm_ba",
}
_GRANITE_HYBRID = {
    **_ATTENTION,
    **_WITHIN,
    "block_sparse_moe.router": "ffn_gate_inp",
    "shared_mlp.input_linear": "ffn_gate_up_shexp",
    "shared_mlp.output_linear": "ffn_down_shexp",
}
_GRANITE_DENSE = {
    **_ATTENTION,
    **_WITHIN,
    "shared_mlp.input_linear": "ffn_gate_up",
    "shared_mlp.output_linear": "ffn_down",
}
_BAMBA = {
    **_ATTENTION,
    **_WITHIN,
    **{module.replace("mlp", "feed_forward"): name for module, name in _MLP.items()},
    "pre_ff_layernorm": "ffn_norm",
}
_NEMOTRON_H = {
    **_MAMBA,
    **{name.replace("self_attn", "mixer"): other for name, other in _ATTENTION.items() if "self_attn" in name},
    "mixer.up_proj": "ffn_up",
    "mixer.down_proj": "ffn_down",
}
_NEMOTRON_H_MOE = {
    **_NEMOTRON_H,
    "mixer.gate": "ffn_gate_inp",
    "mixer.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mixer.shared_experts.up_proj": "ffn_up_shexp",
    "mixer.shared_experts.down_proj": "ffn_down_shexp",
    "mixer.fc1_latent_proj": "ffn_latent_down",
    "mixer.fc2_latent_proj": "ffn_latent_up",
}
_FALCON_H1 = {
    **_ATTENTION,
    **_WITHIN,
    **{module.replace("mlp", "feed_forward"): name for module, name in _MLP.items()},
    "pre_ff_layernorm.weight": "ffn_norm",
}

# Mistral's and Mixtral's files have the architecture llama; their name tells the one, and their experts the other.
MODEL_TYPES: dict[str, Layout] = {
    layout.model_type: layout
    for layout in (
        Layout("llama", "llama", {**_ATTENTION, **_MLP}, permuted=True),
        Layout("llama", "mistral", {**_ATTENTION, **_MLP}, permuted=True),
        Layout("llama", "mixtral", {**_ATTENTION, **_ROUTER}, permuted=True, experts="mlp.experts"),
        Layout("qwen2", "qwen2", {**_ATTENTION, **_MLP}),
        Layout("qwen2moe", "qwen2_moe", {**_ATTENTION, **_ROUTER, **_SHARED_EXPERT}, experts="mlp.experts"),
        Layout("qwen3", "qwen3", {**_ATTENTION, **_HEAD_NORMS, **_MLP}),
        Layout("qwen3moe", "qwen3_moe", {**_ATTENTION, **_HEAD_NORMS, **_ROUTER}, experts="mlp.experts"),
        Layout("gemma2", "gemma2", _GEMMA, norm_offset=1.0),
        Layout("gemma3", "gemma3_text", {**_GEMMA, **_HEAD_NORMS}, norm_offset=1.0),
        Layout("gemma4", "gemma4_text", _GEMMA4, buffers=("layer_scalar",)),
        Layout("lfm2", "lfm2", _LFM2),
        Layout("qwen3next", "qwen3_next", _QWEN3_NEXT, norm_offset=1.0, experts="mlp.experts"),
        Layout("mamba", "mamba", _MAMBA),
        Layout("mamba", "falcon_mamba", _MAMBA),
        Layout("mamba2", "mamba2", _MAMBA),
        Layout("falcon-h1", "falcon_h1", _FALCON_H1),
        Layout("granitehybrid", "granitemoehybrid", _GRANITE_HYBRID, permuted=True, experts="block_sparse_moe.experts"),
        Layout("granitehybrid", "bamba", _BAMBA, permuted=True),
        Layout(
            "nemotron_h_moe",
            "nemotron_h",
            _NEMOTRON_H_MOE,
            experts="mixer.experts",
            buffers=("e_score_correction_bias",),
            gated=False,
        ),
        Layout("phi3", "phi3", _PHI3),
        Layout("gpt-oss", "gpt_oss", _GPT_OSS, experts="mlp.experts"),
        Layout("deepseek2", "deepseek_v2", _DEEPSEEK, experts="mlp.experts"),
        Layout("deepseek2", "deepseek_v3", _DEEPSEEK, experts="mlp.experts", buffers=("e_score_correction_bias",)),
    )
}
# Hybrids without experts have other names: Granite for the shared one, and Nemotron for the architecture.
_WITHOUT_EXPERTS = {
    "granitemoehybrid": MODEL_TYPES["granitemoehybrid"]._replace(layer=_GRANITE_DENSE, experts=None),
    "nemotron_h": Layout("nemotron_h", "nemotron_h", _NEMOTRON_H),
}
LAYOUTS: dict[str, Layout] = {
    layout.architecture: layout for layout in (*reversed(MODEL_TYPES.values()), _WITHOUT_EXPERTS["nemotron_h"])
}


def of_model(model_type: str, experts: int) -> Layout | None:
    """Returns the layout of transformers' models of a name, which have so many experts in a layer, or None."""
    layout = MODEL_TYPES.get(model_type)
    return layout if experts else _WITHOUT_EXPERTS.get(model_type, layout)


def from_interleaved(rows: Tensor, heads: int) -> Tensor:
    """Returns (rows, *) in llama.cpp's order as transformers has them, contiguous."""
    return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2).contiguous()


def to_interleaved(rows: Tensor, heads: int) -> Tensor:
    """Returns (rows, *) in transformers' order as llama.cpp has them, contiguous."""
    return rows.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2).contiguous()
