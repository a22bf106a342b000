"""What the weights of transformers' models are for, by their modules' names."""

from __future__ import annotations

import re
from typing import Any

import torch

from ._mixtures import Shape

__all__ = ["is_columns", "layer_of", "role_of", "shape_of"]

_ROLES = {
    "q": "q_proj wq q_b_proj query",
    "k": "k_proj wk key",
    "v": "v_proj wv value qkv_proj query_key_value c_attn Wqkv kv_b_proj",
    "attention": "o_proj wo attn.c_proj self_attn.out_proj attn.out_proj attention.out_proj self_attn.dense "
    "attention.dense self_attention.dense",
    "gate": "gate_proj w1",
    "up": "up_proj gate_up_proj w3 fc1 fc_in c_fc dense_h_to_4h",
    "down": "down_proj w2 fc2 fc_out mlp.c_proj dense_4h_to_h",
}
_BY_NAME = {name: role for role, names in _ROLES.items() for name in names.split()}
_LAYER = re.compile(r"\.(?:layers|h|blocks|block)\.(\d+)\.")


def is_columns(module: Any) -> bool:
    """Returns whether it is transformers' Conv1D, a linear layer whose weight is transposed."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def role_of(name: str) -> str:
    """As in `Weight`, for a linear layer that is not the model's output."""
    parts = name.split(".")
    return _BY_NAME.get(".".join(parts[-2:])) or _BY_NAME.get(parts[-1], "")


def layer_of(name: str) -> int:
    """Returns the number of the layer that a module belongs to; 0 for others."""
    match = _LAYER.search(f".{name}.")
    return int(match[1]) if match else 0


def shape_of(model: torch.nn.Module, values: int, tied: bool) -> Shape:
    """Of a model with so many weights that make values."""
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    layers = getattr(config, "num_hidden_layers", None)
    if layers is None:
        layers = 1 + max((layer_of(name) for name, _ in model.named_modules()), default=0)
    heads = getattr(config, "num_attention_heads", None) or 1
    shared = getattr(config, "num_key_value_heads", None) or heads
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    experts = next((count for name in names if (count := getattr(config, name, None))), 0)
    return Shape(layers, heads // shared, experts, values, tied, getattr(config, "model_type", "") == "falcon")
