"""How fast models generate."""

from __future__ import annotations

import time
from itertools import pairwise

import torch

from .case import Sampled, Samples
from .models import random_model

_FIRST = 6  # tokens that are not counted: kernels are loaded, and a CUDA graph is made


def decode(model: str, context: int, dtype: torch.dtype, tokens_per_second: float | None = None) -> Sampled:
    """A token's time, of a model with packed weights (Q4_K_M), one row, after a prompt."""
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
