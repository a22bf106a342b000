"""The experts of a mixture, with weights that stay packed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._core.tensors import in_int32
from ..activation import swiglu
from ._linear import quantized_linear_experts
from ._types import type_of

__all__ = ["QuantizedExperts", "clamped_swiglu"]


def clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Computes gate sigmoid(1.702 gate) (up + 1), where gate is at most 7 and up within ±7, as in gpt-oss."""
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return gate * torch.sigmoid(gate * 1.702) * (up + 1)


class QuantizedExperts(torch.nn.Module):
    """The experts of a transformer's layer: down(activation(gate(x), up(x))), or down(activation(up(x))) without gates,
    with packed weights that are not trained. It takes the place of transformers' modules of experts (Qwen3MoeExperts,
    GptOssExperts, NemotronHExperts …).

    Args:
        num_experts: how many there are.
        hidden_size, intermediate_size: lengths of x's rows, and of those between.
        types: GGML's types of the weights of gate, up and down, or one for all. Two are those of up and down, and the
            experts have no gates then.
        bias: whether there are biases, parameters (experts, rows).
        activation: of gate and up, or of up alone, (tokens, experts of a token, intermediate_size).
        device: of the weights.
        dtype: of the biases.

    Raises:
        ValueError: a type is unknown, or its blocks do not divide rows.

    Example:
        >>> experts = metalcore.nn.QuantizedExperts(3, 32, 64, "Q8_0", device="mps")
        >>> chosen, weights = torch.tensor([[0, 2], [1, 2]], device="mps"), torch.full((2, 2), 0.5, device="mps")
        >>> experts(torch.randn(2, 32, device="mps"), chosen, weights).shape
        torch.Size([2, 32])
    """

    gate: Tensor
    up: Tensor
    down: Tensor
    parts: tuple[str, ...] = ("gate", "up", "down")

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        types: Any,
        bias: bool = False,
        activation: Callable[..., Tensor] = swiglu,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        several = isinstance(types, Sequence) and not isinstance(types, str) and len(types) in (2, 3)
        self.types = tuple(type_of(one) for one in (types if several else [types] * 3))
        self.num_experts, self.hidden_size, self.intermediate_size = num_experts, hidden_size, intermediate_size
        self.activation = activation
        self.parts = self.parts[-len(self.types) :]
        for part, type in zip(self.parts, self.types):
            rows, length = (hidden_size, intermediate_size) if part == "down" else (intermediate_size, hidden_size)
            if length % type.block:
                raise ValueError(f"{type.name}'s blocks of {type.block} do not divide rows of {length}")
            shape = (num_experts, rows, length // type.block * type.nbytes)
            self.register_buffer(part, torch.zeros(shape, dtype=torch.uint8, device=device))
            parameter = torch.nn.Parameter(torch.zeros(num_experts, rows, device=device, dtype=dtype)) if bias else None
            self.register_parameter(f"{part}_bias", parameter)

    def get_extra_state(self) -> Tensor:
        return torch.tensor([type.number for type in self.types])

    def set_extra_state(self, state: Tensor) -> None:
        types_in_state = tuple(type_of(int(number)) for number in state)
        if types_in_state != self.types:
            names = [", ".join(type.name for type in types) for types in (types_in_state, self.types)]
            raise ValueError(f"the weights are packed as {names[0]}, and the module is for {names[1]}")

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Returns the sum over each token's experts, times their weights.

        Args:
            hidden_states: (tokens, hidden_size).
            top_k_index, top_k_weights: (tokens, experts of a token), experts and what they are multiplied by.

        Returns:
            (tokens, hidden_size), of hidden_states' dtype.
        """
        experts = in_int32(top_k_index) if isinstance(top_k_index, Tensor) else top_k_index  # once for all products
        *widening, narrowing = self.parts
        width = self.activation(*(self._part(part, hidden_states, experts) for part in widening))
        down = self._part(narrowing, width, experts)
        return (down * top_k_weights[..., None]).sum(1).to(hidden_states.dtype)

    def _part(self, part, x, experts):
        type = self.types[self.parts.index(part)]
        result = quantized_linear_experts(x, getattr(self, part), experts, type)
        bias = getattr(self, f"{part}_bias")
        return result if bias is None else result + bias[experts]

    def extra_repr(self) -> str:
        names = ", ".join(dict.fromkeys(type.name for type in self.types))
        return f"{self.num_experts}, {self.hidden_size}, {self.intermediate_size}, types={names}"
