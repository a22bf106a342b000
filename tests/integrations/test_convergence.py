"""Training with all patches gives the losses of training without them, step by step.

METALCORE_CONVERGENCE_STEPS=50 makes it longer.
"""

import os

import pytest
import torch
import transformers
from models import decoder, tokens

from metalcore.integrations import transformers as integration

STEPS = int(os.environ.get("METALCORE_CONVERGENCE_STEPS", "3"))
SMALL = dict(hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4)


def gpt2(device):
    sizes = dict(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=32)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, embd_pdrop=0, attn_pdrop=0, resid_pdrop=0))


def bert(device):
    config = transformers.BertConfig(
        vocab_size=64, **SMALL, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, max_position_embeddings=32
    )
    return transformers.BertForMaskedLM(config)


def vit(device):
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(**SMALL, image_size=16, patch_size=4, num_labels=5)
    )


def t5(device):
    config = transformers.T5Config(
        vocab_size=64,
        d_model=32,
        d_kv=8,
        d_ff=40,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        feed_forward_proj="gated-gelu",
    )
    return transformers.T5ForConditionalGeneration(config)


MODELS = {
    "Llama": lambda device: decoder("Llama", device),
    "Qwen3": lambda device: decoder("Qwen3", device),
    "Gemma3": lambda device: decoder("Gemma3", device),
    "Qwen3Next": lambda device: decoder("Qwen3Next", device),
    "OlmoHybrid": lambda device: decoder("OlmoHybrid", device),
    "Lfm2": lambda device: decoder("Lfm2", device),
    "Mamba2": lambda device: decoder("Mamba2", device),
    "GraniteMoeHybrid": lambda device: decoder("GraniteMoeHybrid", device),
    "GPT-2": gpt2,
    "BERT": bert,
    "ViT": vit,
    "T5": t5,
}


def batches(device, name):
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step % 4)
        if name == "ViT":
            images = torch.randn(4, 3, 16, 16, generator=generator)
            yield {"pixel_values": images.to(device), "labels": torch.arange(4).to(device)}
        else:
            ids = tokens("cpu", batch=3, length=16).roll(step % 4, 0)
            mask = torch.ones_like(ids)
            mask[2, 12:] = 0
            labels = ids.masked_fill(mask == 0, -100)
            batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
            yield {key: value.to(device) for key, value in batch.items()}


def losses(device, name, dtype=torch.float32):
    torch.manual_seed(0)
    model = MODELS[name](device).to(device, dtype).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    found = []
    for batch in batches(device, name):
        if name == "ViT":
            batch["pixel_values"] = batch["pixel_values"].to(dtype)
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("name", MODELS)
def test_float32(device, name):
    expected = losses(device, name)
    with integration.patch():
        found = losses(device, name)
    assert found == pytest.approx(expected, rel=1e-4)
    assert len(expected) == STEPS and (STEPS < 8 or expected[-1] < expected[0])


@pytest.mark.parametrize("name", ("Llama", "BERT") if STEPS < 8 else MODELS)
def test_bfloat16(device, name):
    """Patched training is as far from float32's losses as unpatched training, by a factor of 2 and a last bit."""
    exact, plain = losses(device, name), losses(device, name, torch.bfloat16)
    with integration.patch():
        found = losses(device, name, torch.bfloat16)
    spread = max(abs(a - b) for a, b in zip(plain, exact))
    assert found == pytest.approx(exact, abs=2 * spread + torch.finfo(torch.bfloat16).eps * max(exact))
