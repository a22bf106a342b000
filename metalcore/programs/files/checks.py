"""Checks of arguments that PyTorch's operators take as they are, and read memory by them. Without the checks a file
could make them read what is not its own, or end the process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

__all__ = ["CHECKS"]


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> None:
    if not v.numel():
        raise ValueError("v has no elements")
    # For other dimensions PyTorch calls operators that check their arguments.
    if dim in (0, v.dim() - 1) and (g.numel() != v.shape[dim] or g.dtype != v.dtype):
        raise ValueError(f"g has {g.numel()} elements of {g.dtype}, not {v.shape[dim]} of {v.dtype}")


def _recurrent(gates: int, states: int) -> Callable[..., None]:
    """Returns the check of layers with so many gates and states. LSTMs have two states, and may project the first
    one."""

    def check(
        input: Tensor,
        hx: Tensor | Sequence[Tensor],
        params: Sequence[Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> None:
        given = [hx] if isinstance(hx, Tensor) else hx
        if [t.dim() for t in (input, *given)] != [3] * (1 + states) or num_layers < 1 or not given[-1].shape[2]:
            raise ValueError(f"it takes {1 + states} tensors of three dimensions, and at least one layer and one unit")
        result, units = given[0].shape[2], given[-1].shape[2]
        batch, length = input.shape[0 if batch_first else 1], input.shape[2]
        directions, projected = 2 if bidirectional else 1, result != units
        for state, width in zip(given, (result, units)):
            _require("hx", state, [num_layers * directions, batch, width], input)
        each = directions * (2 + 2 * has_biases + projected)
        if len(params) != num_layers * each:
            raise ValueError(f"{num_layers} layers have {num_layers * each} params, not {len(params)}")
        for layer in range(num_layers):
            weights = [[gates * units, result * directions if layer else length], [gates * units, result]]
            shapes = [*weights, *[[gates * units]] * 2 * has_biases, *[[result, units]] * projected] * directions
            for i, shape in enumerate(shapes, layer * each):
                _require(f"params[{i}]", params[i], shape, input)

    return check


def _require(name, tensor, shape, like):
    if list(tensor.shape) != shape or tensor.dtype != like.dtype:
        raise ValueError(f"{name} is {tensor.dtype} of shape {list(tensor.shape)}, not {like.dtype} of {shape}")


# By the operator's name. Each takes the operator's arguments, which are of its schema's types.
CHECKS: dict[str, Callable[..., Any]] = {
    "aten::_weight_norm": _weight_norm,
    "aten::lstm.input": _recurrent(gates=4, states=2),
    "aten::gru.input": _recurrent(gates=3, states=1),
    "aten::rnn_tanh.input": _recurrent(gates=1, states=1),
    "aten::rnn_relu.input": _recurrent(gates=1, states=1),
}
