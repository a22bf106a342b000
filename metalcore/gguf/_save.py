"""GGUF files of transformers' models, as llama.cpp opens them."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..nn import QuantizedEmbedding, QuantizedExperts, QuantizedLinear
from ..quant import dequantize, quantize, type_of
from ..quant._types import Type
from . import _state_spaces
from ._deepseek import divided, sources
from ._layouts import MODEL_TYPES, Layout, of_model, to_interleaved
from ._reader import part_path
from ._save_keys import keys_of
from ._tokenizer import tokenizer_keys

__all__ = ["save_gguf"]

_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


def save_gguf(
    model: Any,
    path: str | os.PathLike[str],
    tokenizer: Any = None,
    *,
    name: str | None = None,
    max_size: int | None = None,
) -> list[Path]:
    """Writes a model to a GGUF file that llama.cpp opens. Packed weights are written as they are, other weights of
    Linear, Embedding and experts in their dtype, all else in float32. One tensor at a time is in the CPU's memory.

    Args:
        model: a model of transformers for causal language modeling, of the types that `load` makes, with or without
            packed weights, on any device.
        path: of the file, which is replaced if it is there.
        tokenizer: transformers' fast tokenizer, byte-level or SentencePiece-like BPE. By default the file has the
            vocabulary of the GGUF file that the model was loaded from, or none.
        name: general.name, by default that of the file that the model was loaded from, or of the configuration.
        max_size: the most bytes of tensors in a file. A larger model becomes parts as gguf-split's, in the place of
            "model.gguf" "model-00001-of-00003.gguf" and so on. A tensor is never divided.

    Returns:
        The files.

    Raises:
        ValueError: llama.cpp's layouts have no place for the model, one of its settings or parameters, or the
            tokenizer, or max_size is no positive int.
        RuntimeError: the package gguf is not installed.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(vocab_size=32, hidden_size=32, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
        >>> [path] = metalcore.gguf.save_gguf(LlamaForCausalLM(LlamaConfig(**sizes)), "tiny.gguf")
        >>> path.name
        'tiny.gguf'
    """
    try:
        import gguf
    except ImportError:
        raise RuntimeError("save_gguf needs the package gguf: pip install 'metalcore[gguf]'") from None
    config = getattr(model, "config", None)
    kind, experts = getattr(config, "model_type", ""), getattr(config, "num_local_experts", None) or 0
    if kind == "nemotron_h" and "moe" not in getattr(config, "layer_types", ()):
        experts = 0  # the configuration has a number of them all the same
    layout = of_model(kind, experts)
    if layout is None:
        raise ValueError(f"{type(model).__name__} cannot be written; these can: {', '.join(sorted(MODEL_TYPES))}")
    keys, tensors = _keys(model, layout, tokenizer, name), list(_tensors(model, layout))
    factors = keys.pop("factors")
    for factor, numbers in factors.items():
        tensor = torch.tensor(numbers)
        tensors.append(_Tensor(factor, type_of("F32"), (len(numbers),), lambda tensor=tensor: tensor))
    if max_size is not None and (type(max_size) is not int or max_size < 1):
        raise ValueError(f"save_gguf: max_size must be a positive int, not {max_size!r}")
    path = Path(path)
    parts = _parts(tensors, max_size)
    paths = [path] if len(parts) == 1 else [part_path(path.with_suffix(""), i, len(parts)) for i in range(len(parts))]
    partial = [one.with_name(one.name + ".part") for one in paths]
    try:
        for number, (one, part) in enumerate(zip(partial, parts)):
            writer = gguf.GGUFWriter(str(one), layout.architecture)
            for key, value in keys.items() if number == 0 else ():
                _add(gguf, writer, key, value)
            if len(parts) > 1:
                writer.add_uint16("split.no", number)
                writer.add_uint16("split.count", len(parts))
                writer.add_int32("split.tensors.count", len(tensors))
            _write(gguf, writer, part)
        for one, to in zip(partial, paths):
            os.replace(one, to)
    finally:
        for one in partial:
            one.unlink(missing_ok=True)
    return paths


def _parts(tensors, most):
    """Returns tensors in their order, in lists of at most so many bytes; one that is larger is alone."""
    parts: list[list[_Tensor]] = [[]]
    size = 0
    for one in tensors:
        nbytes = math.prod(one.shape) // one.type.block * one.type.nbytes
        if most is not None and parts[-1] and size + nbytes > most:
            parts.append([])
            size = 0
        parts[-1].append(one)
        size += nbytes
    return parts


class _Tensor(NamedTuple):
    """A tensor to be written: `numbers()` gives numbers, or bytes of a packed type."""

    name: str
    type: Type
    shape: tuple[int, ...]
    numbers: Callable[[], Tensor]

    def bytes(self) -> Tensor:
        numbers = self.numbers().detach()
        packed = numbers if numbers.dtype == torch.uint8 else quantize(numbers, self.type)
        return packed.cpu().contiguous()


def _write(gguf, writer, tensors):
    for one in tensors:
        *lead, length = one.shape
        shape = (*lead, length // one.type.block * one.type.nbytes)
        count = torch.Size(shape).numel()
        raw = gguf.GGMLQuantizationType(one.type.number)
        writer.add_tensor_info(one.name, shape, _uint8(), count, raw_dtype=raw)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for one in tensors:
            writer.write_tensor_data(one.bytes().numpy())
    finally:
        writer.close()


def _uint8():
    import numpy

    return numpy.dtype("uint8")


def _add(gguf, writer, key, value):
    kinds = gguf.GGUFValueType
    simple = {bool: kinds.BOOL, int: kinds.UINT32, float: kinds.FLOAT32, bytes: kinds.STRING}
    value = _encoded(value) if isinstance(value, str) else value
    if type(value) in simple:
        kind = kinds.INT64 if type(value) is int and not 0 <= value < 2**32 else simple[type(value)]
        writer.add_key_value(key, value, kind)
    elif len(value):
        values = [_encoded(one) if isinstance(one, str) else one for one in value]
        part = kinds.INT32 if type(values[0]) is int else simple[type(values[0])]
        writer.add_key_value(key, values, kinds.ARRAY, sub_type=part)


def _encoded(text):
    """Returns a text's bytes, which GGUFFile decodes to the same text."""
    return text.encode(errors="surrogateescape")


def _keys(model, layout, tokenizer, name):
    metadata = dict(getattr(model, "gguf_metadata", {}))
    for key in ("general.architecture", "general.alignment"):
        metadata.pop(key, None)
    if tokenizer is not None:
        metadata = {key: value for key, value in metadata.items() if not key.startswith("tokenizer.")}
        metadata.update(tokenizer_keys(tokenizer, model.config.vocab_size))
    metadata.setdefault("tokenizer.ggml.model", "none")
    metadata["general.name"] = name or metadata.get("general.name") or model.config._name_or_path or layout.model_type
    if layout.model_type == "mistral" and "mistral" not in metadata["general.name"].lower():
        metadata["general.name"] += " (mistral)"  # files of Mistral are told by it from files of Llama
    metadata["general.quantization_version"] = 2
    own, factors = keys_of(model.config, layout)
    return {**metadata, **{f"{layout.architecture}.{key}": value for key, value in own.items()}, "factors": factors}


def _tensors(model: Any, layout: Layout) -> Iterator[_Tensor]:
    config = model.config
    for path, module in model.named_modules():
        if layout.experts and path.endswith(f".{layout.experts}"):
            yield from _experts(path, module, layout)
        elif path == "lm_head" and _is_tied(model):
            continue
        else:
            packed = isinstance(module, QuantizedLinear | QuantizedEmbedding)
            leaves = ["weight"] * packed + [leaf for leaf, _ in module.named_parameters(recurse=False)]
            leaves += [leaf for leaf in layout.buffers if leaf in module._buffers]
            for leaf in leaves:
                if path.endswith(".kv_b_proj") and layout.architecture == "deepseek2":
                    yield from _kv_b(layout.name(f"{path}.{leaf}"), module, config)
                elif path.endswith((".shared_mlp.input_linear", ".in_proj_qkvz")):
                    yield from _rows(layout.name(f"{path}.{leaf}"), module, config)
                else:
                    yield _parameter(f"{path}.{leaf}", module, leaf, layout, config)
    if layout.model_type == "gemma2" and not _is_tied(model):
        raise ValueError("llama.cpp's gemma2 has no output of its own: lm_head must be the embedding")


def _is_tied(model):
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if isinstance(embedding, QuantizedEmbedding) and isinstance(head, QuantizedLinear):
        return embedding.type == head.type and torch.equal(embedding.packed, head.packed)
    if isinstance(embedding, QuantizedEmbedding) or isinstance(head, QuantizedLinear):
        return False
    return head.weight is embedding.weight or torch.equal(head.weight, embedding.weight)


def _parameter(parameter, module, leaf, layout, config):
    name = layout.name(parameter)
    if name is None:
        raise ValueError(f"{layout.architecture} files have no place for {parameter}")
    heads, shift = layout.rotated(parameter, config), layout.shifted(parameter)
    factor = _state_spaces.multiplier(parameter, config)
    if leaf == "weight" and isinstance(module, QuantizedLinear | QuantizedEmbedding):
        packed, type = module.packed, module.type
        if isinstance(factor, Tensor) or factor != 1:
            raise ValueError(f"{parameter} is packed, and {layout.architecture} files have it times a multiplier")
        shape = (packed.shape[0], packed.shape[1] // type.nbytes * type.block)
        if name.endswith("gate_inp_shexp.weight"):
            return _Tensor(name, type_of("F32"), shape[1:], lambda: dequantize(packed, type)[0])
        return _Tensor(name, type, shape, lambda: packed if heads is None else to_interleaved(packed, heads))
    value = getattr(module, leaf)
    linear = isinstance(module, torch.nn.Linear | torch.nn.Embedding) and leaf == "weight"
    kept = linear and not name.endswith("gate_inp_shexp.weight")
    if value.dtype not in _NAMES:
        raise ValueError(f"{parameter} is of {value.dtype}, and GGUF files have {', '.join(_NAMES.values())}")
    shape = tuple(value.shape) if kept or value.dim() == 1 else tuple(n for n in value.shape if n != 1)
    shape = _state_spaces.file_shape(parameter, shape, config)
    stored = _state_spaces.STORED.get(leaf)

    def numbers():
        rows = value if heads is None else to_interleaved(value, heads)
        rows = rows.float() + shift if shift else rows
        rows = stored[0](rows) if stored else rows
        if isinstance(factor, Tensor) or factor != 1:
            rows = (rows * (factor.to(rows.device) if isinstance(factor, Tensor) else factor)).to(rows.dtype)
        return rows.reshape(shape)

    return _Tensor(name, type_of(_NAMES[value.dtype] if kept else "F32"), shape, numbers)


def _kv_b(name, module, config):
    """Yields DeepSeek's keys and values of all heads, as numbers: rows of the one lie across those of the other."""
    packed = isinstance(module, QuantizedLinear)
    type = "F32" if packed else _NAMES[module.weight.dtype]
    rows, length, heads = module.out_features, module.in_features, config.num_attention_heads
    nope = config.qk_nope_head_dim
    shapes = (heads, length, nope), (heads, rows // heads - nope, length)
    for number, (one, shape) in enumerate(zip(sources(name, ()), shapes)):

        def numbers(number=number):
            weight = dequantize(module.packed, module.type) if packed else module.weight
            return divided(weight, config)[number]

        yield _Tensor(one, type_of(type), shape, numbers)


def _rows(name, module, config):
    """Yields the two tensors of a Linear's rows: halves, or Qwen3-Next's gates apart."""
    packed = isinstance(module, QuantizedLinear)
    value = module.packed if packed else module.weight
    type = module.type if packed else type_of(_NAMES[value.dtype])
    order = _state_spaces.row_order(name, config)
    count, length = module.out_features, module.in_features
    gates = count // 2 if order is None else config.linear_num_value_heads * config.linear_value_head_dim
    for one, begin, end in zip(_state_spaces.sources(name, ()), (0, count - gates), (count - gates, count)):

        def rows(begin=begin, end=end):
            return value[begin:end] if order is None else value[order[begin:end].to(value.device)]

        yield _Tensor(one, type, (end - begin, length), rows)


def _experts(path, module, layout):
    prefix = path.replace("model.layers.", "blk.").removesuffix(f".{layout.experts}") + ".ffn_"
    if isinstance(module, QuantizedExperts):
        for part, type in zip(module.parts, module.types):
            packed = getattr(module, part)
            shape = (*packed.shape[:2], packed.shape[2] // type.nbytes * type.block)
            yield _Tensor(f"{prefix}{part}_exps.weight", type, shape, lambda packed=packed: packed)
            bias = getattr(module, f"{part}_bias")
            if bias is not None:
                name = f"{prefix}{part}_exps.bias"
                yield _Tensor(name, type_of("F32"), tuple(bias.shape), lambda bias=bias: bias)
        return
    for name, leaf, split in _FLOAT_EXPERTS.get(layout.model_type, _FLOAT_EXPERTS["others"]):
        value = getattr(module, leaf)
        type = "F32" if leaf.endswith("_bias") else _NAMES[value.dtype]
        shape = tuple(split(value).shape)
        yield _Tensor(f"{prefix}{name}", type_of(type), shape, lambda value=value, split=split: split(value))


# By transformers' name of a model, GGUF's tensor, transformers' parameter, and how the one is taken from the other.
_FLOAT_EXPERTS = {
    "others": (
        ("gate_exps.weight", "gate_up_proj", lambda both: both.chunk(2, 1)[0]),
        ("up_exps.weight", "gate_up_proj", lambda both: both.chunk(2, 1)[1]),
        ("down_exps.weight", "down_proj", lambda down: down),
    ),
    "nemotron_h": (
        ("up_exps.weight", "up_proj", lambda up: up),
        ("down_exps.weight", "down_proj", lambda down: down),
    ),
    "gpt_oss": (
        ("gate_exps.weight", "gate_up_proj", lambda both: both.mT[:, ::2]),
        ("up_exps.weight", "gate_up_proj", lambda both: both.mT[:, 1::2]),
        ("down_exps.weight", "down_proj", lambda down: down.mT),
        ("gate_exps.bias", "gate_up_proj_bias", lambda both: both[:, ::2]),
        ("up_exps.bias", "gate_up_proj_bias", lambda both: both[:, 1::2]),
        ("down_exps.bias", "down_proj_bias", lambda down: down),
    ),
}
