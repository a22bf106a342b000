"""A linear layer whose weight has 8 bits, with bitsandbytes' state_dict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ._affine_layers import PackedBuffers
from ._int8 import int8_linear, numbers_of_int8, rows_in_int8

__all__ = ["Linear8bitLt", "require_rows"]


class Linear8bitLt(PackedBuffers, torch.nn.Linear):  # pyright: ignore[reportIncompatibleVariableOverride]
    """As torch.nn.Linear, with a weight of int8 and a scale for each of its rows, which is not trained. Rows of x are
    rounded to 8 bits for the product, as LLM.int8 has it. Its state_dict is that of bitsandbytes.nn.Linear8bitLt with
    has_fp16_weights=False, and each loads the other's. bitsandbytes does not have to be installed.

    Args:
        packed: int8, (out_features, in_features). It becomes a buffer.
        scales: float32, (out_features,): what 127 stands for. They become a buffer.
        bias: a parameter, or None.
        threshold: columns of x with a number of at least this are multiplied as numbers; 0 is none. bitsandbytes'
            configuration for transformers has 6.0.
        dtype: of `weight`. The result has x's.

    Raises:
        ValueError: packed and scales do not go together.

    Example:
        >>> layer = metalcore.nn.Linear8bitLt.from_linear(torch.nn.Linear(64, 4, bias=False).to("mps"))
        >>> sorted(layer.state_dict())
        ['SCB', 'weight', 'weight_format']
    """

    bias: torch.nn.Parameter | None  # pyright: ignore[reportIncompatibleVariableOverride]
    _exact = ("scales",)

    def __init__(
        self,
        packed: Tensor,
        scales: Tensor,
        bias: torch.nn.Parameter | None = None,
        threshold: float = 0.0,
        dtype: torch.dtype = torch.float16,
    ):
        torch.nn.Module.__init__(self)
        self._hold(packed, scales)
        self.bias, self.threshold, self.dtype = bias, threshold, dtype

    def _hold(self, packed: Tensor, scales: Tensor) -> None:
        if packed.dtype != torch.int8 or packed.dim() != 2:
            raise ValueError(
                f"Linear8bitLt: the weight must be int8 with 2 dimensions, not {packed.dtype} {list(packed.shape)}"
            )
        if scales.dtype != torch.float32 or scales.numel() != len(packed):
            raise ValueError(
                f"Linear8bitLt: SCB must be float32 with {len(packed)} elements, not {scales.dtype} "
                f"{list(scales.shape)}"
            )
        self.out_features, self.in_features = packed.shape
        self.register_buffer("packed", packed, persistent=False)
        self.register_buffer("scales", scales.view(-1), persistent=False)

    @classmethod
    def from_linear(cls, linear: torch.nn.Linear, threshold: float = 0.0) -> Linear8bitLt:
        """Returns a layer with a linear layer's weight in 8 bits, and with its bias.

        Args:
            linear: the layer.
            threshold: as the class has it.
        """
        packed, scales, _ = rows_in_int8(linear.weight.detach().to(torch.float16))
        return cls(packed, scales, linear.bias, threshold, linear.weight.dtype)

    @classmethod
    def from_state_dict(
        cls, state_dict: Mapping[str, Tensor], prefix: str = "", threshold: float = 0.0
    ) -> Linear8bitLt:
        """Returns the layer that bitsandbytes.nn.Linear8bitLt has saved, on its tensors' device.

        Args:
            state_dict: what has the layer's entries, as a checkpoint's file.
            prefix: what their names begin with, as "model.layers.0.mlp.up_proj.".
            threshold: as the class has it. bitsandbytes does not save it.

        Raises:
            ValueError: an entry is missing, or they do not go together. The message names it.
        """
        for name in ("weight", "SCB"):
            if prefix + name not in state_dict:
                raise ValueError(f"Linear8bitLt: the state_dict has no {prefix}{name}")
        require_rows(state_dict, prefix)
        bias = state_dict.get(f"{prefix}bias")
        of_bias = None if bias is None else torch.nn.Parameter(bias)
        return cls(state_dict[f"{prefix}weight"], state_dict[f"{prefix}SCB"], of_bias, threshold)

    @property
    def weight(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The weight as numbers, a new tensor each time."""
        return numbers_of_int8(self.packed, self.scales).to(self.dtype)

    def forward(self, input: Tensor) -> Tensor:
        return int8_linear(input, self.packed, self.scales, self.bias, self.threshold)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, threshold={self.threshold}, "
            f"bias={self.bias is not None}"
        )

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = self.packed
        destination[f"{prefix}SCB"] = self.scales
        destination[f"{prefix}weight_format"] = torch.tensor(0, dtype=torch.uint8)  # rows

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        names = [prefix + name for name in ("weight", "SCB")]
        missing = [name for name in names if name not in state_dict]
        missing_keys += missing
        if missing:
            return
        packed, scales = (state_dict[name] for name in names)
        try:
            require_rows(state_dict, prefix)
            if tuple(packed.shape) != (self.out_features, self.in_features):
                raise ValueError(
                    f"{prefix}weight has shape {list(packed.shape)}, and the layer's is {list(self.packed.shape)}"
                )
            device = self.packed.device
            self._hold(packed.to(device), scales.to(device))
        except ValueError as error:
            error_msgs.append(str(error))
            return
        own = {*names, f"{prefix}weight_format"}
        rest = {key: value for key, value in state_dict.items() if key not in own}
        super()._load_from_state_dict(rest, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)


def require_rows(state_dict: Mapping[str, Tensor], prefix: str = "") -> None:
    """Raises a ValueError where a state_dict has a weight whose numbers are in another order than rows."""
    format = state_dict.get(f"{prefix}weight_format")
    if format is not None and int(format) != 0:
        raise ValueError(f"Linear8bitLt: {prefix}weight_format must be 0, for rows, and is {int(format)}")
