"""A linear layer whose weight has 4 bits in blocks, with bitsandbytes' state_dict."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ._affine_layers import PackedBuffers
from ._blockwise import BLOCK_SIZES, SCALE_BLOCK, TABLES
from ._four_bits import FourBits, as_bytes, dequantize_4bit, linear_4bit, quantize_4bit

__all__ = ["Linear4bit"]

_DESCRIPTION = "weight.quant_state.bitsandbytes__"  # and the type: what of a FourBits is no tensor, as JSON in bytes
# Names of a FourBits' tensors in bitsandbytes' state_dict: without, and with, scales in 8 bits.
_PLAIN = {"absmax": "weight.absmax"}
_NESTED = {"scales": "weight.absmax", "absmax": "weight.nested_absmax", "scales_code": "weight.nested_quant_map"}


class Linear4bit(PackedBuffers, torch.nn.Linear):  # pyright: ignore[reportIncompatibleVariableOverride]
    """As torch.nn.Linear, with a weight of 4 bits in blocks (NF4, FP4), which is not trained. Its state_dict is that of
    bitsandbytes.nn.Linear4bit, and each loads the other's. bitsandbytes does not have to be installed.

    Args:
        packed: as `metalcore.quantize_4bit` returns it, of two dimensions. It becomes a buffer.
        state: the `metalcore.quant.FourBits` beside it, whose tensors become buffers.
        bias: a parameter, or None.

    Raises:
        ValueError: packed and state do not go together.

    Example:
        >>> layer = metalcore.nn.Linear4bit.from_linear(torch.nn.Linear(64, 4, bias=False).to("mps"))
        >>> sorted(layer.state_dict())
        ['weight', 'weight.absmax', 'weight.quant_map', 'weight.quant_state.bitsandbytes__nf4']
    """

    bias: torch.nn.Parameter | None  # pyright: ignore[reportIncompatibleVariableOverride]
    absmax: Tensor
    scales: Tensor | None  # pyright: ignore[reportIncompatibleVariableOverride]
    scales_code: Tensor | None
    offset: Tensor | None
    _exact = ("absmax", "scales_code", "offset")

    def __init__(self, packed: Tensor, state: FourBits, bias: torch.nn.Parameter | None = None):
        torch.nn.Module.__init__(self)
        self._hold(packed, state)
        self.bias = bias

    def _hold(self, packed: Tensor, state: FourBits) -> None:
        _require(packed, state)
        self.out_features, self.in_features = state.shape
        self.dtype, self.block_size, self.quant_type = state.dtype, state.block_size, state.type
        self.register_buffer("packed", packed, persistent=False)
        for name in ("absmax", "scales", "scales_code", "offset"):
            self.register_buffer(name, getattr(state, name), persistent=False)

    @classmethod
    def from_linear(
        cls, linear: torch.nn.Linear, type: str = "nf4", block_size: int = 64, compress: bool = False
    ) -> Linear4bit:
        """Returns a layer with a linear layer's weight in 4 bits, and with its bias.

        Args:
            linear: the layer.
            type, block_size, compress: as `metalcore.quantize_4bit` has them.

        Raises:
            ValueError: type or block_size is another.
        """
        return cls(*quantize_4bit(linear.weight.detach(), type, block_size, compress), linear.bias)

    @classmethod
    def from_state_dict(cls, state_dict: Mapping[str, Tensor], prefix: str = "") -> Linear4bit:
        """Returns the layer that bitsandbytes.nn.Linear4bit has saved, on its tensors' device.

        Args:
            state_dict: what has the layer's entries, as a checkpoint's file.
            prefix: what their names begin with, as "model.layers.0.mlp.up_proj.".

        Raises:
            ValueError: an entry is missing, or they do not go together. The message names it.
        """
        packed, state, _ = _read(state_dict, prefix)
        bias = state_dict.get(f"{prefix}bias")
        return cls(packed, state, None if bias is None else torch.nn.Parameter(bias))

    @property
    def state(self) -> FourBits:
        """What functions take beside the packed weight."""
        shape = (self.out_features, self.in_features)
        return FourBits(
            self.absmax, shape, self.dtype, self.block_size, self.quant_type, self.scales, self.scales_code, self.offset
        )

    @property
    def weight(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The weight as numbers, a new tensor each time."""
        return dequantize_4bit(self.packed, self.state)

    def forward(self, input: Tensor) -> Tensor:
        return linear_4bit(input, self.packed, self.state, self.bias)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, type={self.quant_type}, "
            f"block_size={self.block_size}, bias={self.bias is not None}"
        )

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        of = {"quant_type": self.quant_type, "blocksize": self.block_size}
        of |= {"dtype": str(self.dtype).removeprefix("torch."), "shape": [self.out_features, self.in_features]}
        if self.offset is not None:
            of |= {"nested_blocksize": SCALE_BLOCK, "nested_dtype": "float32", "nested_offset": self.offset.item()}
        destination[f"{prefix}weight"] = self.packed
        for name, key in (_PLAIN if self.offset is None else _NESTED).items():
            destination[prefix + key] = getattr(self, name)
        table = torch.tensor(TABLES[self.quant_type], dtype=torch.float32, device=self.packed.device)
        destination[f"{prefix}weight.quant_map"] = table
        described = torch.tensor(list(json.dumps(of).encode()), dtype=torch.uint8)
        destination[f"{prefix}{_DESCRIPTION}{self.quant_type}"] = described

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
        try:
            packed, state, names = _read(state_dict, prefix)
        except KeyError as error:
            missing_keys.append(error.args[0])
            return
        except ValueError as error:
            error_msgs.append(str(error))
            return
        if tuple(state.shape) != (self.out_features, self.in_features):
            error_msgs.append(
                f"{prefix}weight has shape {list(state.shape)}, and the layer's is {list(self.weight.shape)}"
            )
            return
        device = self.packed.device
        self._hold(packed, state)
        self.to(device)
        rest = {key: value for key, value in state_dict.items() if key not in names}
        super()._load_from_state_dict(rest, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)


class _MissingError(KeyError, ValueError):
    def __str__(self):
        return f"Linear4bit: the state_dict has no {self.args[0]}"


def _read(state_dict: Mapping[str, Tensor], prefix: str) -> tuple[Tensor, FourBits, set[str]]:
    """Returns the packed weight, its state, and the names of the entries that these came from."""
    names = {f"{prefix}weight", f"{prefix}weight.quant_map"}

    def entry(name):
        names.add(prefix + name)
        if prefix + name not in state_dict:
            raise _MissingError(prefix + name)
        return state_dict[prefix + name]

    kinds = [kind for kind in TABLES if f"{prefix}{_DESCRIPTION}{kind}" in state_dict]
    described = entry(_DESCRIPTION + (kinds[0] if kinds else "nf4"))
    try:
        of = json.loads(bytes(described.tolist()))
        shape, dtype, block_size = [*of["shape"]], getattr(torch, of["dtype"]), of["blocksize"]
        offset = of.get("nested_offset")
        nested = offset is not None
        if nested and of["nested_blocksize"] != SCALE_BLOCK:
            raise ValueError(f"nested_blocksize must be {SCALE_BLOCK}, not {of['nested_blocksize']}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"Linear4bit: {prefix}{_DESCRIPTION}{kinds[0]} cannot be read: {error}") from error
    packed = entry("weight")
    tensors = {name: entry(key) for name, key in (_NESTED if nested else _PLAIN).items()}
    if nested:
        tensors["offset"] = torch.tensor(float(offset), device=packed.device)
    state = FourBits(**tensors, shape=shape, dtype=dtype, block_size=block_size, type=kinds[0])
    try:
        _require(packed, state)
    except ValueError as error:
        raise ValueError(f"{error} ({prefix}weight)") from None
    return packed, state, names


def _require(packed: Tensor, state: FourBits) -> None:
    """Raises a ValueError where the tensors' sizes are not those of the shape."""
    if state.type not in TABLES or state.block_size not in BLOCK_SIZES:
        raise ValueError(f"Linear4bit: there are no blocks of {state.block_size} numbers of type {state.type!r}")
    if len(state.shape) != 2 or not all(isinstance(size, int) and size >= 0 for size in state.shape):
        raise ValueError(f"Linear4bit: a weight must have 2 dimensions, not shape {list(state.shape)}")
    count = math.prod(state.shape)
    blocks = -(count // -state.block_size)
    sizes = {"packed": (as_bytes(packed), (count + 1) // 2)}
    if state.scales is None:
        sizes["absmax"] = state.absmax, blocks
    else:
        sizes |= {"scales": (state.scales, blocks), "absmax": (state.absmax, -(blocks // -SCALE_BLOCK))}
    for name, (tensor, size) in sizes.items():
        if tensor.numel() != size:
            raise ValueError(f"Linear4bit: {name} must have {size} elements, not {tensor.numel()}")
