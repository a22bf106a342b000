"""Small models of transformers for tests."""

import torch
import transformers

SIZES = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    pad_token_id=0,
    eos_token_id=1,
    bos_token_id=2,
)
MOE = dict(num_experts=4, num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, head_dim=8)
# class, options of its configuration
DECODERS = {
    "Llama": {},
    "Mistral": dict(sliding_window=5),
    "Mixtral": MOE,
    "Qwen2": dict(use_sliding_window=True, sliding_window=5, max_window_layers=1),
    "Qwen2Moe": {**MOE, "shared_expert_intermediate_size": 24},
    "Qwen3": dict(head_dim=8),
    "Qwen3Moe": MOE,
    "Gemma": dict(head_dim=8),
    "Gemma2": dict(head_dim=8, sliding_window=5),
    "Gemma3": dict(head_dim=8, sliding_window=5),
    "Phi": {},
    "Phi3": {},
    "Olmo2": {},
    "Glm": dict(head_dim=8),
    "Granite": dict(logits_scaling=2.0, attention_multiplier=0.3),
    "GptOss": {**MOE, "sliding_window": 5},
}
# A small hybrid: a layer with states, and one with keys.
LINEAR = dict(
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=6,
    layer_types=["linear_attention", "full_attention"],
    head_dim=8,
)
# Models that are not only attention.
HYBRIDS = {
    "Qwen3Next": {**MOE, **LINEAR, "shared_expert_intermediate_size": 24},
    "Qwen3_5": LINEAR,
    "Qwen3_5Moe": {**MOE, **LINEAR, "shared_expert_intermediate_size": 24},
    "OlmoHybrid": LINEAR,
    "KimiLinear": dict(
        num_key_value_heads=4,
        layer_types=["linear_attention", "full_attention"],
        linear_head_dim=8,
        linear_num_heads=4,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        num_experts=4,
        num_experts_per_token=2,
        moe_intermediate_size=24,
    ),
    "Lfm2": dict(layer_types=["conv", "full_attention"]),
    "Mamba": dict(state_size=4),
    "Mamba2": dict(state_size=8, num_heads=8, head_dim=8, n_groups=1, chunk_size=8),
    "Jamba": dict(
        num_experts=2,
        num_experts_per_tok=1,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        mamba_d_state=4,
        mamba_dt_rank=4,
        use_mamba_kernels=False,
    ),
    "GraniteMoeHybrid": dict(
        layer_types=["mamba", "attention"],
        num_local_experts=4,
        num_experts_per_tok=2,
        mamba_n_heads=8,
        mamba_d_head=8,
        mamba_n_groups=1,
        mamba_d_state=8,
        shared_intermediate_size=24,
    ),
}
_OF_TEXTS = "Gemma3", "Qwen3_5", "Qwen3_5Moe"


def decoder(name, device, **options):
    """A model for causal language modeling with random weights, the same for each call."""
    torch.manual_seed(0)
    config_class = getattr(transformers, f"{name}TextConfig" if name in _OF_TEXTS else f"{name}Config")
    implementation = options.pop("attn_implementation", None)
    config = config_class(**{**SIZES, **(DECODERS | HYBRIDS)[name], **options})
    model = getattr(transformers, f"{name}ForCausalLM")._from_config(config, attn_implementation=implementation)
    for parameter in model.parameters():  # sinks, norms and biases would be trivial
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return model.to(device)


def tokens(device, batch=2, length=16):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, 64, (batch, length), generator=generator).to(device)
