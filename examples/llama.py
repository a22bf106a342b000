"""A small Llama (random weights) trains a few steps with metalcore's kernels in place of PyTorch's, and without."""

import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import metalcore

if not torch.backends.mps.is_available():
    import metalcore.simulator

STEPS = 5


def train():
    torch.manual_seed(0)
    model = (
        LlamaForCausalLM(
            LlamaConfig(
                vocab_size=256,
                hidden_size=64,
                intermediate_size=176,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=64,
                attn_implementation="eager",
            )
        )
        .to("mps")
        .train()
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    tokens = torch.randint(0, 256, (2, 32)).to("mps")
    losses = []
    for _ in range(STEPS):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, torch.nn.utils.parameters_to_vector(model.parameters()).detach()


plain, plain_parameters = train()
with metalcore.enable_pytorch_overrides():
    begin = time.perf_counter()
    patched, patched_parameters = train()
    seconds = time.perf_counter() - begin
    print("Llama, 2 layers, eager attention, trained on mps.\n")

print("step   loss, PyTorch's ops   loss, metalcore's ops")
for step, (a, b) in enumerate(zip(plain, patched), 1):
    print(f"{step:>4}   {a:19.6f}   {b:21.6f}")
    assert abs(a - b) <= 1e-5 * abs(a)

difference = (plain_parameters - patched_parameters).abs().max()
print(f"\nafter {STEPS} steps no parameter differs by more than {difference:.0e}")
print(f"{seconds / STEPS * 1e3:.0f} ms a step, making the model included")
print("\nWhat ran in place of PyTorch, in how many calls:")
for row in metalcore.report().rows:
    if row.ran:
        print(f"{row.ran:>6}  {row.what}")
