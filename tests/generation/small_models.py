"""Small models with random weights, each of another family."""

import torch
from models import LINEAR
from transformers import (
    FalconH1Config,
    FalconH1ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

VOCABULARY = 97
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_GEMMA = {"head_dim": 16, "sliding_window": 5, "query_pre_attn_scalar": 16}
_GPT2 = {
    "vocab_size": VOCABULARY,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 256,
    "tie_word_embeddings": False,
}

MODELS = {
    "llama": lambda **more: LlamaForCausalLM(LlamaConfig(**_SIZES | more)),
    "qwen2": lambda **more: Qwen2ForCausalLM(Qwen2Config(**_SIZES | more)),
    "mistral": lambda **more: MistralForCausalLM(MistralConfig(**_SIZES | {"sliding_window": 6} | more)),
    "gemma2": lambda **more: Gemma2ForCausalLM(Gemma2Config(**_SIZES | _GEMMA | more)),
    "gpt2": lambda **more: GPT2LMHeadModel(GPT2Config(**_GPT2, bos_token_id=None, eos_token_id=None, pad_token_id=0)),
}

_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
_QWEN3_NEXT = _EXPERTS | LINEAR | {"head_dim": 16, "num_experts": 4, "shared_expert_intermediate_size": 24}
_MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1}
_NEMOTRON_H = _EXPERTS | {
    "layers_block_type": ["mamba", "attention", "moe"],
    "num_hidden_layers": 3,
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "ssm_state_size": 8,
    "n_groups": 1,
    "n_routed_experts": 4,
    "moe_shared_expert_intermediate_size": 24,
    "head_dim": 16,
}
# Layers with states and layers with keys; layers with both; some with nothing; states alone.
HYBRIDS = {
    "qwen3_next": lambda **more: Qwen3NextForCausalLM(Qwen3NextConfig(**_SIZES | _QWEN3_NEXT | more)),
    "falcon_h1": lambda **more: FalconH1ForCausalLM(FalconH1Config(**_SIZES | _MAMBA2 | {"mamba_d_ssm": 32} | more)),
    "nemotron_h": lambda **more: NemotronHForCausalLM(NemotronHConfig(**_SIZES | _NEMOTRON_H | more)),
    "mamba": lambda **more: MambaForCausalLM(MambaConfig(**_SIZES | {"state_size": 4} | more)),
}


def small_model(family, device="cpu", **more):
    """In eval mode. Its weights are so large that its next tokens depend on those before."""
    torch.manual_seed(0)
    model = (MODELS | HYBRIDS)[family](**more).eval()
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, std=0.2 if parameter.dim() > 1 or name.endswith("bias") else 1.0)
    return model.to(device)


def prompts(device, rows=2, length=9):
    generator = torch.Generator().manual_seed(5)
    return torch.randint(1, VOCABULARY, (rows, length), generator=generator).to(device)
