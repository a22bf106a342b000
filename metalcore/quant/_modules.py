"""What the modules and weights of a model are: what those of transformers are for, by their names, which of them
quantize_model can pack, and why others stay as they are."""

from __future__ import annotations

import re
from collections.abc import Sequence, Set
from typing import Any

import torch

from ._mixtures import Shape

__all__ = [
    "has_plain_gates",
    "is_columns",
    "kind_of",
    "layer_of",
    "reason_to_keep",
    "role_of",
    "rows_of_module",
    "shape_of",
]

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
    """Returns the role, as in `Weight`, of a linear layer that is not the model's output."""
    parts = name.split(".")
    return _BY_NAME.get(".".join(parts[-2:])) or _BY_NAME.get(parts[-1], "")


def layer_of(name: str) -> int:
    """Returns the number of the layer that a module belongs to; 0 for others."""
    match = _LAYER.search(f".{name}.")
    return int(match[1]) if match else 0


def shape_of(model: torch.nn.Module, values: int, tied: bool) -> Shape:
    """Returns the `Shape` of a model with so many weights that make values."""
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


_READ_BY_PARENTS = (torch.nn.MultiheadAttention, torch.nn.TransformerEncoderLayer)


def kind_of(module: Any) -> str | None:
    """Returns what weights a module has: "linear", "embedding", "columns" of a linear layer, "experts" or None."""
    if hasattr(module, "packed"):
        return None
    if isinstance(module, (torch.nn.Linear, torch.nn.Embedding)):
        return "linear" if isinstance(module, torch.nn.Linear) else "embedding"
    if is_columns(module):
        return "columns"
    parameters = module._parameters
    if all(isinstance(parameters.get(name), torch.Tensor) for name in ("gate_up_proj", "down_proj")):
        return "experts" if parameters["gate_up_proj"].dim() == 3 else None  # pyright: ignore
    return None


def reason_to_keep(
    module: Any,
    role: str,
    names: Sequence[str],
    parents: Sequence[torch.nn.Module],
    skipped: Sequence[Any],
    whole: Set[str],
) -> str | None:
    """Returns why a module stays as it is, or None.

    Args:
        role: of its weight.
        names, parents: of each place where it stands.
        skipped: compiled regular expressions.
        whole: parts of names of what the model keeps in float32, and whose dtype its code may read.
    """
    if any(pattern.search(name) for pattern in skipped for name in names):
        return "it is to be skipped"
    kind, last = kind_of(module), {name.rpartition(".")[2] for name in names}
    if kind == "embedding" and role != "embedding":
        return "it is no embedding of tokens"
    if kind == "linear" and last & {"gate", "router", "shared_expert_gate", "wg"}:
        return "it chooses experts"
    if any(whole & {*name.split(".")} for name in names):
        return "the model keeps it in float32"
    if "forward" in vars(module):
        return "its forward is another function than its class's"
    if kind == "experts":
        return None if has_plain_gates(module) else "its experts have biases, another order or another activation"
    weight = module._parameters.get("weight")
    if weight is None or torch.nn.parameter.is_lazy(weight):
        return "its weight is no parameter, or has no numbers yet"
    if getattr(module, "max_norm", None) is not None:
        return "it renormalizes its rows (max_norm)"
    if not _computes_as_usual(module, kind):
        return f"its class {type(module).__name__} has a forward of its own"
    reader = next((type(parent).__name__ for parent in parents if isinstance(parent, _READ_BY_PARENTS)), None)
    return reader and f"{reader} reads its weight"


def _computes_as_usual(module, kind):
    """Returns whether the class has the forward of a linear layer or of an embedding, or a known one that does the
    same."""
    name = type(module).__name__
    if kind == "linear":
        return type(module).forward is torch.nn.Linear.forward or name == "FalconLinear"
    if kind == "embedding":
        scaled = hasattr(module, "scalar_embed_scale") and module._parameters.keys() == {"weight"}
        return type(module).forward is torch.nn.Embedding.forward or scaled
    return True


def has_plain_gates(module: Any) -> bool:
    """Returns whether a module of experts computes down(silu(gate(x)) * up(x)), without biases."""
    up, down = module.gate_up_proj, module.down_proj
    activation = getattr(module, "act_fn", None)
    silu = activation is torch.nn.functional.silu or type(activation).__name__ in ("SiLU", "SiLUActivation")
    # A class with gates of its own has limits for them. A module that is no activation is one more step.
    gate = getattr(type(module), "_apply_gate", None)
    plain = gate is None or gate.__module__ == "transformers.integrations.moe"
    return (
        silu
        and plain
        and module._modules.keys() <= {"act_fn"}
        and module._parameters.keys() == {"gate_up_proj", "down_proj"}
        and up.shape == (down.shape[0], 2 * down.shape[2], down.shape[1])
    )


def rows_of_module(module, role) -> list[tuple[str, int]]:
    """Returns (role, length of rows) of each of a module's weights."""
    kind = kind_of(module)
    if kind == "experts":
        hidden, width = module.gate_up_proj.shape[2], module.down_proj.shape[2]
        return [("gate", hidden), ("up", hidden), ("down", width)]
    return [(role, module.weight.shape[0 if kind == "columns" else 1])]
