"""Packed modules of a model of transformers while their files are read: the headers say which tensors there are, and
once all of these are read each module becomes one of metalcore's layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._affine_layers import AffineEmbedding, AffineLinear, TiedAffineLinear
from ._eight_bits_layers import Linear8bitLt
from ._four_bits import FourBits
from ._four_bits_layers import Linear4bit
from ._layers import QuantizedEmbedding, QuantizedLinear, TiedLinear
from ._plan import untie
from ._repack import AffineWeight
from ._scaled_layers import ScaledEmbedding, ScaledLinear, TiedScaledLinear
from ._scaled_weight import ScaledWeight

__all__ = [
    "EightBitWeight",
    "FourBitWeight",
    "Headers",
    "Stored",
    "make_layers",
    "place_of",
    "put_stored",
    "read_headers",
]


class FourBitWeight(NamedTuple):
    """What metalcore.nn.Linear4bit takes."""

    packed: Tensor
    state: FourBits


class EightBitWeight(NamedTuple):
    """What metalcore.nn.Linear8bitLt takes."""

    packed: Tensor
    scales: Tensor
    threshold: float


class Stored(torch.nn.Module):
    """The tensors of a packed module as a file has them, until all of them are read. Scales are float32 meanwhile, so
    that no dtype of a model rounds them."""

    def __init__(self, name: str, module: Any, tensors: Mapping[str, Tensor], convert: Callable):
        super().__init__()
        self.name, self.of, self.convert = name, type(module), convert
        self.dtypes = {leaf: tensor.dtype for leaf, tensor in tensors.items()}
        self.scale = float(getattr(module, "scalar_embed_scale", 1.0))
        self.is_embedding = isinstance(module, torch.nn.Embedding)
        self.dtype = module.weight.dtype
        self.rows, self.length = module.weight.shape
        self.bias: torch.nn.Parameter | None = getattr(module, "bias", None)
        self.converted(tensors)  # which refuses shapes that do not go together
        for leaf, tensor in tensors.items():
            dtype = torch.float32 if tensor.is_floating_point() and tensor.element_size() > 1 else tensor.dtype
            self.register_buffer(leaf, torch.empty(tensor.shape, dtype=dtype, device="meta"))

    def converted(
        self, tensors: Mapping[str, Tensor]
    ) -> AffineWeight | ScaledWeight | FourBitWeight | EightBitWeight | Tensor:
        try:
            weight = self.convert(tensors, self.length)
            rows = len(weight if isinstance(weight, Tensor) else weight.packed)
            if isinstance(weight, FourBitWeight):
                rows = weight.state.shape[0]
            if rows != self.rows:
                raise ValueError(f"it has {rows} rows of weights, and the model {self.rows}")
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from None
        return weight

    def layer(self) -> torch.nn.Module:
        weight = self.converted({leaf: getattr(self, leaf).to(dtype) for leaf, dtype in self.dtypes.items()})
        if isinstance(weight, AffineWeight):
            if self.is_embedding:
                return AffineEmbedding(*weight[:4], dtype=self.dtype, scale=self.scale)
            return AffineLinear(*weight[:4], bias=self.bias, order=weight.order, dtype=self.dtype)
        if isinstance(weight, FourBitWeight):
            return Linear4bit(weight.packed, dataclasses.replace(weight.state, dtype=self.dtype), self.bias)
        if isinstance(weight, EightBitWeight):
            return Linear8bitLt(weight.packed, weight.scales, self.bias, weight.threshold, self.dtype)
        if isinstance(weight, ScaledWeight):
            if self.is_embedding:
                return ScaledEmbedding(weight, self.dtype, self.scale)
            return ScaledLinear(weight, self.bias, self.dtype)
        if self.is_embedding:
            layer = QuantizedEmbedding(self.rows, self.length, "MXFP4", "meta", self.dtype, self.scale)
        else:
            layer = QuantizedLinear(self.length, self.rows, "MXFP4", False, "meta", self.dtype)
            layer.bias = self.bias
        layer.packed = weight
        return layer


class Tied(torch.nn.Module):
    """An output layer until its embedding has been read."""

    def __init__(self, source: str, bias: torch.nn.Parameter | None):
        super().__init__()
        self.source, self.bias = source, bias


def place_of(name: str, model: Any, modules: Mapping[str, Any]) -> str:
    """Returns the name in the model of a checkpoint's module. The model may be the checkpoint's base model, or have
    it; and transformers calls Mixtral's blocks as those of other models."""
    prefix = f"{model.base_model_prefix}."
    for known in (name, name.replace(".block_sparse_moe", ".mlp")):
        for place in (known, known.removeprefix(prefix), prefix + known):
            if place in modules:
                return place
    return name


def put_stored(model: Any, stored: Mapping[str, Stored]) -> None:
    """Puts modules that are to be read into a model, and waits with output layers that have an embedding's weight."""
    ties = getattr(model, "all_tied_weights_keys", None) or {}
    tied = {target.rpartition(".")[0]: source.rpartition(".")[0] for target, source in ties.items()}
    tied = {target: source for target, source in tied.items() if source in stored}
    biases = {target: getattr(model.get_submodule(target), "bias", None) for target in tied}
    for place, module in stored.items():
        model.set_submodule(place, module)
    for target, source in tied.items():
        if target not in stored:
            model.set_submodule(target, Tied(source, biases[target]))
    untie(model, [*stored, *tied])


def make_layers(model: torch.nn.Module) -> None:
    """Makes layers of all modules that have been read."""
    for name, module in list(model.named_modules()):
        if isinstance(module, Stored):
            model.set_submodule(name, module.layer().train(module.training))
    for name, module in list(model.named_modules()):
        if isinstance(module, Tied):
            embedding: Any = model.get_submodule(module.source)
            kind = next((tied for kind, tied in _TIED.items() if isinstance(embedding, kind)), TiedLinear)
            model.set_submodule(name, kind(embedding, module.bias))


_TIED: Mapping[type, Any] = {AffineEmbedding: TiedAffineLinear, ScaledEmbedding: TiedScaledLinear}


class Headers(dict[str, Tensor]):
    """Tensors without memory, by their keys in files."""

    def __init__(self, tensors):
        super().__init__(tensors)
        self.by_module: dict[str, dict[str, Tensor]] = {}
        for key, tensor in tensors.items():
            name, _, leaf = key.rpartition(".")
            self.by_module.setdefault(name, {})[leaf] = tensor

    def leaves(self, module: str) -> dict[str, Tensor]:
        """Returns a module's tensors, by their own names."""
        return self.by_module.get(module, {})


def read_headers(files: Iterable[Any] | None) -> Headers:
    """Reads files' headers.

    Raises:
        ValueError: there are no files, or one is damaged or no file of safetensors.
    """
    from safetensors import SafetensorError, safe_open

    tensors = {}
    for file in files or ():
        if not str(file).endswith(".safetensors"):
            raise ValueError(f"{file}: packed weights are loaded from safetensors alone")
        try:
            with safe_open(file, "pt") as opened:
                names = opened.keys()  # it is no dict
                for key in names:
                    part = opened.get_slice(key)
                    tensors[key] = torch.empty(part.get_shape(), dtype=_DTYPES[part.get_dtype()], device="meta")
        except (SafetensorError, KeyError) as error:
            raise ValueError(f"{file} is damaged, or no file of safetensors: {error}") from None
    if not tensors:
        raise ValueError("packed weights are loaded from files, and there are none")
    return Headers(tensors)


_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "U16": torch.uint16,
    "U32": torch.uint32, "U64": torch.uint64, "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu, "F4": torch.float4_e2m1fn_x2,
}  # fmt: skip
