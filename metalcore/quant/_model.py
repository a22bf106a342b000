"""quantize_model: the weights of a model's linear layers, embeddings and experts, packed in place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ._pack import largest_of, not_held
from ._plan import Report, plan, replace_modules

__all__ = ["quantize_model"]


def quantize_model(
    model: torch.nn.Module,
    mixture: str = "q4_k_m",
    *,
    skip: Iterable[str] = (),
    types: Mapping[str, Any] | None = None,
) -> Report:
    """Packs the weights of a model in place: of its linear layers, its embedding, and its experts.

    torch.nn.Linear and transformers' Conv1D become metalcore.nn.QuantizedLinear, embeddings QuantizedEmbedding, and
    transformers' modules of experts with SiLU gates QuantizedExperts. Norms, biases, position embeddings and the layers
    that choose experts stay as they are. One module after the other is packed, on the device where it is, and gives its
    memory back before the next. Where transformers is imported, its progress bar shows how far that is.

    Args:
        model: of transformers, or any module.
        mixture: llama.cpp's name of a mixture of types: q4_0, q4_1, q5_0, q5_1, q8_0, q2_k, q2_k_s, q3_k_s, q3_k_m,
            q3_k_l, q4_k_s, q4_k_m, q5_k_s, q5_k_m, q6_k, iq4_nl, iq4_xs or mxfp4_moe. Its rules are llama.cpp's:
            values' weights and the FFN's last ones have more bits in some layers, and so has the output; rows that a
            type's blocks do not divide have another type.
        skip: regular expressions; modules in whose name one is found stay as they are.
        types: GGML's types by regular expressions, which come before the mixture: {"lm_head": "Q8_0"}.

    Returns:
        What was packed and what was not. A model of transformers can be saved by save_pretrained, and loaded by
        from_pretrained (see metalcore.integrations.transformers.MetalcoreConfig).

    Raises:
        ValueError: there is no such mixture or type, the type of `types` does not fit, a pattern is no regular
            expression, or a weight has numbers that `quantize` refuses. The model is as it was then.
        TypeError: model is no torch.nn.Module, or one that is packed as a whole, such as a torch.nn.Linear.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(256, 8))
        >>> metalcore.quantize_model(model, "q8_0").types
        {'0': ['Q8_0']}
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"quantize_model: model must be a torch.nn.Module, not {type(model).__name__}")
    chosen = plan(model, mixture, skip, types)
    if isinstance(chosen.get(""), tuple):
        raise TypeError(f"quantize_model: nothing holds this {type(model).__name__}, which another is to replace")
    _require_finite(model, chosen)
    report = replace_modules(model, chosen, pack=True)
    if report.types and hasattr(model, "config") and hasattr(model, "save_pretrained"):
        from ._transformers import note

        note(model, report.types, mixture)
    return report


def _require_finite(model, chosen):
    """Raises a ValueError before anything is packed."""
    for name, types in chosen.items():
        if isinstance(types, str):
            continue
        for leaf, weight in model.get_submodule(name).named_parameters(recurse=False):
            if leaf.endswith("bias") or weight.is_meta:
                continue
            largest = largest_of(weight)
            for type in types:
                if wrong := not_held(largest, type):
                    raise ValueError(
                        f"quantize_model: {name}.{leaf} has {wrong}, which blocks of {type.name} cannot hold"
                    )
