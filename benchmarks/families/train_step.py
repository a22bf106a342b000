"""Training steps of models of Qwen2's shapes: compile_train_step(), against eager PyTorch and Inductor.

A step is forward, backward, clipping and AdamW: PyTorch's fused one on its side. metalcore's side is one replay, of a
model with metalcore's norms, gates, rotations and loss.
"""

import functools

import torch

import metalcore

from ..harness.case import Comparison
from ..harness.compiled import AGAINST, inductor

# Shape, rows, tokens of a row, dtype.
BATCHES = {
    "gpu": [("0.5B", 1, 128, torch.bfloat16), ("0.5B", 4, 1024, torch.bfloat16)],
    "simulator": [("tiny", 2, 16, torch.float32)],
    "quick": [("tiny", 1, 8, torch.float32)],
}


def cases(scale):
    return [case(*batch, against) for batch in BATCHES[scale] for against in AGAINST[scale]]


def case(shape, rows, length, dtype, against):
    def inputs(device):
        from transformers import Qwen2ForCausalLM

        from examples.common.qwen import config

        with torch.device(device):
            model = Qwen2ForCausalLM(config(shape, length)).to(dtype).train()
            return model, torch.randint(model.config.vocab_size, (rows, length))

    return Comparison(
        name=f"train step of qwen2.5-{shape}, against {against}",
        shape=f"{rows}x{length}",
        dtype=dtype,
        inputs=inputs,
        bind=lambda make, *values: make(*values),
        ours=replayed,
        theirs=functools.partial(ordinary, inductor if against == "Inductor" else lambda function: function),
        graph=False,
    )


def loss_of(model):
    # Without masks of its own, the model would look on the host whether rows are packed, which no replay can do.
    masks = {"full_attention": None}
    return lambda tokens: model(tokens, labels=tokens, attention_mask=masks, use_cache=False).loss


def replayed(model, tokens):
    from metalcore.integrations import transformers as metalcore_transformers

    optimizer = metalcore.optim.AdamW(model.parameters(), lr=1e-4)
    with metalcore_transformers.patch():
        step = metalcore.compile_train_step(loss_of(model), lambda loss: loss, optimizer, tokens, max_norm=1.0)
        for _ in range(3):  # one of the first steps is recorded
            step(tokens)
    return functools.partial(step, tokens)


def ordinary(compiler, model, tokens):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    forward = compiler(loss_of(model))

    def step():
        loss = forward(tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step
