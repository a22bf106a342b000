"""Keys of each layout, as llama.cpp's convert_hf_to_gguf.py writes them from transformers' configurations."""

import numpy as np
import pytest
from layout_cases import SIZES, WIDTH

gguf = pytest.importorskip("gguf")


def add_keys(writer, config, architecture):
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    if architecture in ("mamba", "mamba2"):
        _mamba_keys(writer, config, architecture)
        return
    if architecture.startswith("nemotron_h"):
        _nemotron_h_keys(writer, config)
        return
    writer.add_context_length(config.max_position_embeddings)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if architecture == "gemma4":
        _gemma4_keys(writer, config)
        return
    writer.add_feed_forward_length(config.intermediate_size)  # that of lfm2 is adjusted to the same
    if architecture == "lfm2":
        writer.add_head_count_kv([0, config.num_key_value_heads, 0])
        writer.add_shortconv_l_cache(config.conv_L_cache)
    elif architecture == "granitehybrid":
        _granite_keys(writer, config)
    else:
        writer.add_head_count_kv(1 if architecture == "deepseek2" else config.num_key_value_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if architecture in ("falcon-h1", "granitehybrid"):
        _state_keys(writer, config)
    if architecture == "deepseek2":
        _deepseek_keys(writer, config)
    elif head_dim != config.hidden_size // config.num_attention_heads or architecture == "gpt-oss":
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if architecture == "qwen3next":
        _qwen3_next_keys(writer, config)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_freq_base(rope["rope_theta"])
    if architecture in ("llama", "phi3", "qwen3next"):
        writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1)))
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope["rope_type"] == "longrope":
        context = rope["original_max_position_embeddings"]
        writer.add_rope_scaling_orig_ctx_len(context)
        scale = config.max_position_embeddings / context
        writer.add_rope_scaling_attn_factors((1 + np.log(scale) / np.log(context)) ** 0.5)
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    experts = next((count for name in names if (count := getattr(config, name, None))), None)
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if architecture in ("qwen2moe", "qwen3moe", "qwen3next", "gpt-oss"):
        writer.add_expert_feed_forward_length(256)
    if architecture in ("qwen2moe", "qwen3next"):
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


def _mamba_keys(writer, config, architecture):
    writer.add_context_length(2**20)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_layer_norm_rms_eps(config.layer_norm_epsilon)
    writer.add_ssm_conv_kernel(config.conv_kernel)
    writer.add_ssm_inner_size(2 * config.hidden_size)
    writer.add_ssm_state_size(config.state_size)
    if architecture == "mamba2":
        writer.add_ssm_time_step_rank(config.num_heads)
        writer.add_ssm_group_count(config.n_groups)
    else:
        writer.add_ssm_time_step_rank(config.time_step_rank)
        writer.add_ssm_dt_b_c_rms(config.model_type == "falcon_mamba")


def _ssm_keys(writer, kernel, heads, size, states, groups):
    writer.add_ssm_conv_kernel(kernel)
    writer.add_ssm_inner_size(heads * size)
    writer.add_ssm_state_size(states)
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_group_count(groups)


def _state_keys(writer, config):
    heads, size, states = config.mamba_n_heads, config.mamba_d_head, config.mamba_d_state
    _ssm_keys(writer, config.mamba_d_conv, heads, size, states, config.mamba_n_groups)


def _qwen3_next_keys(writer, config):
    writer.add_full_attention_interval(2)
    heads, size, states = config.linear_num_value_heads, config.linear_value_head_dim, config.linear_key_head_dim
    _ssm_keys(writer, config.linear_conv_kernel_dim, heads, size, states, config.linear_num_key_heads)


def _granite_keys(writer, config):
    writer.add_head_count_kv([0, config.num_key_value_heads, 0])
    if config.model_type == "bamba":
        writer.add_rope_scaling_finetuned(True)
        writer.add_rope_dimension_count(32)
        return
    writer.add_attention_scale(config.attention_multiplier)
    writer.add_embedding_scale(config.embedding_multiplier)
    writer.add_residual_scale(config.residual_multiplier)
    writer.add_logit_scale(config.logits_scaling)
    writer.add_rope_scaling_finetuned(config.position_embedding_type == "rope")
    if config.num_local_experts:
        writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)


def _nemotron_h_keys(writer, config):
    kinds, experts = config.layer_types, "moe" in config.layer_types
    width = config.moe_intermediate_size if experts else config.intermediate_size
    writer.add_context_length(2**20)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv([config.num_key_value_heads if kind == "full_attention" else 0 for kind in kinds])
    writer.add_feed_forward_length([width if kind in ("mlp", "moe") else 0 for kind in kinds])
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_eps(config.layer_norm_epsilon)
    if not experts:  # a file may have this key or not
        writer.add_layer_norm_rms_eps(config.layer_norm_epsilon)
    writer.add_vocab_size(config.vocab_size)
    writer.add_rope_scaling_finetuned(False)
    heads, size, states = config.mamba_num_heads, config.mamba_head_dim, config.ssm_state_size
    _ssm_keys(writer, config.conv_kernel, heads, size, states, config.n_groups)
    if experts:
        writer.add_expert_count(config.n_routed_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(width)
        writer.add_expert_shared_feed_forward_length(config.moe_shared_expert_intermediate_size)
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_group_count(config.n_group)
        writer.add_moe_latent_size(config.moe_latent_size)


def _gemma4_keys(writer, config):
    slides = [kind == "sliding_attention" for kind in config.layer_types]
    shared = config.num_kv_shared_layers
    writer.add_shared_kv_layers(shared)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern(slides)
    writer.add_key_length(128)
    writer.add_value_length(128)
    writer.add_key_length_swa(64)
    writer.add_value_length_swa(64)
    writer.add_rope_dimension_count(128)
    writer.add_rope_dimension_count_swa(64)
    writer.add_rope_freq_base(config.rope_parameters["full_attention"]["rope_theta"])
    writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
    widths, heads = config.intermediate_size, SIZES["num_key_value_heads"]
    if config.use_double_wide_mlp:
        widths = [WIDTH] * (len(slides) - shared) + [2 * WIDTH] * shared
    if config.attention_k_eq_v:
        heads = [2 if one else 1 for one in slides]
    writer.add_feed_forward_length(widths)
    writer.add_head_count_kv(heads)
    if config.final_logit_softcapping:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)


def _deepseek_keys(writer, config):
    short, rotated, third = config.kv_lora_rank, config.qk_rope_head_dim, config.model_type == "deepseek_v3"
    writer.add_key_length(short + rotated)
    writer.add_value_length(short)
    writer.add_key_length_mla(config.qk_nope_head_dim + rotated)
    writer.add_value_length_mla(config.v_head_dim)
    writer.add_kv_lora_rank(short)
    if config.q_lora_rank:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_rope_dimension_count(rotated)
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    functions = gguf.ExpertGatingFuncType
    writer.add_expert_gating_func(functions.SIGMOID if third else functions.SOFTMAX)
    if third:
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
        writer.add_expert_weights_norm(config.norm_topk_prob)
    if "mscale_all_dim" in config.rope_parameters:
        writer.add_rope_scaling_yarn_log_mul(0.1 * config.rope_parameters["mscale_all_dim"])
