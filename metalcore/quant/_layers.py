"""Modules whose weights stay packed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ._linear import add_bias, quantized_linear
from ._pack import quantize
from ._packed_weight import PackedWeight, PackingError
from ._rows import dequantize, quantized_embedding
from ._types import type_of

if TYPE_CHECKING:
    from ._joined import Joined

__all__ = ["QuantizedEmbedding", "QuantizedLinear"]


class PackedModule(torch.nn.Module):
    """Rows of packed weights: the buffer `packed`, uint8. The state_dict also has GGML's number of the type, as a
    tensor, so that safetensors can hold all of it, and other packed weights are not taken for these.

    Attributes:
        packing_error: of the last numbers that were written to `weight`, a `PackingError`, or None.
    """

    packed: Tensor
    packing_error: PackingError | None = None
    dtype: torch.dtype
    type: Any  # pyright: ignore[reportIncompatibleMethodOverride, reportIncompatibleVariableOverride]

    def __init__(self, rows: int, length: int, type: Any, device: torch.device | str | None, dtype: torch.dtype | None):
        torch.nn.Module.__init__(self)
        self.type = type_of(type)
        self.dtype = dtype or torch.get_default_dtype()
        if length % self.type.block:
            raise ValueError(f"{self.type.name}'s blocks of {self.type.block} do not divide rows of {length}")
        shape = (rows, length // self.type.block * self.type.nbytes)
        self.register_buffer("packed", torch.zeros(shape, dtype=torch.uint8, device=device))

    @property
    def weight(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The weight as numbers, which are unpacked where they are read: a `PackedWeight`."""
        if torch.compiler.is_compiling():
            return dequantize(self.packed, self.type, dtype=self.dtype)
        return PackedWeight(self)

    @property
    def holder(self) -> PackedModule:
        """The module that has the bytes."""
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":
            if isinstance(value, PackedWeight) and value.layer is self:
                return
            raise AttributeError(
                f"the weight of {type(self).__name__} is packed: weight.data = numbers packs others, and to_linear() "
                "or to_embedding() makes a layer with a weight that is a parameter"
            )
        super().__setattr__(name, value)

    def reset_parameters(self) -> None:
        raise RuntimeError(f"the weight of {type(self).__name__} is packed, and has no initial numbers")

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        # model.half() and model.to(dtype) convert weights that are numbers, and no tensor here has their dtype.
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device=self.packed.device)).dtype
        return super()._apply(fn, recurse)

    def get_extra_state(self) -> Tensor:
        return torch.tensor(self.type.number)

    def set_extra_state(self, state: Tensor) -> None:
        type_in_state = type_of(int(state))
        if type_in_state != self.type:
            raise ValueError(f"the weights are packed as {type_in_state.name}, and the module is for {self.type.name}")


class QuantizedLinear(PackedModule, torch.nn.Linear):  # pyright: ignore[reportIncompatibleVariableOverride]
    """As torch.nn.Linear, with a weight that is packed in one of GGML's types and is not trained. It is a
    torch.nn.Linear for code that looks for such layers, and its `weight` is a tensor that is unpacked when it is read.

    Args:
        in_features, out_features: lengths of x's and of the result's rows. The type's blocks divide in_features.
        type: GGML's type, by name ("Q4_K") or number.
        bias: whether there is one, a parameter.
        device, dtype: of the bias, and of the weight, where models ask for its dtype: the result has x's.

    Raises:
        ValueError: the type is unknown, or its blocks do not divide in_features.

    Example:
        >>> layer = metalcore.nn.QuantizedLinear.from_linear(torch.nn.Linear(32, 4, device="mps"), "Q8_0")
        >>> layer(torch.randn(2, 32, device="mps")).shape
        torch.Size([2, 4])
    """

    bias: torch.nn.Parameter | None  # pyright: ignore[reportIncompatibleVariableOverride]
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
        layer = cls(in_features, out_features, type, bias=False, device=weight.device, dtype=weight.dtype)
        layer.packed = quantize(weight, type)
        layer.bias = linear.bias
        return layer

    def to_linear(self) -> torch.nn.Linear:
        """Returns a torch.nn.Linear with the numbers as its weight, a parameter, and this layer's bias."""
        linear = torch.nn.Linear(self.in_features, self.out_features, False, "meta", self.dtype)
        linear.weight = torch.nn.Parameter(dequantize(self.packed, self.type, dtype=self.dtype))
        linear.bias = self.bias  # pyright: ignore[reportAttributeAccessIssue]
        return linear.train(self.training)

    def forward(self, input: Tensor) -> Tensor:
        product = None if self.joined is None else self.joined.product(self, input)
        if product is None:
            return quantized_linear(input, self.packed, self.type, self.bias)
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
    def holder(self) -> PackedModule:
        return self._embedding[0]

    @property
    def packed(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._embedding[0].packed

    @packed.setter
    def packed(self, value: Tensor) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        raise RuntimeError(
            "the weight of this layer is the embedding's, which a change would change too: put the layer's to_linear() "
            "in its place, or merge its adapter into a dense layer (packed_layers(config, merged='dense'))"
        )

    @property
    def dtype(self) -> torch.dtype:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._embedding[0].dtype

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        return torch.nn.Module._apply(self, fn, recurse)  # the embedding converts its own dtype


class QuantizedEmbedding(PackedModule, torch.nn.Embedding):  # pyright: ignore[reportIncompatibleVariableOverride]
    """As torch.nn.Embedding, with a weight that is packed in one of GGML's types and is not trained. It is a
    torch.nn.Embedding for code that looks for one.

    Args:
        num_embeddings, embedding_dim: the number of rows and their length, which the type's blocks divide.
        type: GGML's type, by name or number.
        device: of the weight.
        dtype: of the result, by default PyTorch's default dtype. Conversions of the module, as half(), change it.
        scale: what the rows are multiplied by, rounded to dtype, as Gemma's embeddings are.

    Raises:
        ValueError: the type is unknown, or its blocks do not divide embedding_dim.

    Example:
        >>> table = metalcore.nn.QuantizedEmbedding.from_embedding(torch.nn.Embedding(4, 32, device="mps"), "Q8_0")
        >>> table(torch.tensor([3, 1], device="mps")).shape
        torch.Size([2, 32])
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
        self.padding_idx, self.max_norm, self.norm_type = None, None, 2.0  # as torch.nn.Embedding has them
        self.scale_grad_by_freq, self.sparse = False, False

    @classmethod
    def from_embedding(cls, embedding: torch.nn.Embedding, type: Any) -> QuantizedEmbedding:
        """Packs the weight of a torch.nn.Embedding, or of transformers' of Gemma, which scale the rows. Results have
        that weight's dtype."""
        (rows, length), dtype = embedding.weight.shape, embedding.weight.dtype
        scale = float(getattr(embedding, "scalar_embed_scale", 1.0))
        weight = embedding.weight
        layer = cls(rows, length, type, device=weight.device, dtype=dtype, scale=scale)
        layer.packed = quantize(weight, type)
        return layer

    def to_embedding(self) -> torch.nn.Embedding:
        """Returns a torch.nn.Embedding with the numbers as its weight, a parameter."""
        embedding = torch.nn.Embedding(self.num_embeddings, self.embedding_dim, device="meta", dtype=self.dtype)
        if self.scale != 1:
            embedding = ScaledEmbedding(self.num_embeddings, self.embedding_dim, device="meta", dtype=self.dtype)
            embedding.scalar_embed_scale = self.scale
        embedding.weight = torch.nn.Parameter(dequantize(self.packed, self.type, dtype=self.dtype))
        return embedding.train(self.training)

    def _apply(self, fn: Any, recurse: bool = True) -> QuantizedEmbedding:
        super()._apply(fn, recurse)
        self.scale = torch.tensor(self.scale, dtype=self.dtype, device="cpu").item()
        return self

    def forward(self, input: Tensor) -> Tensor:
        rows = quantized_embedding(input, self.packed, self.type, self.dtype)
        return rows if self.scale == 1 else rows * self.scale

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, type={self.type.name}" + (
            f", scale={self.scale}" if self.scale != 1 else ""
        )


class ScaledEmbedding(torch.nn.Embedding):
    """An embedding whose rows are multiplied by a number, as transformers' of Gemma."""

    scalar_embed_scale = 1.0

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * self.scalar_embed_scale
