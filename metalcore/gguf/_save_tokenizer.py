"""Tokenizers of transformers as keys of GGUF files."""

from __future__ import annotations

import json
from typing import Any

from ._tokenizer import mapping

__all__ = ["tokenizer_keys"]

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6


def tokenizer_keys(tokenizer: Any, rows: int) -> dict[str, Any]:
    """Returns keys of a fast tokenizer, with as many tokens as the model has rows of embeddings.

    Raises:
        ValueError: it is no BPE, or llama.cpp has no name for how it splits texts, or it has more tokens than rows.
        ImportError: it splits texts by a pattern, and transformers is older than 5.18, which has the patterns' names.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(f"{type(tokenizer).__name__} is no fast tokenizer")
    parts = json.loads(backend.to_str())
    if parts["model"]["type"] != "BPE":
        raise ValueError(f"a tokenizer of type {parts['model']['type']} cannot be written; BPE can")
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in parts["model"]["merges"]]
    tokens, kinds = _vocabulary(parts, rows)
    keys: dict[str, Any] = {"tokenizer.ggml.tokens": tokens}
    if _uses(parts, "ByteLevel"):
        keys["tokenizer.ggml.model"], keys["tokenizer.ggml.pre"] = "gpt2", _split(parts)
        keys["tokenizer.ggml.merges"] = merges
    else:
        # llama.cpp joins the pair whose result has the highest score, BPE the pair that was learned first.
        ranks: dict[str, int] = {}
        for rank, pair in enumerate(merges):
            ranks.setdefault(pair.replace(" ", ""), rank)
        kinds = [_spelled(token, kind, tokenizer.unk_token) for token, kind in zip(tokens, kinds)]
        keys["tokenizer.ggml.model"], keys["tokenizer.ggml.pre"] = "llama", "default"
        keys["tokenizer.ggml.scores"] = [-float(ranks.get(token, len(merges))) for token in tokens]
        keys["tokenizer.ggml.add_space_prefix"] = "▁" in backend.encode("a", add_special_tokens=False).tokens[0]
    keys["tokenizer.ggml.token_type"] = kinds
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        number = getattr(tokenizer, f"{name}_token_id", None)
        if number is not None:
            keys[f"tokenizer.ggml.{key}_token_id"] = number
    added = tokenizer("a")["input_ids"]
    keys["tokenizer.ggml.add_bos_token"] = tokenizer.bos_token_id is not None and added[:1] == [tokenizer.bos_token_id]
    keys["tokenizer.ggml.add_eos_token"] = tokenizer.eos_token_id is not None and added[-1:] == [tokenizer.eos_token_id]
    if isinstance(tokenizer.chat_template, str):
        keys["tokenizer.chat_template"] = tokenizer.chat_template
    return keys


def _vocabulary(parts, rows):
    """Returns tokens by number, and their kinds. Rows without a token are unused ones."""
    known = {number: (token, _NORMAL) for token, number in parts["model"]["vocab"].items()}
    for added in parts["added_tokens"]:
        known[added["id"]] = added["content"], _CONTROL if added["special"] else _USER_DEFINED
    if max(known) >= rows:
        raise ValueError(f"the tokenizer has tokens up to {max(known)}, and the model {rows} rows")
    every = [known.get(number, (f"[PAD{number}]", _UNUSED)) for number in range(rows)]
    return [token for token, _ in every], [kind for _, kind in every]


def _spelled(token, kind, unknown):
    if token == unknown:
        return _UNKNOWN
    is_byte = kind == _NORMAL and len(token) == 6 and token.startswith("<0x") and token.endswith(">")
    return _BYTE if is_byte else kind


def _uses(parts, kind):
    steps = parts["pre_tokenizer"] or {}
    return any(step.get("type") == kind for step in [steps, *steps.get("pretokenizers", [])])


def _split(parts):
    """Returns llama.cpp's name of the pattern by which texts are split."""
    steps = parts["pre_tokenizer"]
    for step in [steps, *steps.get("pretokenizers", [])]:
        if step["type"] == "ByteLevel" and step.get("use_regex"):
            return "gpt-2"
        if step["type"] == "Split":
            pattern = step["pattern"].get("Regex")
            known = mapping().GGUF_PRE_TOKENIZER_SPLITS
            name = next((name for name, regex in known.items() if regex == pattern), None)
            if name is None:
                raise ValueError(f"llama.cpp's name for texts that are split by {pattern!r} is unknown")
            return name
    raise ValueError("llama.cpp's name for texts that are not split is unknown")
