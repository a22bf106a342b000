"""Models of transformers whose weights stay packed, from GGUF files."""

from __future__ import annotations

import os
import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._core.environment import require_transformers
from ..nn import QuantizedEmbedding, QuantizedExperts, QuantizedLinear
from ..quant import dequantize
from ..quant._experts import clamped_swiglu
from ..quant._layers import TiedLinear
from ..quant._types import KERNELS
from . import _deepseek, _state_spaces
from ._config import config_of, layout_of
from ._layouts import Layout, from_interleaved
from ._metadata import Metadata, stops
from ._reader import GGUFError, GGUFFile, whole
from ._rope import FACTORS
from ._tokenizer import tokenizer_of

__all__ = ["Loaded", "load"]

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_DEQUANTIZED = frozenset("IQ1_S IQ1_M IQ2_XXS IQ2_XS IQ2_S IQ3_XXS IQ3_S TQ1_0 TQ2_0".split())


class Loaded(NamedTuple):
    """The model and the tokenizer that a GGUF file holds.

    Attributes:
        model: transformers' model, in evaluation mode. Its Linear and Embedding modules are
            metalcore.nn.QuantizedLinear and QuantizedEmbedding where their weights are packed, its modules of experts
            QuantizedExperts; save_pretrained writes these as they are. `model.gguf_metadata` has the file's metadata
            that are not of the model's shape.
        tokenizer: transformers' tokenizer, or None if the file has none or it was not asked for.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(vocab_size=32, hidden_size=32, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
        >>> [path] = metalcore.gguf.save_gguf(LlamaForCausalLM(LlamaConfig(**sizes)), "tiny.gguf")
        >>> metalcore.gguf.load(path, "mps").tokenizer is None
        True
    """

    model: Any
    tokenizer: Any


def load(
    path: str | os.PathLike[str],
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    *,
    tokenizer: bool = True,
    attn_implementation: str | None = None,
) -> Loaded:
    """Loads a model from a GGUF file. Its weights are copied to the device once, as they are packed in the file.

    Args:
        path: of a GGUF file with a layout of llama (Mistral and Mixtral too), qwen2, qwen2moe, qwen3, qwen3moe, gemma2,
            gemma3, gemma4, lfm2, qwen3next, mamba (FalconMamba too), mamba2, granitehybrid (Bamba too), falcon-h1,
            nemotron_h, nemotron_h_moe, phi3, gpt-oss or deepseek2, or of any part of one that was split.
        device: where the model is to be, by default PyTorch's default device.
        dtype: of activations, norms and biases, and of weights that are not packed; by default float32 on the CPU and
            bfloat16 elsewhere.
        tokenizer: whether to make the tokenizer, which takes some seconds for a large vocabulary.
        attn_implementation: transformers' name of an implementation of attention, as "metalcore" or "eager".

    Returns:
        (model, tokenizer). Weights of types without kernels (IQ1 to IQ3, TQ) become numbers, with a warning.

    Raises:
        GGUFError: the file is damaged, its layout or a tensor's type is unknown, or a part is missing.
        OSError: it cannot be read.
        TypeError: dtype is no floating-point torch.dtype.
        ImportError: transformers is not installed, or older than 5.4.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(vocab_size=32, hidden_size=32, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
        >>> [path] = metalcore.gguf.save_gguf(LlamaForCausalLM(LlamaConfig(**sizes)), "tiny.gguf")
        >>> model, tokenizer = metalcore.gguf.load(path, "mps", torch.float32)
        >>> model.config.hidden_size
        32
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"gguf.load: dtype must be a floating-point torch.dtype, not {dtype!r}")
    file = whole(path)
    layout = layout_of(file)
    check_types(file)
    device = torch.device(torch.get_default_device() if device is None else device)
    dtype = dtype or (torch.float32 if device.type == "cpu" else torch.bfloat16)
    model = _without_memory(file, layout, dtype, attn_implementation)
    _Filling(file, layout, model, device, dtype).run()
    _restore_buffers(model, device)
    model.gguf_metadata = {
        key: value for key, value in file.metadata.items() if key.startswith(("general.", "tokenizer."))
    }
    _set_stops(model, Metadata(file))
    _note(model)
    return Loaded(model.eval(), tokenizer_of(file) if tokenizer else None)


def check_types(file: GGUFFile) -> None:
    """Checks that weights can be of the types of a file's tensors.

    Raises:
        GGUFError: they cannot.
    """
    for info in file.tensors.values():
        if info.type.name not in KERNELS | _FLOATS.keys() | _DEQUANTIZED:
            raise GGUFError(f"{file.path}: tensor {info.name!r}: {info.type.name} is no type of weights")


def _without_memory(file, layout, dtype, attention):
    library = require_transformers("metalcore.gguf.load")
    fields = config_of(file, layout)
    try:
        config = library.AutoConfig.for_model(layout.model_type, **fields)
        with torch.device("meta"):
            model = library.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    except Exception as error:  # configurations raise errors of their own classes for numbers that do not fit
        raise GGUFError(f"{file.path}: the metadata describe no model: {error}") from error
    return model


class _Place(NamedTuple):
    """A parameter of a module, and llama.cpp's name of it."""

    path: str
    module: torch.nn.Module
    leaf: str
    name: str


class _Filling:
    """Gives the parameters of a model without memory the weights of a file."""

    def __init__(self, file: GGUFFile, layout: Layout, model: Any, device: torch.device, dtype: torch.dtype):
        self.file, self.layout, self.model = file, layout, model
        self.device, self.dtype = device, dtype
        self.config = model.config
        self.tied = "output.weight" not in file.tensors
        self.without_kernels: dict[str, list[str]] = {}

    def run(self):
        modules = list(self.model.named_modules())
        experts = {path for path, _ in modules if self.layout.experts and path.endswith(f".{self.layout.experts}")}
        places = [
            _Place(path, module, leaf, self._name(f"{path}.{leaf}"))
            for path, module in modules
            for leaf in (*module._parameters, *(name for name in self.layout.buffers if name in module._buffers))
            if getattr(module, leaf) is not None and path not in experts and not (self.tied and path == "lm_head")
        ]
        self._check_names([place.name for place in places], experts)
        for place in places:
            self._parameter(place)
        for path, module in modules:
            if path in experts:
                self._experts(path, module)
        if self.tied:
            self._tie()
        for type, names in self.without_kernels.items():
            warnings.warn(
                f"{self.file.path}: {type} has no kernels; {len(names)} tensors ({_few(names)}) became {self.dtype}",
                stacklevel=4,
            )

    def _name(self, parameter: str) -> str:
        name = self.layout.name(parameter)
        if name is None:
            raise GGUFError(f"{self.file.path}: {self.layout.architecture} files have no name for {parameter}")
        return name

    def _sources(self, name: str) -> tuple[str, ...]:
        """Returns the tensors of the file that a parameter is made of."""
        tensors = self.file.tensors
        return tuple(part for one in _deepseek.sources(name, tensors) for part in _state_spaces.sources(one, tensors))

    def _check_names(self, parameters, experts):
        parts = {part for name in parameters for part in self._sources(name)}
        names = parts | {name for path in experts for name in self._expert_names(path).values()}
        missing = sorted(names - self.file.tensors.keys())
        if missing:
            raise GGUFError(f"{self.file.path}: {len(missing)} tensors are missing: {_few(missing)}")
        surplus = sorted(self.file.tensors.keys() - names - set(FACTORS))
        if surplus:
            raise GGUFError(f"{self.file.path}: {len(surplus)} tensors are unknown: {_few(surplus)}")

    def _info(self, name, shape):
        info = self.file.tensors[name]
        if [n for n in info.shape if n != 1] != [n for n in shape if n != 1]:  # files have no dimensions of 1
            raise GGUFError(
                f"{self.file.path}: tensor {name!r} has shape {info.shape}, and the metadata say {tuple(shape)}"
            )
        return info

    def _packed(self, name: str, heads: int | None = None) -> Tensor:
        packed = self.file.packed(name)
        moved = packed.clone() if self.device.type == "cpu" else packed.to(self.device)
        return moved if heads is None else from_interleaved(moved, heads)

    def _numbers(
        self, name: str, heads: int | None = None, shift: float = 0.0, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Returns a tensor's numbers, in the model's dtype or another."""
        type = self.file.tensors[name].type
        if type.name not in _FLOATS and type.name not in KERNELS:
            self.without_kernels.setdefault(type.name, []).append(name)
        packed = self.file.packed(name)
        if type.name in _FLOATS:
            numbers = packed.clone().view(_FLOATS[type.name]).view(self.file.tensors[name].shape)
        else:
            numbers = dequantize(packed, type).view(self.file.tensors[name].shape)
        if shift:
            numbers = numbers.float() - shift
        numbers = numbers.to(self.device, dtype or self.dtype)
        return numbers if heads is None else from_interleaved(numbers, heads)

    def _parameter(self, place: _Place):
        path, module, leaf, name = place
        shape = getattr(module, leaf).shape
        parts = self._sources(name)
        if len(parts) == 2:
            self._joined(place, parts, shape)
            return
        if leaf in self.layout.buffers:
            self._info(name, shape)
            setattr(module, leaf, self._numbers(name, dtype=None if leaf == "layer_scalar" else torch.float32))
            return
        name = parts[0]
        info = self._info(name, _state_spaces.file_shape(f"{path}.{leaf}", shape, self.config))
        heads = self.layout.rotated(f"{path}.{leaf}", self.config)
        packs = isinstance(module, torch.nn.Linear | torch.nn.Embedding) and leaf == "weight"
        packs = packs and not path.endswith("dt_proj")  # models multiply by its weight themselves
        if packs and info.type.name in KERNELS and len(info.shape) == 2:
            layer = _packed_module(module, info.type, self.dtype)
            layer.packed = self._packed(name, heads)
            self.model.set_submodule(path, layer)
            return
        if leaf in _state_spaces.STORED:
            numbers = _state_spaces.STORED[leaf][1](self._numbers(name, dtype=torch.float32)).to(self.dtype)
        else:
            numbers = self._numbers(name, heads, self.layout.shifted(f"{path}.{leaf}"))
        # The module of the path, since the one that was given may have been replaced.
        setattr(self.model.get_submodule(path), leaf, torch.nn.Parameter(numbers.view(shape)))

    def _joined(self, place, parts, shape):
        """Fills a Linear's weight that is two tensors in a file: each has some of the rows, or they are DeepSeek's."""
        path, module, leaf, name = place
        types = [self.file.tensors[part].type for part in parts]
        have_rows = _state_spaces.sources(name, self.file.tensors) == parts
        shapes = [self.file.tensors[part].shape for part in parts]
        if have_rows and (
            sum(one[0] for one in shapes) != shape[0] or {tuple(one[1:]) for one in shapes} != {shape[1:]}
        ):
            raise GGUFError(f"{self.file.path}: {' and '.join(parts)} are no {tuple(shape)} together")
        if have_rows and types[0] == types[1] and types[0].name in KERNELS:
            layer = _packed_module(module, types[0], self.dtype)
            layer.packed = self._ordered(name, torch.cat([self._packed(part) for part in parts]))
            self.model.set_submodule(path, layer)
            return
        numbers = [self._numbers(part) for part in parts]
        joined = self._ordered(name, torch.cat(numbers)) if have_rows else _deepseek.joined(*numbers)
        if joined.shape != shape:
            raise GGUFError(f"{self.file.path}: {' and '.join(parts)} are no {tuple(shape)} together")
        setattr(module, leaf, torch.nn.Parameter(joined))

    def _ordered(self, name, rows):
        """Returns rows of a file in the parameter's order."""
        order = _state_spaces.row_order(name, self.config)
        return rows if order is None else rows[order.argsort().to(rows.device)].contiguous()

    def _expert_names(self, path):
        prefix = path.replace("model.layers.", "blk.").removesuffix(f".{self.layout.experts}")
        leaves = ("weight", "bias") if self.layout.model_type == "gpt_oss" else ("weight",)
        parts = ("gate", "up", "down") if self.layout.gated else ("up", "down")
        return {(part, leaf): f"{prefix}.ffn_{part}_exps.{leaf}" for part in parts for leaf in leaves}

    def _experts(self, path, module):
        names = self._expert_names(path)
        config, interleaved = self.config, self.layout.model_type == "gpt_oss"
        count = getattr(config, "num_experts", None) or config.num_local_experts
        hidden = getattr(config, "moe_latent_size", None) or config.hidden_size
        width = getattr(config, "moe_intermediate_size", config.intermediate_size)
        types = []
        for (part, leaf), name in names.items():
            rows, length = (hidden, width) if part == "down" else (width, hidden)
            info = self._info(name, (count, rows, length) if leaf == "weight" else (count, rows))
            types += [info.type] if leaf == "weight" else []
        if all(type.name in KERNELS for type in types):
            options: dict[str, Any] = {"activation": clamped_swiglu, "bias": True} if interleaved else {}
            if not self.layout.gated:
                options["activation"] = module.act_fn
            experts = QuantizedExperts(count, hidden, width, types, device="meta", dtype=self.dtype, **options)
            for (part, leaf), name in names.items():
                if leaf == "weight":
                    setattr(experts, part, self._packed(name))
                else:
                    setattr(experts, f"{part}_bias", torch.nn.Parameter(self._numbers(name)))
            self.model.set_submodule(path, experts)
            return
        self._float_experts(module, {key: self._numbers(name) for key, name in names.items()}, interleaved)

    def _float_experts(self, module, numbers, interleaved):
        """Fills transformers' own module, in which gate and up are one parameter. gpt-oss has its columns in turns."""
        *first, up, down = (number for (_, leaf), number in numbers.items() if leaf == "weight")
        if not first:
            module.up_proj, module.down_proj = torch.nn.Parameter(up), torch.nn.Parameter(down)
            return
        [gate] = first
        if interleaved:
            module.gate_up_proj = torch.nn.Parameter(torch.stack([gate, up], 2).flatten(1, 2).mT.contiguous())
            module.down_proj = torch.nn.Parameter(down.mT.contiguous())
            biases = torch.stack([numbers["gate", "bias"], numbers["up", "bias"]], 2).flatten(1)
            module.gate_up_proj_bias = torch.nn.Parameter(biases)
            module.down_proj_bias = torch.nn.Parameter(numbers["down", "bias"])
        else:
            module.gate_up_proj = torch.nn.Parameter(torch.cat([gate, up], 1))
            module.down_proj = torch.nn.Parameter(down)

    def _tie(self):
        embedding = self.model.get_input_embeddings()
        if isinstance(embedding, QuantizedEmbedding):
            self.model.set_submodule("lm_head", TiedLinear(embedding))
            self.model._tied_weights_keys = self.model.all_tied_weights_keys = {}
        else:
            self.model.lm_head.weight = embedding.weight


def _few(names):
    return ", ".join(names[:3]) + ", …" * (len(names) > 3)


def _packed_module(module, type, dtype):
    """Returns a module for packed weights in the place of another, without memory."""
    if isinstance(module, torch.nn.Embedding):
        rows, length = module.weight.shape
        scale = float(getattr(module, "scalar_embed_scale", 1.0))
        return QuantizedEmbedding(rows, length, type, device="meta", dtype=dtype, scale=scale)
    layer = QuantizedLinear(module.in_features, module.out_features, type, bias=False, device="meta", dtype=dtype)
    layer.bias = module.bias
    return layer


def _restore_buffers(model, device):
    """Restores buffers that no file holds: frequencies of rotary embeddings, scales of Gemma's embeddings, Falcon-H1's
    multipliers, which are within the weights, and FalconMamba's norms, which have no weights."""
    for path, module in list(model.named_modules()):
        if not any(buffer.is_meta for buffer in module.buffers(recurse=False)):
            continue
        ones = [name for name in ("mup_vector", "weight") if name in module._buffers]
        for name in ones:
            setattr(module, name, torch.ones_like(getattr(module, name), device=device))
        if ones:
            continue
        if hasattr(module, "scalar_embed_scale"):
            module.embed_scale = torch.tensor(module.scalar_embed_scale, device=device)
        else:
            model.set_submodule(path, type(module)(config=model.config).to(device))


def _note(model):
    """Notes in the configuration which modules are packed, so that save_pretrained writes it down."""
    from ..quant._transformers import note

    packed: dict[str, list[str]] = {}
    for path, module in model.named_modules():
        if isinstance(module, QuantizedExperts):
            packed[path] = [type.name for type in module.types]
        elif isinstance(module, QuantizedLinear | QuantizedEmbedding):
            packed[path] = [module.type.name]
    if packed:
        note(model, packed)


def _set_stops(model, metadata):
    """Makes generation end at the end of a text, and of a turn."""
    if ends := stops(metadata):
        model.generation_config.eos_token_id = ends
