"""Low-rank adapters on a frozen Qwen3, trained with PyTorch's kernels and with metalcore's.

    python examples/finetune_lora.py                          # on mps or cuda, or simulated where there is neither
    python -m metalcore.simulator examples/finetune_lora.py   # on the simulated mps device
    pip install peft                                          # else the adapters are the few lines below

The model has random weights, so that nothing is downloaded. Put AutoModelForCausalLM.from_pretrained(...) in its place.
"""

import argparse
import importlib.util

import torch
from common.measure import DEVICE, compare, rows_of_text
from transformers import Qwen3Config, Qwen3ForCausalLM

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--hidden", type=int, default=64)
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--length", type=int, default=64)
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--rank", type=int, default=8)
parser.add_argument("--steps", type=int, default=5)
arguments = parser.parse_args()
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class Adapter(torch.nn.Module):
    """A frozen linear layer, and a product of two narrow matrices that is added to it."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = torch.nn.Linear(layer.in_features, arguments.rank, bias=False)
        self.up = torch.nn.Linear(arguments.rank, layer.out_features, bias=False)
        torch.nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.layer(x) + 2 * self.up(self.down(x))


def adapted(model):
    if importlib.util.find_spec("peft"):
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(
            r=arguments.rank, lora_alpha=2 * arguments.rank, target_modules=TARGETS, task_type="CAUSAL_LM"
        )
        return get_peft_model(model, config)
    model.requires_grad_(False)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if name in TARGETS:
                setattr(module, name, Adapter(child))
    return model


def train(meter):
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=256,
        hidden_size=arguments.hidden,
        intermediate_size=arguments.hidden * 3,
        num_hidden_layers=arguments.layers,
        num_attention_heads=max(2, arguments.hidden // 64),
        num_key_value_heads=max(1, arguments.hidden // 128),
        head_dim=32,
        max_position_embeddings=arguments.length,
    )
    model = adapted(Qwen3ForCausalLM(config)).to(DEVICE).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    rows = torch.stack([row["input_ids"] for row in rows_of_text(arguments.length)])
    for step in range(arguments.steps):
        ids = rows[torch.arange(step * arguments.batch, (step + 1) * arguments.batch) % len(rows)].to(DEVICE)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        meter.step(ids.numel(), loss)


compare(train, "tokens")
