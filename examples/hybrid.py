"""A small Qwen3-Next (three gated delta rules for each layer of attention) learns a text byte by byte, and goes on with
its first words.

python examples/hybrid.py                          # on mps or cuda, or simulated where there is neither
python -m metalcore.simulator examples/hybrid.py   # on the simulated mps device
python examples/hybrid.py --hidden 512 --layers 8 --length 512 --steps 500
"""

import argparse

import torch
from common.measure import DEVICE, rows_of_text
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

import metalcore
from metalcore.integrations import transformers as metalcore_transformers

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--hidden", type=int, default=64)
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--length", type=int, default=56, help="bytes of a row")
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--steps", type=int, default=30)
arguments = parser.parse_args()
HEADS = max(2, arguments.hidden // 64)

torch.manual_seed(0)
config = Qwen3NextConfig(
    vocab_size=256,
    hidden_size=arguments.hidden,
    intermediate_size=arguments.hidden * 2,
    num_hidden_layers=arguments.layers,  # each fourth one is attention
    num_attention_heads=HEADS,
    num_key_value_heads=HEADS // 2,
    head_dim=32,
    linear_num_key_heads=HEADS // 2,
    linear_num_value_heads=HEADS,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    num_experts=0,
    max_position_embeddings=1024,
    attn_implementation="eager",
    eos_token_id=None,
    bos_token_id=None,
    pad_token_id=None,
)
model = Qwen3NextForCausalLM(config).to(DEVICE).train()
rows = torch.stack([row["input_ids"] for row in rows_of_text(arguments.length)]).to(DEVICE)
optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3)
kinds = [kind.removesuffix("_attention") for kind in config.layer_types]
count = sum(parameter.numel() for parameter in model.parameters())
print(f"Layers of {', '.join(kinds)} attention, {count / 1e6:.2f} million parameters, {rows.numel()} bytes of text\n")

with metalcore_transformers.patch():
    losses = []
    for step in range(arguments.steps):
        batch = rows.roll(-step * arguments.batch, 0)[: arguments.batch]
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        if step % 10 == 9:
            print(f"steps {step - 8:>3} to {step + 1:>3}: loss {torch.stack(losses[-10:]).mean().item():.3f}")
    model.eval()
    prompt, generator = rows[:1, :20], torch.Generator(DEVICE).manual_seed(0)
    written = metalcore.generate(model, prompt, max_new_tokens=40, temperature=0.5, generator=generator)
    print("\n" + "|".join(bytes(row[0].tolist()).decode("latin-1") for row in (prompt, written)))
    print("\nWhat ran of the layers that are not attention, in how many calls:")
    for row in metalcore.report().rows:
        if row.ran and ("conv1d" in row.what or "delta_rule" in row.what or "Gated" in row.what):
            print(f"{row.ran:>6}  {row.what}")
assert losses[-1] < losses[0] / 2  # nats a byte
