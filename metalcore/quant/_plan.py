"""What is to become of a model's linear layers, embeddings and experts, and how that is carried out: modules with
packed weights take the place of others."""

from __future__ import annotations

import re
import sys
import weakref
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._experts import QuantizedExperts, clamped_swiglu
from ._layers import QuantizedEmbedding, QuantizedLinear, TiedLinear
from ._mixtures import MIXTURES, Weight, type_in
from ._modules import is_columns, kind_of, layer_of, reason_to_keep, role_of, rows_of_module, shape_of
from ._pack import quantize
from ._types import KERNELS, Type, type_of

__all__ = ["Plan", "Report", "embedding_of", "packed_module", "packed_weight", "patterns", "plan", "replace_modules"]


class Packed(NamedTuple):
    """A module of a report.

    Attributes:
        name: the module's.
        types: names of GGML's types: one, or three of experts (gate, up, down), or none if it stays as it is.
        before, after: the bytes of its weights.
        reason: why it stays as it is.
    """

    name: str
    types: tuple[str, ...]
    before: int
    after: int
    reason: str = ""


class Report(NamedTuple):
    """The report of `quantize_model` about what it did.

    Attributes:
        rows: a `Packed` for each module with weights that could be packed.

    Example:
        >>> report = metalcore.quantize_model(torch.nn.Sequential(torch.nn.Linear(256, 8)), "q8_0")
        >>> report.rows[0].before, report.rows[0].after
        (8192, 2176)
    """

    rows: tuple[Packed, ...]

    @property
    def types(self) -> dict[str, list[str]]:
        """The types of each packed module, by its name."""
        return {row.name: list(row.types) for row in self.rows if row.types}

    def __str__(self) -> str:
        counts: dict[str, int] = {}
        for row in self.rows:
            for type in row.types:
                counts[type] = counts.get(type, 0) + 1
        packed = [row for row in self.rows if row.types]
        before, after = sum(row.before for row in packed), sum(row.after for row in packed)
        lines = [
            f"{sum(counts.values())} weights packed: {before / 1e6:.1f} MB became {after / 1e6:.1f} MB ("
            + ", ".join(f"{count} {type}" for type, count in sorted(counts.items()))
            + ")"
        ]
        lines += [f"{row.name} stays as it is: {row.reason}" for row in self.rows if not row.types]
        return "\n".join(lines)


def patterns(function: str, skip: Iterable[str], types: Mapping[str, Any] | None):
    """Returns `skip` and `types` with their regular expressions compiled, and GGML's types."""
    if types is not None and not isinstance(types, Mapping):
        raise TypeError(f"{function}: types must be a mapping of patterns to GGML's types, not {type(types).__name__}")

    def compiled(pattern):
        try:
            return re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{function}: {pattern!r} is no regular expression: {error}") from None

    skipped = [compiled(one) for one in ([skip] if isinstance(skip, str) else skip)]
    return skipped, {compiled(pattern): type_of(of) for pattern, of in (types or {}).items()}


Plan = dict[str, "tuple[Type, ...] | str"]  # a module's types, or why it stays as it is


def plan(model: torch.nn.Module, mixture: str, skip: Iterable[str], types: Mapping[str, Any] | None) -> Plan:
    """Returns what is to become of each module, in the model's order."""
    if not isinstance(mixture, str) or mixture.lower() not in MIXTURES:
        raise ValueError(f"quantize_model: there is no mixture {mixture!r}; there are {', '.join(MIXTURES)}")
    skipped, types_by_pattern = patterns("quantize_model", skip, types)
    output, embedding = embedding_of(model, "output"), embedding_of(model, "input")
    modules = dict(model.named_modules())
    places, ties = _places(model), _ties(model)
    tied = output is not None and embedding is not None and _one_weight(output, embedding, places, ties)
    candidates = {name: module for name, module in modules.items() if kind_of(module)}
    roles = {
        name: "output" if module is output else "embedding" if module is embedding else role_of(name)
        for name, module in candidates.items()
    }
    whole = set(getattr(model, "_keep_in_fp32_modules", None) or ())  # parts of names, of a model of transformers
    shape = shape_of(model, sum(role == "v" for role in roles.values()), tied)
    result: Plan = {}
    explicit: set[str] = set()  # modules whose types the caller gives
    values = 0
    for name, module in candidates.items():
        names = places[module]
        parents = [model.get_submodule(place.rpartition(".")[0]) for place in names]
        reason = reason_to_keep(module, roles[name], names, parents, skipped, whole)
        chosen = next((type for pattern, type in types_by_pattern.items() if any(map(pattern.search, names))), None)
        layer = layer_of(name)
        if roles[name] == "v":
            layer, values = values, values + 1
        if reason is not None:
            result[name] = reason
            continue
        if chosen is not None:
            explicit.add(name)
        parts = []
        for role, length in rows_of_module(module, roles[name]):
            weight = Weight(role, length, layer, kind_of(module) == "experts")
            parts.append(type_in(mixture.lower(), weight, shape) if chosen is None else chosen)
            if chosen is not None and (length % chosen.block or chosen.name not in KERNELS):
                raise ValueError(f"quantize_model: {name} with rows of {length} cannot have the type {chosen.name}")
        result[name] = (
            f"no blocks divide its rows of {rows_of_module(module, '')[0][1]}" if None in parts else tuple(parts)  # pyright: ignore
        )
    for source, module in candidates.items():
        for target, other in candidates.items() if kind_of(module) == "embedding" else ():
            if other is not module and _one_weight(other, module, places, ties):
                _alike(result, source, target, explicit, tied and other is output)
    return result


def embedding_of(model: torch.nn.Module, kind: str) -> torch.nn.Module | None:
    """Returns the "input" or "output" embedding of a model of transformers, or None. A model of audio raises for the
    first."""
    try:
        return getattr(model, f"get_{kind}_embeddings", lambda: None)()
    except NotImplementedError:
        return None


def _places(model):
    """Returns all names of each module: one may stand at several places."""
    places: dict[torch.nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        places.setdefault(module, []).append(name)
    return places


def _one_weight(module, embedding, places, ties):
    """Returns whether a module has an embedding's weight, or will have it."""
    if getattr(module, "weight", 0) is getattr(embedding, "weight", 1):
        return True
    return any(ties.get(name) in places.get(embedding, ()) for name in places.get(module, ()))


def _alike(result, source, target, explicit, is_output):
    """Gives one weight of two modules one type: the embedding's, unless the caller gives that of the other module."""
    first, second = result[source], result[target]
    if isinstance(first, str) or isinstance(second, str):
        if is_output:  # neither is packed
            result[source] = result[target] = first if isinstance(first, str) else second
    elif target not in explicit:
        result[target] = first
    elif source not in explicit or first == second:
        result[source] = second
    else:
        raise ValueError(
            f"quantize_model: {source} and {target} are one weight, and cannot have the types {first[0].name} and "
            f"{second[0].name}"
        )


def _ties(model) -> dict[str, str]:
    """Returns which modules of a model of transformers are to have the weights of which others. A model without memory
    has not tied them yet."""
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    return {target.rpartition(".")[0]: source.rpartition(".")[0] for target, source in tied.items()}


def replace_modules(model: torch.nn.Module, plan: Plan, *, pack: bool, dtype: torch.dtype | None = None) -> Report:
    """Carries a plan out, and keeps no module that has been replaced. Without `pack` the new modules have their
    memory's sizes, and not the weights. Weights that are packed already were numbers of `dtype`."""
    rows, embeddings, places = [], [], _places(model)
    tied = {} if pack else _ties(model)
    entries = sorted(plan.items(), key=lambda entry: not _is_embedding(model, entry[0]))
    for name, types in _with_progress(entries) if pack else entries:
        module = model.get_submodule(name)
        weights = [p for leaf, p in module.named_parameters(recurse=False) if not leaf.endswith("bias")]
        before = sum(weight.nbytes for weight in weights)
        if isinstance(types, str):
            rows.append(Packed(name, (), before, before, types))
            continue
        shared = next(
            (layer for one, weight, layer in embeddings if weight() is weights[0] or tied.get(name) == one), None
        )
        new = packed_module(module, types, pack, shared, None if weights[0].is_floating_point() else dtype)
        if _is_embedding(model, name):
            embeddings.append((name, weakref.ref(weights[0]), new))
        _carry_over(module, new)
        for place in places.pop(module):
            model.set_submodule(place, new)
        after = sum(buffer.nbytes for buffer in new.buffers(recurse=False))
        rows.append(Packed(name, tuple(type.name for type in types), before if shared is None else 0, after))
    untie(model, [row.name for row in rows if row.types])
    return Report(tuple(rows))


def _with_progress(entries):
    """Returns the entries, with transformers' progress bar where transformers is loaded and shows one."""
    if "transformers" not in sys.modules:
        return entries
    from transformers.utils import logging

    return logging.tqdm(entries, desc="Packing weights", unit=" modules")


_HOOKS = (
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks", "_forward_hooks_with_kwargs"),
    *("_forward_hooks_always_called", "_backward_pre_hooks", "_backward_hooks", "_is_full_backward_hook"),
)


def _carry_over(module, new):
    """Gives a module's hooks to the one in its place: the same dictionaries, from which handles remove them."""
    new.__dict__.update({name: module.__dict__[name] for name in _HOOKS})
    new.training = module.training


def _is_embedding(model, name):
    return isinstance(model.get_submodule(name), torch.nn.Embedding)


def untie(model, packed):
    """Removes packed weights from transformers' ties, which are of parameters alone. Their modules tie them."""
    tied = getattr(model, "all_tied_weights_keys", None)
    if tied:
        left = {target: source for target, source in tied.items() if target.rpartition(".")[0] not in packed}
        model._tied_weights_keys = model.all_tied_weights_keys = left


def packed_weight(module: Any, leaf: str, numbers: Tensor, types: tuple[Type, ...]) -> Tensor:
    """Returns the numbers of a module's parameter, packed, in rows. Experts' gate and up, which are one parameter, have
    one type."""
    type = types[-1] if leaf == "down_proj" else types[0]
    return quantize(numbers.T if is_columns(module) else numbers, type)


def packed_module(
    module: Any,
    types: tuple[Type, ...],
    pack: bool,
    shared: QuantizedEmbedding | None = None,
    dtype: torch.dtype | None = None,
) -> torch.nn.Module:
    """Returns a module that computes what the given one does, with packed weights.

    Args:
        module: torch.nn.Linear, torch.nn.Embedding, transformers' Conv1D, or a module of experts with the parameters
            gate_up_proj, or up_proj where there are no gates, and down_proj. Its weights are numbers, or uint8 as
            `packed_weight` makes them.
        types: of its weight, or of gate, up and down, or of up and down.
        pack: whether to pack the weights; or else new ones have no numbers yet.
        shared: an embedding that has packed the same weight already.
        dtype: of the numbers, and of an embedding's result, by default that of the module's weight.
    """
    if hasattr(module, "gate_up_proj") or isinstance(getattr(module, "up_proj", None), Tensor):
        return _experts(module, types, pack)
    if shared is not None:
        return TiedLinear(shared, module.bias)
    weight = module.weight.T if is_columns(module) and _is_numbers(module.weight) else module.weight
    rows, length = weight.shape
    if not _is_numbers(weight):
        length = length // types[0].nbytes * types[0].block
    dtype = dtype or weight.dtype
    if isinstance(module, torch.nn.Embedding):
        scale = float(getattr(module, "scalar_embed_scale", 1.0))
        layer = QuantizedEmbedding(rows, length, types[0], device="meta", dtype=dtype, scale=scale)
    else:
        layer = QuantizedLinear(length, rows, types[0], bias=False, device="meta", dtype=dtype)
        layer.bias = module.bias
    layer.packed = _packed(weight, types[0]) if pack else torch.empty_like(layer.packed, device=weight.device)
    return layer


def _is_numbers(weight):
    return weight.is_floating_point()


def _packed(weight, type):
    return quantize(weight, type) if _is_numbers(weight) else weight.detach().contiguous()


def _experts(module, types, pack):
    """Returns packed experts. gpt-oss has biases, and columns in turns, which are not packed here."""
    gated = hasattr(module, "gate_up_proj")
    up, down = module.gate_up_proj if gated else module.up_proj, module.down_proj
    clamped = hasattr(module, "gate_up_proj_bias")
    experts, hidden, width = down.shape if not clamped else (down.shape[0], down.shape[2], down.shape[1])
    if not _is_numbers(down):
        width = width // types[-1].nbytes * types[-1].block
    options: dict[str, Any] = {"activation": clamped_swiglu, "bias": True, "dtype": down.dtype} if clamped else {}
    if not gated:
        options["activation"] = module.act_fn
    replacement = QuantizedExperts(experts, hidden, width, list(types), device="meta" if pack else up.device, **options)
    if pack:
        for part, weight, type in zip(replacement.parts, (*up.chunk(2 if gated else 1, 1), down), types):
            setattr(replacement, part, _packed(weight, type))
    return replacement
