"""Keys of GGUF files that change a model's results, and that its layout takes with one value alone.

Source: what llama.cpp reads for these architectures (load_hparams and load_arch_hparams in src/llama-model.cpp and
src/models). What it reads and metalcore too is not here, nor what it only prints.
"""

from __future__ import annotations

import array
from typing import Any

from . import _deepseek, _gemma4
from ._metadata import Metadata
from ._reader import GGUFError

__all__ = ["REFUSED", "check_keys", "unread"]

# Values that change nothing, by key. A file with another one is refused.
REFUSED: dict[str, tuple[Any, ...]] = {
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.scale": (0,),
    "attention.temperature_scale": (0,),
    "embedding_scale": (0, 1),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_weights_scale": (0, 1),
    "leading_dense_block_count": (0,),
    "logit_scale": (0, 1),
    "nextn_predict_layers": (0,),
    "residual_scale": (0, 1),
    "rope.dimension_sections": (),
    "rope.scaling.alpha": (0, 1),
    "rope.scaling.yarn_attn_factor": (1,),
    "rope.scaling.yarn_ext_factor": (-1, 1),
    "rope.scaling.yarn_log_multiplier": (0,),
    "swiglu_clamp_exp": (),
    "swiglu_clamp_shexp": (),
    "use_parallel_residual": (False,),
}
# Keys with a value for layers with a window, which must be that of all layers: the key of this and its default.
_OF_WINDOWS = {
    "attention.key_length_swa": "head_dim",
    "attention.value_length_swa": "head_dim",
    "rope.dimension_count_swa": "head_dim",
    "embedding_length_out": "hidden_size",
}
_TOKENIZER = ("ggml.add_bos_token", "ggml.add_eos_token", "ggml.eot_token_id", "chat_template")


def check_keys(metadata: Metadata, model_type: str, fields: dict[str, Any]) -> None:
    """Checks that a file's settings are those that its layout has.

    Args:
        fields: of transformers' configuration.

    Raises:
        GGUFError: one is another; the message names it.
    """
    deepseek = model_type.startswith("deepseek")
    honoured = _deepseek.HONOURED if deepseek else ()
    expected: dict[str, tuple[Any, ...]] = {key: values for key, values in REFUSED.items() if key not in honoured}
    expected.update({key: (fields[name],) for key, name in _OF_WINDOWS.items()})
    expected["expert_gating_func"] = (0, 3) if model_type == "gpt_oss" else (0, 1)  # softmax
    if "norm_topk_prob" in fields or model_type == "mixtral":
        expected["expert_weights_norm"] = (fields.get("norm_topk_prob", True),)
    if model_type != "phi3":  # transformers rotates whole heads of the others, and llama.cpp refuses llama's
        expected["rope.dimension_count"] = (fields["head_dim"],)
    if model_type not in ("gemma3_text", "gemma4_text"):
        expected["rope.freq_base_swa"] = (fields["rope_parameters"]["rope_theta"],)
    if deepseek:
        expected.update(_deepseek.expected(model_type))
    if model_type == "gemma4_text":
        expected.update(_gemma4.expected(fields))
    for key, values in expected.items():
        value = metadata.get(key, (int, float, bool, list, array.array))
        if value is not None and value not in values:
            text = " or ".join(map(str, values)) or "nothing"
            raise GGUFError(
                f"{metadata.file.path}: key '{metadata.architecture}.{key}': {value!r} cannot be loaded for "
                f"{model_type}, which has {text}"
            )


def unread(metadata: Metadata, tokenizer: tuple[str, ...]) -> list[str]:
    """Returns the keys of a file's architecture and tokenizer that nothing has read, in their order; `tokenizer` are
    those that a tokenizer is made of."""
    known = metadata.file.read | {f"tokenizer.{key}" for key in (*tokenizer, *_TOKENIZER)}
    return [key for key in metadata.file.metadata if not key.startswith(("general.", "split.")) and key not in known]
