"""Language models of given shapes, whose packed weights are random bytes made on the device."""

from __future__ import annotations

import torch

from metalcore.quant._plan import plan, replace_modules
from metalcore.quant._types import SCALES

# Arguments of transformers' LlamaConfig.
_COMMON = {"rms_norm_eps": 1e-5, "bos_token_id": None, "eos_token_id": None, "max_position_embeddings": 8192}
SHAPES = {
    "llama-3-8b": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "llama-1b": {
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "llama-15m": {
        "vocab_size": 8192,
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_hidden_layers": 12,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    },
    "llama-tiny": {
        "vocab_size": 256,
        "hidden_size": 256,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}


def random_model(name: str, mixture: str, device: torch.device | str, dtype: torch.dtype):
    """A Llama in eval mode. Its weights' scales are those of a model: activations stay finite."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**_COMMON | SHAPES[name])).to(dtype)
    replace_modules(model, plan(model, mixture, (), None), pack=False)
    rotary = type(model.model.rotary_emb)(model.config).to(device)
    model = model.to_empty(device=device)
    model.model.rotary_emb = rotary
    for parameter in model.parameters():
        parameter.data.fill_(1.0)
    for module in model.modules():
        for buffer in module._buffers.values():
            if buffer is not None and buffer.dtype == torch.uint8:
                _fill(buffer, module.type)
    return model.eval()


def _fill(packed, type):
    packed.random_(0, 256)
    blocks = packed.view(-1, type.nbytes)
    for at in SCALES[type.name]:  # float16 numbers of about a thousandth
        blocks[:, at + 1] = blocks[:, at + 1] % 4 + 0x14
