"""The small models of each layout: transformers' configurations and the types of their weights."""

from typing import NamedTuple

from models import LINEAR

HIDDEN, WIDTH, VOCABULARY = 256, 512, 288
SIZES = dict(
    vocab_size=VOCABULARY,
    hidden_size=HIDDEN,
    intermediate_size=WIDTH,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
    bos_token_id=256,
    eos_token_id=257,
    pad_token_id=None,
)
MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=256)
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=500000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)
YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=64)
FACTORS = dict(short_factor=[1 + i / 40 for i in range(24)], long_factor=[2 + i / 10 for i in range(24)])
LONG = dict(rope_type="longrope", rope_theta=10000.0, original_max_position_embeddings=256, partial_rotary_factor=0.75)
GEMMA3_ROPE = dict(
    full_attention=dict(rope_type="linear", factor=8.0, rope_theta=1e6),
    sliding_attention=dict(rope_type="default", rope_theta=10000.0),
)


class Case(NamedTuple):
    """A model of transformers, its options, GGUF's name of its layout, and types of its weights, of which the last is
    that of embeddings and output."""

    config: str
    architecture: str
    options: dict
    types: tuple = ("Q4_K", "Q6_K")


CASES = {
    "llama": Case("Llama", "llama", dict(rope_parameters=LLAMA3), ("Q4_K", "Q5_K", "Q6_K")),
    "llama-tied": Case("Llama", "llama", dict(tie_word_embeddings=True, attention_bias=True), ("Q8_0",)),
    "llama-plain": Case("Llama", "llama", dict(num_key_value_heads=4), ("F32",)),
    "mistral": Case("Mistral", "llama", dict(sliding_window=None, head_dim=32), ("Q4_0", "Q6_K")),
    "mixtral": Case("Mixtral", "llama", dict(num_local_experts=4, num_experts_per_tok=2), ("Q4_K", "Q8_0", "Q6_K")),
    "qwen2": Case("Qwen2", "qwen2", dict(rope_parameters=YARN), ("Q5_0", "Q5_1", "Q4_1")),
    "qwen2moe": Case(
        "Qwen2Moe",
        "qwen2moe",
        {**MOE, "shared_expert_intermediate_size": 256, "norm_topk_prob": False},
        ("Q8_0", "Q5_K"),
    ),
    "qwen3": Case("Qwen3", "qwen3", dict(head_dim=128, tie_word_embeddings=True), ("Q2_K", "Q3_K", "Q6_K")),
    "qwen3moe": Case(
        "Qwen3Moe", "qwen3moe", {**MOE, "head_dim": 128, "norm_topk_prob": True}, ("Q4_0", "Q8_0", "Q5_0")
    ),
    "gemma2": Case(
        "Gemma2",
        "gemma2",
        dict(head_dim=128, query_pre_attn_scalar=128, sliding_window=8, tie_word_embeddings=True),
    ),
    "gemma3": Case(
        "Gemma3Text",
        "gemma3",
        dict(
            head_dim=128,
            query_pre_attn_scalar=128,
            sliding_window=8,
            tie_word_embeddings=True,
            num_hidden_layers=6,
            rope_parameters=GEMMA3_ROPE,
        ),
        ("Q4_0", "Q8_0"),
    ),
    "lfm2": Case(
        "Lfm2",
        "lfm2",
        dict(num_hidden_layers=3, layer_types=["conv", "full_attention", "conv"], tie_word_embeddings=True),
    ),
    "phi3": Case("Phi3", "phi3", dict(rope_parameters={**LONG, **FACTORS}, original_max_position_embeddings=256)),
    "gpt-oss": Case(
        "GptOss",
        "gpt-oss",
        dict(
            num_local_experts=4,
            num_experts_per_tok=2,
            intermediate_size=256,
            head_dim=64,
            sliding_window=8,
            rope_parameters={**YARN, "factor": 32.0, "truncate": True},
        ),
        ("Q8_0", "MXFP4", "Q8_0"),
    ),
}
CASES["qwen3next"] = Case(
    "Qwen3Next",
    "qwen3next",
    {
        **MOE,
        **LINEAR,
        "head_dim": 64,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "shared_expert_intermediate_size": 256,
    },
    ("Q4_K", "Q6_K"),
)
STATES = dict(mamba_n_heads=8, mamba_d_head=64, mamba_d_state=32, mamba_n_groups=2)
GRANITE = dict(
    **STATES,
    layer_types=["linear_attention", "full_attention", "linear_attention"],
    num_hidden_layers=3,
    attention_multiplier=0.1,
    embedding_multiplier=3.0,
    residual_multiplier=0.5,
    logits_scaling=2.0,
    shared_intermediate_size=512,
)
EXPERTS = dict(num_local_experts=4, num_experts_per_tok=2, intermediate_size=256)
CASES["mamba"] = Case("Mamba", "mamba", dict(tie_word_embeddings=True), ("Q4_K", "Q6_K"))
CASES["mamba-falcon"] = Case("FalconMamba", "mamba", dict(mixer_rms_eps=1e-5), ("Q8_0",))
CASES["mamba2"] = Case("Mamba2", "mamba2", dict(num_heads=8, head_dim=64, n_groups=2, state_size=32), ("Q4_0", "Q8_0"))
CASES["falcon-h1"] = Case(
    "FalconH1",
    "falcon-h1",
    dict(**STATES, mamba_d_ssm=512, mamba_rms_norm=True, mamba_norm_before_gate=False, head_dim=64),
)
CASES["granitehybrid"] = Case("GraniteMoeHybrid", "granitehybrid", {**GRANITE, **EXPERTS})
CASES["granitehybrid-dense"] = Case(
    "GraniteMoeHybrid",
    "granitehybrid",
    {**GRANITE, "num_local_experts": 0, "position_embedding_type": "rope"},
    ("Q8_0",),
)
CASES["bamba"] = Case("Bamba", "granitehybrid", dict(**STATES, attn_layer_indices=[1], num_hidden_layers=3))
NEMOTRON_H = dict(
    layers_block_type=["linear_attention", "mlp", "full_attention"],
    num_hidden_layers=3,
    head_dim=64,
    mamba_num_heads=8,
    mamba_head_dim=32,
    n_groups=2,
    ssm_state_size=32,
)
CASES["nemotron_h"] = Case("NemotronH", "nemotron_h", NEMOTRON_H, ("Q8_0",))
CASES["nemotron_h_moe"] = Case(
    "NemotronH",
    "nemotron_h_moe",
    {
        **NEMOTRON_H,
        "layers_block_type": ["linear_attention", "moe", "full_attention"],
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 256,
        "moe_shared_expert_intermediate_size": 512,
        "moe_latent_size": 256,
        "routed_scaling_factor": 2.5,
    },
)
DEEPSEEK = dict(
    kv_lora_rank=128,
    qk_nope_head_dim=64,
    qk_rope_head_dim=32,
    v_head_dim=64,
    n_routed_experts=8,
    num_experts_per_tok=2,
    n_shared_experts=2,
    moe_intermediate_size=256,
    first_k_dense_replace=1,
    num_hidden_layers=3,
    num_key_value_heads=4,
    rms_norm_eps=1e-6,
    routed_scaling_factor=1.5,
)
DEEPSEEK_YARN = {**YARN, "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 0.707}
CASES["deepseek2-lite"] = Case(
    "DeepseekV2", "deepseek2", {**DEEPSEEK, "q_lora_rank": None, "rope_parameters": DEEPSEEK_YARN}, ("Q4_K", "Q6_K")
)
CASES["deepseek2"] = Case(
    "DeepseekV3",
    "deepseek2",
    {**DEEPSEEK, "q_lora_rank": 256, "n_group": 4, "topk_group": 2, "norm_topk_prob": True},
    ("Q4_0", "Q8_0"),
)
GEMMA4 = dict(
    num_hidden_layers=6,
    head_dim=64,
    global_head_dim=128,
    sliding_window=8,
    tie_word_embeddings=True,
    vocab_size_per_layer_input=VOCABULARY,
)
_TYPES = ["sliding_attention", "sliding_attention", "full_attention"]
CASES["gemma4"] = Case(  # as E2B: layers that share keys and values, with embeddings of their own
    "Gemma4Text",
    "gemma4",
    {
        **GEMMA4,
        "layer_types": [*_TYPES, _TYPES[0], *_TYPES[1:]],
        "num_kv_shared_layers": 3,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 64,
    },
    ("Q4_0", "Q8_0"),
)
CASES["gemma4-dense"] = Case(  # as 31B: keys for values, and fewer heads, in layers without a window
    "Gemma4Text",
    "gemma4",
    {
        **GEMMA4,
        "layer_types": _TYPES * 2,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "hidden_size_per_layer_input": 0,
        "final_logit_softcapping": 30.0,
    },
    ("Q5_0", "Q8_0"),
)
