"""Language models whose packed weights are random bytes made on the device, and how fast they generate."""

from __future__ import annotations

import time
from itertools import pairwise

import torch

from metalcore.quant._plan import plan, replace_modules
from metalcore.quant._types import SCALES

from .case import Sampled, Samples

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
    """Returns a Llama in eval mode. Its weights' scales are those of a model: activations stay finite."""
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


_FIRST = 6  # tokens that are not counted: kernels are loaded, and a CUDA graph is made


def decode(model: str, context: int, dtype: torch.dtype, tokens_per_second: float | None = None) -> Sampled:
    """Returns the time of a token of a model with packed weights (Q4_K_M), one row, after a prompt."""
    return Sampled(
        name=f"tokens of {model}, Q4_K_M",
        shape=f"after {context}",
        dtype=dtype,
        sample=lambda run: _sample(run, model, context, dtype),
        targets={} if tokens_per_second is None else {"seconds": 1 / tokens_per_second},
    )


def _sample(run, name, context, dtype):
    from metalcore.generation import stream
    from metalcore.integrations import transformers as metalcore_transformers

    device, counted, calls = run.device.ours, 3 if run.quick else 31, 1 if run.quick else 4
    model = random_model(name, "q4_k_m", device, dtype)
    prompt = torch.randint(0, model.config.vocab_size, (1, context), device=device)
    times = []
    with metalcore_transformers.patch():
        tokens = stream(model, prompt, max_new_tokens=_FIRST + counted * calls + 1)
        for index, _ in enumerate(tokens):
            if index >= _FIRST and (index - _FIRST) % calls == 0:
                times.append(time.perf_counter())
    seconds = [(after - before) / calls for before, after in pairwise(times)]
    middle = sorted(seconds)[len(seconds) // 2]
    return Samples(ours=seconds, method="wall-clock time of generate's steps", variant=f"{1 / middle:.0f} tokens/s")
