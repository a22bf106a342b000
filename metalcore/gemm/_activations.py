"""The activations that products and convolutions compute in the same kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from ..activation import gelu, relu, silu

__all__ = ["ACTIVATIONS", "reference_activation"]

# By the argument that names one: its name in operators, and the function.
ACTIVATIONS = {
    None: ("none", lambda x: x),
    "relu": ("relu", relu),
    "gelu": ("gelu", gelu),
    "gelu_tanh": ("gelu_tanh", lambda x: gelu(x, approximate="tanh")),
    "silu": ("silu", silu),
}


def reference_activation(name: str, x: Tensor) -> Tensor:
    """Returns the same of PyTorch's functions, by the name in operators."""
    functional = torch.nn.functional
    return {
        "none": lambda: x,
        "relu": lambda: functional.relu(x),
        "gelu": lambda: functional.gelu(x),
        "gelu_tanh": lambda: functional.gelu(x, approximate="tanh"),
        "silu": lambda: functional.silu(x),
    }[name]()
