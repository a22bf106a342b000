"""Modules whose weights stay packed."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..quant import quantize, quantized_embedding, quantized_linear, type_of
from ..quant._linear import add_bias

if TYPE_CHECKING:
    from ._joined import Joined

__all__ = ["QuantizedEmbedding", "QuantizedLinear"]


@dataclasses.dataclass(frozen=True)
class PackedWeight:
    """What code of models asks a weight that is packed: no tensor, and no numbers.

    Attributes:
        dtype: of the numbers that were packed, and not of the bytes.
        device: where the bytes are.
        shape: of the numbers, (rows, weights of a row).
    """

    dtype: torch.dtype
    device: torch.device
    shape: torch.Size
    _is_hf_initialized = True  # transformers draws no random numbers for it while it loads packed weights

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"a packed weight has a dtype, a device and a shape, and no {name}; metalcore.dequantize(module.packed, "
            "module.type) gives its numbers"
        )


class _Packed(torch.nn.Module):
    """Rows of packed weights: the buffer `packed`, uint8. The state_dict also has GGML's number of the type, as a
    tensor, so that safetensors can hold all of it, and other packed weights are not taken for these."""

    packed: Tensor
    dtype: torch.dtype
    type: Any  # pyright: ignore[reportIncompatibleMethodOverride, reportIncompatibleVariableOverride]

    def __init__(self, rows: int, length: int, type: Any, device: torch.device | str | None, dtype: torch.dtype | None):
        super().__init__()
        self.type = type_of(type)
        self.dtype = dtype or torch.get_default_dtype()
        if length % self.type.block:
            raise ValueError(f"{self.type.name}'s blocks of {self.type.block} do not divide rows of {length}")
        shape = (rows, length // self.type.block * self.type.nbytes)
        self.register_buffer("packed", torch.zeros(shape, dtype=torch.uint8, device=device))

    @property
    def weight(self) -> PackedWeight:
        """What is known of the weight. Models read its dtype and its device."""
        rows, nbytes = self.packed.shape
        shape = torch.Size((rows, nbytes // self.type.nbytes * self.type.block))
        return PackedWeight(self.dtype, self.packed.device, shape)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        # model.half() and model.to(dtype) convert weights that are numbers, and no tensor here has their dtype.
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device=self.packed.device)).dtype
        return super()._apply(fn, recurse)

    def get_extra_state(self) -> Tensor:
        return torch.tensor(self.type.number)

    def set_extra_state(self, state: Tensor) -> None:
        found = type_of(int(state))
        if found != self.type:
            raise ValueError(f"the weights are packed as {found.name}, and the module is for {self.type.name}")


class QuantizedLinear(_Packed):
    """As torch.nn.Linear, with a weight that is packed in one of GGML's types and is not trained.

    Args:
        in_features, out_features: lengths of x's and of the result's rows. The type's blocks divide in_features.
        type: GGML's type, by name ("Q4_K") or number.
        bias: whether there is one, a parameter.
        device, dtype: of the bias, and of the weight, where models ask for its dtype: the result has x's.

    Raises:
        ValueError: the type is unknown, or its blocks do not divide in_features.
    """

    joined: Joined | None = None  # layers that are given the same tensor, while a model generates

    def __init__(
        self,
        in_features: int,
        out_features: int,
        type: Any,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(out_features, in_features, type, device, dtype)
        self.in_features, self.out_features = in_features, out_features
        self.bias = torch.nn.Parameter(torch.zeros(out_features, device=device, dtype=dtype)) if bias else None

    @classmethod
    def from_linear(cls, linear: torch.nn.Linear, type: Any) -> QuantizedLinear:
        """Packs the weight of a torch.nn.Linear, and shares its bias."""
        out_features, in_features = linear.weight.shape
        weight = linear.weight
        made = cls(in_features, out_features, type, bias=False, device=weight.device, dtype=weight.dtype)
        made.packed = quantize(weight, type)
        made.bias = linear.bias
        return made

    @property
    def qweight(self) -> Tensor:
        """The packed weight by the name that peft looks for."""
        return self.packed

    def forward(self, x: Tensor) -> Tensor:
        product = None if self.joined is None else self.joined.product(self, x)
        if product is None:
            return quantized_linear(x, self.packed, self.type, self.bias)
        return product if self.bias is None else add_bias(product, self.bias)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, type={self.type.name}, "
            f"bias={self.bias is not None}"
        )


class TiedLinear(QuantizedLinear):
    """A linear layer whose packed weight is an embedding's, wherever that moves. It has no weight in the state_dict."""

    def __init__(self, embedding: QuantizedEmbedding, bias: torch.nn.Parameter | None = None):
        torch.nn.Module.__init__(self)
        self.type = embedding.type
        self.in_features, self.out_features = embedding.embedding_dim, embedding.num_embeddings
        self.bias = bias
        self._embedding = (embedding,)  # not a child of this module

    @property
    def packed(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._embedding[0].packed

    @property
    def dtype(self) -> torch.dtype:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._embedding[0].dtype

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        return torch.nn.Module._apply(self, fn, recurse)  # the embedding converts its own dtype


class QuantizedEmbedding(_Packed):
    """As torch.nn.Embedding, with a weight that is packed in one of GGML's types and is not trained.

    Args:
        num_embeddings, embedding_dim: the number of rows and their length, which the type's blocks divide.
        type: GGML's type, by name or number.
        device: of the weight.
        dtype: of the result, by default PyTorch's default dtype. Conversions of the module, as half(), change it.
        scale: what the rows are multiplied by, rounded to dtype, as Gemma's embeddings are.

    Raises:
        ValueError: the type is unknown, or its blocks do not divide embedding_dim.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        type: Any,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        scale: float = 1.0,
    ):
        super().__init__(num_embeddings, embedding_dim, type, device, dtype)
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.scale = torch.tensor(scale, dtype=self.dtype, device="cpu").item()

    @classmethod
    def from_embedding(cls, embedding: torch.nn.Embedding, type: Any) -> QuantizedEmbedding:
        """Packs the weight of a torch.nn.Embedding, or of transformers' of Gemma, which scale the rows. Results have
        that weight's dtype."""
        (rows, length), dtype = embedding.weight.shape, embedding.weight.dtype
        scale = float(getattr(embedding, "scalar_embed_scale", 1.0))
        weight = embedding.weight
        made = cls(rows, length, type, device=weight.device, dtype=dtype, scale=scale)
        made.packed = quantize(weight, type)
        return made

    def _apply(self, fn: Any, recurse: bool = True) -> QuantizedEmbedding:
        super()._apply(fn, recurse)
        self.scale = torch.tensor(self.scale, dtype=self.dtype, device="cpu").item()
        return self

    def forward(self, indices: Tensor) -> Tensor:
        rows = quantized_embedding(indices, self.packed, self.type, self.dtype)
        return rows if self.scale == 1 else rows * self.scale

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, type={self.type.name}" + (
            f", scale={self.scale}" if self.scale != 1 else ""
        )
