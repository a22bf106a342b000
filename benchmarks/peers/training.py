"""Training steps of a Llama of 162 million parameters: transformers' own code with metalcore's patch, against the same
without a patch and with Liger-Kernel's. AdamW (PyTorch's, fused) and attention (PyTorch's) are the same in all."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch

from ..harness.case import Sampled, Samples, size_text

# Layers, size of the hidden states, vocabulary, sequences, length.
SIZES = {
    "gpu": (12, 768, 32000, 8, 2048),
    "simulator": (1, 64, 512, 1, 16),
    "quick": (1, 64, 512, 1, 16),
}
WARM_UP = 4
# The loss is near log(vocabulary) in these steps, and rounding of bfloat16 moves it by less.
LOSS_LIMIT = 0.02


@dataclass(frozen=True)
class Training:
    layers: int
    hidden: int
    vocabulary: int
    batch: int
    length: int
    dtype: torch.dtype

    def model(self, device):
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=4 * self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=max(1, self.hidden // 64),
            max_position_embeddings=self.length,
        )
        return LlamaForCausalLM(config).to(device, self.dtype).train()

    def measure(self, run, patch):
        """Returns (seconds of each step, the largest memory in GiB or None, the loss after some steps).

        Args:
            patch: (model) -> a context manager in which the model is trained.
        """
        device = run.device
        model = self.model(device.ours)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.name == "cuda")
        tokens = torch.randint(self.vocabulary, (self.batch, self.length), generator=torch.Generator().manual_seed(1))
        tokens, losses = tokens.to(device.ours), []

        def step():
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())

        with patch(model):
            for _ in range(WARM_UP):
                step()
            device.synchronize()
            if device.name == "cuda":
                torch.cuda.reset_peak_memory_stats()
            times = [device.seconds(step) for _ in range(run.rounds)]
        memory = torch.cuda.max_memory_allocated() / 2**30 if device.name == "cuda" else None
        return times, memory, losses[WARM_UP - 1].item()


def metalcores(model):
    from metalcore.integrations import transformers

    return transformers.patch()


def none(model):
    return contextlib.nullcontext()


def ligers(functions):
    def patch(model):
        functions._apply_liger_kernel_to_instance(model=model)
        return contextlib.nullcontext()

    return patch


def cases(scale, functions):
    *sizes, batch, length = SIZES[scale]
    training = Training(*sizes, batch, length, torch.bfloat16 if scale == "gpu" else torch.float32)
    return [
        case(training, "without a patch", none),
        case(training, "Liger's patch", ligers(functions)),
    ]


def case(training, name, patch):
    def sample(run):
        seconds = []
        for which in (metalcores, patch):
            seconds.append(training.measure(run, which))
            run.device.release()
        (ours, memory, loss), (theirs, their_memory, their_loss) = seconds
        if not abs(loss - their_loss) <= LOSS_LIMIT:
            raise ArithmeticError(f"the losses differ after {WARM_UP} steps: {loss:.4f} and {their_loss:.4f}")
        return Samples(
            ours=ours,
            theirs=theirs,
            method=run.device.method,
            variant=f"{memory:.1f} GiB, the other {their_memory:.1f}" if memory else "",
        )

    return Sampled(
        name=f"training step, {name}",
        shape=size_text((training.batch, training.length)),
        dtype=training.dtype,
        sample=sample,
    )
