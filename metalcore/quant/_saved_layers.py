"""Layers and experts with weights in groups or with scales on a grid, and layers of bitsandbytes' types, in what
save_pretrained writes: the configuration has the format of each, and from_pretrained makes them again."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..activation import swiglu
from ._affine import require_affine
from ._affine_layers import AffineEmbedding, AffineExperts, AffineLinear, TiedAffineLinear
from ._blockwise import TABLES
from ._eight_bits_layers import Linear8bitLt, require_rows
from ._experts import clamped_swiglu
from ._four_bits import FourBits
from ._four_bits_layers import Linear4bit
from ._repack import AffineWeight
from ._scaled_layers import ScaledEmbedding, ScaledExperts, ScaledLinear, TiedScaledLinear
from ._scaled_weight import FORMATS, ScaledWeight, require_scaled
from ._stored import EightBitWeight, FourBitWeight, Stored, place_of, put_stored, read_headers
from ._stored_mixtures import PARTS, Part, part_of_experts, put_experts

__all__ = ["describe_layers", "put_layers", "require_written", "state_dict_of"]

_EXPERTS = AffineExperts, ScaledExperts
_FOUR_BITS = ("absmax", "scales", "scales_code", "offset")  # tensors of a layer, besides its packed weight


def describe_layers(model: torch.nn.Module) -> dict[str, dict[str, Any]]:
    """Returns the format of each of these layers, by its name. Output layers that have an embedding's weight are as
    their embedding."""
    found: dict[str, dict[str, Any]] = {}
    for name, module in model.named_modules():
        if isinstance(module, (TiedAffineLinear, TiedScaledLinear)):
            continue
        if isinstance(module, (AffineLinear, AffineEmbedding)):
            found[name] = {"format": "affine", "bits": module.bits}
        elif isinstance(module, (ScaledLinear, ScaledEmbedding)):
            found[name] = {"format": module.format, "block": list(module.block)}
        elif isinstance(module, Linear4bit):
            found[name] = {"format": module.quant_type, "block_size": module.block_size}
        elif isinstance(module, Linear8bitLt):
            found[name] = {"format": "int8", "threshold": module.threshold}
        elif isinstance(module, AffineExperts):
            found |= {f"{name}.{part}": {"format": "affine", "bits": bits} for part, bits in zip(PARTS, module.bits)}
        elif isinstance(module, ScaledExperts):
            for part, (format, block) in zip(PARTS, module.formats):
                found[f"{name}.{part}"] = {"format": format, "block": list(block)}
    return found


def require_written(model: torch.nn.Module) -> None:
    """Raises a ValueError for a model with experts whose gates no configuration describes."""
    for name, module in model.named_modules():
        if isinstance(module, _EXPERTS) and module.activation not in (swiglu, clamped_swiglu):
            raise ValueError(f"{name}: save_pretrained cannot write {type(module).__name__} with gates of its own")


def state_dict_of(model: torch.nn.Module) -> dict[str, Tensor] | None:
    """Returns what is written of a model that has layers of 4 bits in blocks, under names without dots in a layer's
    own part, or experts, whose parts have names as layers have; or None where the model's state_dict is."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, (Linear4bit, *_EXPERTS))}
    if not layers:
        return None
    state = model.state_dict()
    for name, layer in layers.items():
        if isinstance(layer, _EXPERTS):
            for part in PARTS:
                for end in ("", "_scales", "_offsets", "_factor", "_bias"):
                    if (tensor := state.pop(f"{name}.{part}{end}", None)) is not None:
                        state[f"{name}.{part}.{end[1:] or 'packed'}"] = tensor
            continue
        for key in [key for key in state if key == f"{name}.weight" or key.startswith(f"{name}.weight.")]:
            del state[key]
        own = {leaf: getattr(layer, leaf) for leaf in ("packed", *_FOUR_BITS)}
        state |= {f"{name}.{leaf}": tensor for leaf, tensor in own.items() if tensor is not None}
    return state


def put_layers(model: Any, layers: Mapping[str, Mapping[str, Any]], files: Iterable[Any] | None) -> None:
    """Puts the layers that a configuration describes into a model, to be read.

    Raises:
        ValueError: a description or a file's tensors are none of these layers'. The message names the layer.
    """
    tensors, modules = read_headers(files), dict(model.named_modules(remove_duplicate=False))
    stored, experts = {}, {}
    for name, layer in layers.items():
        place, found = place_of(name, model, modules), tensors.leaves(name)
        module: Any = modules.get(place)
        if module is None and (of := part_of_experts(name)):
            convert: Any = functools.partial(_converted, layer, None)
            part = Part(*_leaves(name, layer.get("format")), convert)
            experts.setdefault(of, {})[name.rpartition(".")[2]] = part
            continue
        if not isinstance(module, (torch.nn.Linear, torch.nn.Embedding)):
            raise ValueError(f"{name}: config.json has its format, and the model has no such layer")
        required, optional = _leaves(name, layer.get("format"))
        if missing := [leaf for leaf in required if leaf not in found]:
            raise ValueError(f"{name}: the file has no {' and no '.join(missing)}")
        own = {leaf: found[leaf] for leaf in (*required, *optional) if leaf in found}
        convert = functools.partial(_converted, layer, tuple(module.weight.shape))
        stored[place] = Stored(name, module, own, convert)
    put_stored(model, stored)
    for name, parts in experts.items():
        if missing := [part for part in PARTS if part not in parts]:
            raise ValueError(f"{name}: config.json has no format of its {' and '.join(missing)}")
        written = name.replace(".mlp.", ".block_sparse_moe.")  # as transformers writes Mixtral's
        written = written if tensors.leaves(f"{written}.{PARTS[0]}") else name
        put_experts(model, written, modules, tensors, {part: parts[part] for part in PARTS})


def _leaves(name, format):
    """Returns the tensors of a layer, and those that it may have."""
    if format == "affine":
        return ("packed", "scales", "offsets"), ("order",)
    if format in FORMATS:
        return ("packed", "scales"), ("factor",)
    if format in TABLES:
        return ("packed", "absmax"), _FOUR_BITS[1:]
    if format == "int8":  # bitsandbytes' names
        return ("weight", "SCB"), ("weight_format",)
    raise ValueError(f"{name}: there is no format {format!r}")


def _converted(layer, shape, tensors, length):
    """Returns the weight of a layer of this shape, or of experts where the shape is None."""
    dims = 2 if shape else 3
    try:
        if layer["format"] == "affine":
            packed, scales, offsets = (tensors[leaf] for leaf in ("packed", "scales", "offsets"))
            weight = AffineWeight(packed, scales, offsets, layer["bits"], tensors.get("order"))
            found = require_affine(*weight[:4], dims)
        elif layer["format"] in FORMATS:
            block = tuple(layer["block"])
            weight = ScaledWeight(tensors["packed"], tensors["scales"], layer["format"], block, tensors.get("factor"))
            found = require_scaled(weight.packed, weight.scales, weight.factor, weight.format, block, dims)
        elif not shape:
            raise ValueError(f"experts have no format {layer['format']!r}")
        elif layer["format"] == "int8":
            if not tensors["weight"].is_meta:
                require_rows(tensors)
            weight = EightBitWeight(tensors["weight"], tensors["SCB"], layer["threshold"])
            found = Linear8bitLt(*weight[:2]).in_features
        else:
            state = FourBits(
                shape=shape,
                dtype=torch.float32,
                block_size=layer["block_size"],
                type=layer["format"],
                **{leaf: tensors.get(leaf) for leaf in _FOUR_BITS},
            )
            Linear4bit(tensors["packed"], state)  # which refuses what does not go together
            return FourBitWeight(tensors["packed"], state)
    except (KeyError, RuntimeError, TypeError) as error:
        raise ValueError(str(error)) from error
    if found != length:
        raise ValueError(f"its rows have {found} numbers, and the model's {length}")
    return weight
