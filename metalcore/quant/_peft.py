"""What peft cannot know of packed layers: metalcore.integrations.peft says what that is."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch

from .._core.environment import after_import
from ._experts import QuantizedExperts
from ._layers import PackedModule, QuantizedEmbedding, QuantizedLinear
from ._packed_weight import PackingError, error_of, write
from ._types import KERNELS

__all__ = ["packed_layers", "packing_errors", "teach"]


def packed_layers(config: Any, merged: str = "packed") -> Any:
    """Says what adapters on packed layers are merged into, and returns the configuration.

    Args:
        config: of peft, of any kind.
        merged: what `merge_and_unload` and `merge_adapter` leave in a layer's place: "packed", the sum packed in the
            layer's type; GGML's name of another type, in which it is packed; or "dense", a torch.nn.Linear with the
            sum. `packing_errors` says what packing lost.

    Raises:
        ImportError: peft is not installed.
        ValueError: merged is nothing of that.

    Example:
        >>> from metalcore.integrations.peft import packed_layers
        >>> from peft import LoraConfig
        >>> packed_layers(LoraConfig(r=4, target_modules=["q_proj"]), merged="dense").r
        4
    """
    if merged not in ("packed", "dense") and not (isinstance(merged, str) and merged.upper() in KERNELS):
        types = ", ".join(sorted(KERNELS))
        raise ValueError(f'packed_layers: merged must be "packed", "dense" or one of {types}, not {merged!r}')
    import_module("peft")
    config.merged = merged  # no field of the dataclass, and so not saved
    return config


def packing_errors(model: torch.nn.Module) -> dict[str, PackingError]:
    """Returns the errors of packed layers, by their names, to which numbers were written, as by a merge or by PiSSA.

    Example:
        >>> from metalcore.integrations.peft import packing_errors
        >>> packing_errors(torch.nn.Sequential(metalcore.nn.QuantizedLinear(32, 4, "Q8_0")))
        {}
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, PackedModule)}
    return {name: layer.packing_error for name, layer in layers.items() if layer.packing_error is not None}


class _OnPackedLayer:
    """An adapter's layer on a packed one. A merge adds all adapters to the numbers before it packs them, and keeps what
    the layer was, which is there again after unmerge()."""

    base_layer: Any
    merged_adapters: Any
    _before: Any = None
    _merged = "packed"

    def merge(self, safe_merge: bool = False, adapter_names: Any = None) -> None:
        if self._before is None and not _is_packed(self.base_layer):
            super().merge(safe_merge, adapter_names)  # pyright: ignore[reportAttributeAccessIssue]
            return
        names = import_module("peft.tuners.tuners_utils").check_adapters_to_merge(self, adapter_names)
        if not names:
            return
        if self._before is not None:
            names = [*self.merged_adapters, *names]
            self.unmerge()
        layer = self.base_layer
        bias = getattr(layer, "bias", None)
        before = (layer, layer.packed, layer.packing_error, None if bias is None else bias.data)
        self.base_layer = dense = numbers_of(layer).requires_grad_(False)
        if bias is not None:
            dense.bias = torch.nn.Parameter(bias.data.clone(), False)
        try:
            super().merge(safe_merge, names)  # pyright: ignore[reportAttributeAccessIssue]
            if self._merged == "packed":
                write(layer, dense.weight)  # pyright: ignore[reportArgumentType]
                self.base_layer = layer
                if bias is not None:
                    bias.data = dense.bias.data
            elif self._merged != "dense":
                pack = (
                    QuantizedEmbedding.from_embedding if hasattr(layer, "to_embedding") else QuantizedLinear.from_linear
                )
                self.base_layer = repacked = pack(dense, self._merged)  # pyright: ignore[reportArgumentType]
                repacked.packing_error = error_of(repacked, dense.weight, layer.weight.float())  # pyright: ignore
        except BaseException:
            self.base_layer = layer
            self.merged_adapters.clear()
            raise
        self._before = before

    def unmerge(self) -> None:
        if self._before is None:
            super().unmerge()  # pyright: ignore[reportAttributeAccessIssue]
            return
        device = self.base_layer.weight.device
        layer, packed, error, bias = self._before
        if self.base_layer is layer:
            layer.packed, layer.packing_error = packed.to(device), error
            if bias is not None:
                layer.bias.data = bias.to(device)
        self.base_layer, self._before = layer.to(device), None
        self.merged_adapters.clear()
        getattr(self, "_caches", {}).clear()


@functools.cache
def _on_packed_layer(adapter: Any) -> Any:
    return type(adapter.__name__, (_OnPackedLayer, adapter), {"__module__": adapter.__module__})


def numbers_of(layer: Any) -> torch.nn.Module:
    """Returns a layer with the same numbers as a parameter."""
    return layer.to_embedding() if isinstance(layer, QuantizedEmbedding) else layer.to_linear()


def teach() -> None:
    """Makes peft know what its classes cannot see of packed layers."""
    other, model = import_module("peft.utils.other"), import_module("peft.peft_model")
    tuners, prompts = import_module("peft.tuners.tuners_utils"), import_module("peft.tuners.adaption_prompt.layer")

    def around(owner: Any, name: str, function: Any) -> None:
        before = getattr(owner, name)
        setattr(
            owner, name, functools.wraps(before)(lambda self, *args, **kwargs: function(self, before, *args, **kwargs))
        )

    def inject(self, before, model, adapter_name, *args, **kwargs):
        config = self.peft_config[adapter_name]
        if getattr(config, "init_lora_weights", None) == "loftq" and any(map(_is_packed, model.modules())):
            raise ValueError(
                'init_lora_weights="loftq" starts from weights that are not packed, and rounds them to NF4. These are '
                'packed already: take init_lora_weights=True, "pissa" or "olora"'
            )
        for name in getattr(config, "target_parameters", None) or ():
            if path := _without_parameters(model, name):
                raise ValueError(
                    f"target_parameters has {name!r}, and the weights of {path} are packed: name a linear layer in "
                    "target_modules, and leave experts out of what is packed (quantize_model(model, skip=…))"
                )
        before(self, model, adapter_name, *args, **kwargs)
        for module in model.modules():
            if isinstance(module, tuners.BaseTunerLayer) and _is_packed(getattr(module, "base_layer", None)):
                if not isinstance(module, _OnPackedLayer):
                    module.__class__ = _on_packed_layer(type(module))
                module._merged = getattr(config, "merged", "packed")  # pyright: ignore[reportAttributeAccessIssue]

    def save(self, before, adapter_name, *args, **kwargs):
        before(self, adapter_name, *args, **kwargs)
        copied = self.modules_to_save[adapter_name]
        if _is_packed(copied):
            trained = adapter_name in self.active_adapters
            self.modules_to_save[adapter_name] = numbers_of(copied).requires_grad_(trained)

    def set_up_prompts(self, before, adapter_name):
        with _found_by_name(self.base_model):
            before(self, adapter_name)

    def adapt_attention(self, before, model_type, adapter_len, model, *args, **kwargs):
        packed = next(filter(_is_packed, model.modules()), None)
        if packed is not None and next(model.parameters(), None) is None:  # from which peft takes the device
            packed.bias = torch.nn.Parameter(packed.packed.new_empty(0, dtype=packed.dtype))
            try:
                before(self, model_type, adapter_len, model, *args, **kwargs)
            finally:
                packed.bias = None
        else:
            before(self, model_type, adapter_len, model, *args, **kwargs)

    around(tuners.BaseTuner, "inject_adapter", inject)
    around(other.ModulesToSaveWrapper, "update", save)
    around(model.PeftModel, "_setup_prompt_encoder", set_up_prompts)
    around(prompts._BaseAdaptedAttention, "__init__", adapt_attention)


def _without_parameters(model, name):
    """Returns the packed module one of whose weights peft would take for the parameter of this name, or None."""
    leaves = {QuantizedExperts: ("gate_up_proj", "down_proj"), PackedModule: ("weight",)}
    for path, module in model.named_modules():
        for leaf in next((leaves[kind] for kind in leaves if isinstance(module, kind)), ()):
            if f".{path}.{leaf}".endswith(f".{name}"):
                return path
    return None


def _is_packed(module: Any) -> bool:
    return isinstance(module, PackedModule)


@contextmanager
def _found_by_name(model: Any) -> Iterator[None]:
    """Gives the embedding the name by which peft looks first, before it looks for parameters, of which a packed one
    has none."""
    embedding = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    if not isinstance(embedding, QuantizedEmbedding) or hasattr(model, "embeddings"):
        yield
        return
    model.embeddings = torch.nn.ModuleDict({"word_embeddings": embedding})
    try:
        yield
    finally:
        del model.embeddings


after_import("peft", teach)
