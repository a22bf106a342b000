"""The tokenizer of a GGUF file, by transformers' own mapping."""

from __future__ import annotations

import json
import warnings
from typing import Any

from ._reader import GGUFFile

__all__ = ["tokenizer_of"]

# transformers' names of what its converter takes, as of 5.23.
_TAKEN = {
    "ggml.model": "tokenizer_type",
    "ggml.pre": "pre_tokenizer_type",
    "ggml.tokens": "tokens",
    "ggml.scores": "scores",
    "ggml.token_type": "token_type",
    "ggml.merges": "merges",
    "ggml.bos_token_id": "bos_token_id",
    "ggml.eos_token_id": "eos_token_id",
    "ggml.unknown_token_id": "unk_token_id",
    "ggml.padding_token_id": "pad_token_id",
    "ggml.add_space_prefix": "add_prefix_space",
}
_SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


def tokenizer_of(file: GGUFFile) -> Any:
    """transformers' tokenizer of a file, or None if the file has none. One that transformers cannot make is None too,
    with a warning that says why."""
    kind = file.metadata.get("tokenizer.ggml.model")
    if kind in (None, "none", "no_vocab") or "tokenizer.ggml.tokens" not in file.metadata:
        return None
    try:
        return _made(file)
    except Exception as error:  # transformers and tokenizers raise what they like for vocabularies they cannot take
        warnings.warn(f"{file.path}: transformers makes no tokenizer of type {kind!r}: {error}", stacklevel=3)
        return None


def _made(file):
    from transformers import PreTrainedTokenizerFast

    metadata = file.metadata
    parts = {name: metadata[f"tokenizer.{key}"] for key, name in _TAKEN.items() if f"tokenizer.{key}" in metadata}
    parts.update({name: list(parts[name]) for name in ("scores", "token_type") if name in parts})
    backend, more = _converter()(metadata["general.architecture"], parts)
    backend, options = _without_more(backend, len(parts["tokens"])), dict(more)
    for name, key in _SPECIAL.items():
        token = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token is not None:
            options[f"{name}_token"] = parts["tokens"][token]
    if "tokenizer.chat_template" in metadata:
        options["chat_template"] = metadata["tokenizer.chat_template"]
    # llama.cpp puts the first token in front of texts of SentencePiece's vocabularies, where a file does not say.
    options["add_bos_token"] = metadata.get("tokenizer.ggml.add_bos_token", parts["tokenizer_type"] == "llama")
    options["add_eos_token"] = metadata.get("tokenizer.ggml.add_eos_token", False)
    return PreTrainedTokenizerFast(tokenizer_object=backend, **options)


def _without_more(backend, count):
    """Without the special tokens that transformers' classes add to vocabularies that lack them: models have no rows
    for those."""
    from tokenizers import Tokenizer

    if backend.get_vocab_size() <= count:
        return backend
    parts = json.loads(backend.to_str())
    parts["added_tokens"] = [token for token in parts["added_tokens"] if token["id"] < count]
    return Tokenizer.from_str(json.dumps(parts))


def _converter():
    try:
        from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer
    except ImportError:  # before transformers 5.20
        from transformers.integrations.ggml import convert_gguf_tokenizer  # pyright: ignore[reportAttributeAccessIssue]
    return convert_gguf_tokenizer
