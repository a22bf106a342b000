"""Mixtures of experts in MLX's files and in those that save_pretrained writes: one weight of all experts for each of
gate, up and down, where transformers has one module `experts`; and packed weights of routers, which become numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..activation import swiglu
from ._affine import dequantize_affine
from ._affine_layers import AffineExperts
from ._experts import QuantizedExperts, clamped_swiglu
from ._modules import has_plain_gates, kind_of
from ._repack import AffineWeight
from ._rows import dequantize
from ._scaled import dequantize_scaled
from ._scaled_layers import ScaledExperts
from ._scaled_weight import ScaledWeight
from ._stored import Headers, place_of

__all__ = ["PARTS", "Part", "as_matrices", "make_mixtures", "part_of_experts", "put_experts", "put_router"]

# MLX's files add "_proj". Our own do not: transformers renames what is called experts.down_proj when it writes a model.
PARTS = ("gate", "up", "down")
_NAME = re.compile(r"(.+)\.(switch_mlp|experts)\.(gate|up|down)(_proj)?")

# What tensors of a file become, for so many rows of a length.
_Convert = Callable[[Mapping[str, Tensor], int], "AffineWeight | ScaledWeight | Tensor"]


class Part(NamedTuple):
    """The weights of all experts' gate, up or down: the tensors that a file has, those that it may have, and what they
    become, which has a matrix for each expert."""

    required: tuple[str, ...]
    optional: tuple[str, ...]
    convert: _Convert


def part_of_experts(name: str) -> str | None:
    """Returns the name of the module of experts that a module of a file is a part of, or None."""
    match = _NAME.fullmatch(name)
    return f"{match[1]}.{match[2]}" if match else None


class _Held:
    """Packed tensors of a file, which are read as buffers of a module."""

    def __init__(self, name: str, module: torch.nn.Module, tensors: Mapping[str, Tensor], convert: _Convert):
        self.name, self.module, self.convert = name, module, convert
        self.dtypes = {leaf: tensor.dtype for leaf, tensor in tensors.items()}
        for leaf, tensor in tensors.items():
            exact = torch.float32 if tensor.is_floating_point() and tensor.element_size() > 1 else tensor.dtype
            module.register_buffer(leaf, torch.empty(tensor.shape, dtype=exact, device="meta"))

    def converted(
        self, tensors: Mapping[str, Tensor], rows: tuple[int, ...], length: int
    ) -> AffineWeight | ScaledWeight | Tensor:
        try:
            weight = self.convert(tensors, length)
            found = (weight if isinstance(weight, Tensor) else weight.packed).shape[:-1]
            if found != rows:
                raise ValueError(f"it has {math.prod(found)} rows of weights, and the model {math.prod(rows)}")
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from None
        return weight

    def taken(self) -> dict[str, Tensor]:
        """Returns the tensors that have been read, and removes them from the module."""
        tensors = {leaf: getattr(self.module, leaf).to(dtype) for leaf, dtype in self.dtypes.items()}
        for leaf in self.dtypes:
            del self.module._buffers[leaf]
        return tensors


class _Router:
    """A module that computes with its weight in its own way. The weight is packed in the file."""

    def __init__(self, name, module, tensors, convert):
        (*self.rows, self.length), self.dtype = module.weight.shape, module.weight.dtype
        del module.weight
        self.held = _Held(name, module, tensors, convert)
        self.held.converted(tensors, (*self.rows,), self.length)  # which refuses shapes that do not go together

    def make(self):
        weight = self.held.converted(self.held.taken(), (*self.rows,), self.length)
        if isinstance(weight, AffineWeight):
            numbers = dequantize_affine(*weight[:4], dtype=torch.float32)
        elif isinstance(weight, ScaledWeight):
            numbers = dequantize_scaled(weight, torch.float32)
        else:
            numbers = dequantize(weight, "MXFP4")
        self.held.module.weight = torch.nn.Parameter(numbers.to(self.dtype))


class _Experts:
    """The weights of gate, up and down of a mixture's experts."""

    def __init__(self, name, of, model, places, headers, parts):
        self.name, self.model, (self.place, self.read_at) = name, model, places
        experts: Any = of
        self.clamped = hasattr(experts, "gate_up_proj_bias")
        if kind_of(experts) != "experts" or not (self.clamped or has_plain_gates(experts)):
            raise ValueError(f"{name}: the model's experts are none that metalcore has: {type(experts).__name__}")
        if self.clamped and (experts.alpha, experts.limit) != (1.702, 7.0):
            raise ValueError(f"{name}: gates have {experts.alpha} and {experts.limit}, and metalcore's 1.702 and 7.0")
        down = experts.down_proj
        self.count, hidden, width = down.shape if not self.clamped else (down.shape[0], *down.shape[:0:-1])
        self.dtype = down.dtype
        self.shapes = {part: (hidden, width) if part.startswith("down") else (width, hidden) for part in parts}
        container, self.held = torch.nn.Module(), {}
        for part, (rows, length) in self.shapes.items():
            found = headers.leaves(f"{name}.{part}")
            required, optional, convert = parts[part]
            if missing := [leaf for leaf in required if leaf not in found]:
                raise ValueError(f"{name}.{part}: the file has no {' and no '.join(missing)}")
            own = {leaf: found[leaf] for leaf in (*required, *optional) if leaf in found}
            for leaf, tensor in own.items():
                if tensor.dim() == 0 or len(tensor) != self.count:
                    raise ValueError(
                        f"{name}.{part}: {leaf} {list(tensor.shape)} has no matrices of {self.count} experts"
                    )
            module = torch.nn.Module()
            self.held[part] = _Held(f"{name}.{part}", module, own, convert)
            self.held[part].converted(own, (self.count, rows), length)
            if self.clamped:
                module.bias = torch.nn.Parameter(torch.empty(self.count, rows, dtype=self.dtype, device="meta"))
            container.add_module(part, module)
        model.set_submodule(self.place, torch.nn.Module())
        parent, _, leaf = self.read_at.rpartition(".")
        model.get_submodule(parent).add_module(leaf, container)

    def make(self):
        weights, biases = [], []
        for part, (rows, length) in self.shapes.items():
            held = self.held[part]
            weights.append(held.converted(held.taken(), (self.count, rows), length))
            biases.append(getattr(held.module, "bias", None))
        kinds = {type(weight) for weight in weights}
        if len(kinds) > 1:
            raise ValueError(f"{self.name}: its weights have several formats")
        activation = clamped_swiglu if self.clamped else swiglu
        module: torch.nn.Module
        if kinds == {AffineWeight}:
            of_biases = tuple(biases) if self.clamped else None
            module = AffineExperts(*(weight[:4] for weight in weights), biases=of_biases, activation=activation)
        elif kinds == {ScaledWeight}:
            if self.clamped:
                raise ValueError(f"{self.name}: experts with biases are of MXFP4 or have groups with offsets")
            module = ScaledExperts(*weights, activation=activation)
        else:
            _, (_, hidden), (_, width) = self.shapes.values()
            module = QuantizedExperts(self.count, hidden, width, "MXFP4", self.clamped, activation, "meta", self.dtype)
            for part, weight, bias in zip(("gate", "up", "down"), weights, biases):
                setattr(module, part, weight)
                if self.clamped:
                    setattr(module, f"{part}_bias", bias)
        parent, _, leaf = self.read_at.rpartition(".")
        delattr(self.model.get_submodule(parent), leaf)
        parent, _, leaf = self.place.rpartition(".")
        self.model.get_submodule(parent).add_module(leaf, module)


def as_matrices(convert: _Convert, tensors: Mapping[str, Tensor], length: int) -> AffineWeight | ScaledWeight | Tensor:
    """Returns a weight with a matrix for each expert.

    Args:
        convert: returns a weight of two dimensions from its tensors, in which experts' rows lie below each other.
        tensors: of three dimensions, of which the first is the expert.
        length: of rows.

    Raises:
        ValueError: a tensor has another number of dimensions.
    """
    for leaf, tensor in tensors.items():
        if tensor.dim() != 3:
            raise ValueError(f"{leaf} {list(tensor.shape)} has no matrices of experts")
    count = len(next(iter(tensors.values())))
    weight = convert({leaf: tensor.flatten(0, 1) for leaf, tensor in tensors.items()}, length)
    if isinstance(weight, Tensor):
        return weight.view(count, -1, weight.shape[-1])
    if weight.packed.dim() != 2:
        raise RuntimeError("a weight of all experts' rows has 2 dimensions")
    apart = {
        name: getattr(weight, name).view(count, -1, getattr(weight, name).shape[-1])
        for name in ("packed", "scales", *(("offsets",) if isinstance(weight, AffineWeight) else ()))
    }
    return weight._replace(**apart)


def put_experts(model: Any, name: str, modules: Mapping[str, Any], headers: Headers, parts: Mapping[str, Part]) -> None:
    """Puts what reads the experts of a file into a model.

    Args:
        name: of the module of experts in the file.
        parts: what the file has of gate, up and down, by its names for them, in this order.

    Raises:
        ValueError: the model has no such experts, or the tensors do not go together. The message names the module.
    """
    block, _, leaf = name.rpartition(".")
    place = place_of(block, model, modules)
    experts = modules.get(f"{place}.experts")
    if experts is None:
        raise ValueError(f"{name}: its weights are of experts, and the model has no {place}.experts")
    places = f"{place}.experts", f"{place}.{leaf}"
    _waiting(model).append(_Experts(name, experts, model, places, headers, parts))


def put_router(model: Any, name: str, module: Any, tensors: Mapping[str, Tensor], convert: _Convert) -> bool:
    """Puts what reads a packed weight into a module that has it as a parameter of two dimensions, or returns False."""
    weight = getattr(module, "_parameters", {}).get("weight")
    if weight is None or weight.dim() != 2 or module._modules:
        return False
    _waiting(model).append(_Router(name, module, tensors, convert))
    return True


def make_mixtures(model: Any) -> None:
    """Makes modules of all that has been read."""
    for waiting in model.__dict__.pop("_metalcore_mixtures", ()):
        waiting.make()


def _waiting(model):
    return model.__dict__.setdefault("_metalcore_mixtures", [])
