"""Tokenizers: a GGUF file's, by transformers' own mapping, and one of transformers as keys of a file."""

from __future__ import annotations

import array
import json
import warnings
from importlib import import_module
from typing import Any

from .._core.environment import require_transformers
from ._metadata import Metadata
from ._reader import GGUFError, GGUFFile

__all__ = ["TAKEN", "mapping", "tokenizer_keys", "tokenizer_of"]

# transformers' names of what its converter takes, as of 5.23.
TAKEN = {
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


def mapping() -> Any:
    """Returns transformers' module for vocabularies of GGUF files. Releases before 5.18 chose a vocabulary's kind and
    its split by the model's architecture, and so read Llama 3's as GPT-2's.

    Raises:
        ImportError: transformers is older.
    """
    require_transformers("the tokenizer", (5, 18))
    return import_module("transformers.integrations.gguf.gguf_tokenizer_mapping")


def tokenizer_of(file: GGUFFile) -> Any:
    """Returns transformers' tokenizer of a file, or None if the file has none. One that transformers cannot make is
    None too, with a warning that says why.

    Raises:
        GGUFError: the vocabulary contradicts itself, or the model has too few rows for it.
    """
    metadata = Metadata(file)
    kind = metadata.of_file("tokenizer.ggml.model", str)
    if kind in (None, "none", "no_vocab") or "tokenizer.ggml.tokens" not in file.metadata:
        return None
    parts, options = _parts(metadata), _options(metadata, kind)
    try:
        return _build(metadata, parts, options)
    except Exception as error:  # transformers and tokenizers raise what they like for vocabularies they cannot take
        reason = str(error) if isinstance(error, (ValueError, ImportError)) else f"{type(error).__name__}: {error}"
        warnings.warn(f"{file.path}: transformers makes no tokenizer of type {kind!r}: {reason}", stacklevel=3)
        return None


def _parts(metadata):
    """Returns what transformers' converter takes, checked."""
    file = metadata.file
    fields = {name: file.metadata.get(f"tokenizer.{key}") for key, name in TAKEN.items()}
    parts = {name: value for name, value in fields.items() if value is not None}
    tokens, rows = _texts(metadata, "tokens"), file.tensors["token_embd.weight"].shape[0]
    if len(tokens) > rows:
        _fail(file, "tokens", f"{len(tokens)} tokens, and the model has rows for {rows}")
    for name in ("scores", "token_type"):
        values = metadata.of_file(f"tokenizer.ggml.{name}", array.array)
        if values is not None and len(values) != len(tokens):
            _fail(file, name, f"{len(values)} numbers for {len(tokens)} tokens")
        if values is not None:
            parts[name] = list(values)
    for pair in _texts(metadata, "merges"):
        if len(pair.split(" ")) != 2:
            _fail(file, "merges", f"{pair!r} is no pair of tokens")
    if parts["tokenizer_type"] == "gpt2" and "merges" not in parts:
        _fail(file, "merges", "it is missing")
    return parts


def _texts(metadata, name):
    values = metadata.of_file(f"tokenizer.ggml.{name}", list, [])
    if not all(isinstance(value, str) for value in values):
        _fail(metadata.file, name, "it is no list of texts")
    return values


def _fail(file, name, reason):
    raise GGUFError(f"{file.path}: key 'tokenizer.ggml.{name}': {reason}")


def _options(metadata, kind):
    """Returns options of PreTrainedTokenizerFast, except for its special tokens."""
    # llama.cpp puts the first token in front of texts of SentencePiece's vocabularies, where a file does not say.
    options = {
        "add_bos_token": metadata.of_file("tokenizer.ggml.add_bos_token", bool, kind == "llama"),
        "add_eos_token": metadata.of_file("tokenizer.ggml.add_eos_token", bool, False),
    }
    template = metadata.of_file("tokenizer.chat_template", str)
    return options if template is None else {**options, "chat_template": template}


def _build(metadata, parts, options):
    from transformers import PreTrainedTokenizerFast

    for name, key in _SPECIAL.items():
        token = metadata.token(key)
        if token is not None and token < len(parts["tokens"]):
            options[f"{name}_token"] = parts["tokens"][token]
    backend, more = mapping().convert_gguf_tokenizer(metadata.architecture, parts)
    backend = _without_more(backend, len(parts["tokens"]))
    if "add_prefix_space" in parts and parts["tokenizer_type"] == "llama":
        backend = _with_prefix(backend, metadata.of_file("tokenizer.ggml.add_space_prefix", bool))
    _check_split(metadata.file, parts)
    return PreTrainedTokenizerFast(tokenizer_object=backend, **more, **options)


def _check_split(file, parts):
    """Warns where texts of a byte-level vocabulary may be split otherwise than by llama.cpp."""
    name = parts.get("pre_tokenizer_type", "default")
    if parts["tokenizer_type"] != "gpt2" or name in ("default", "gpt-2"):
        return
    if name not in mapping().GGUF_PRE_TOKENIZER_SPLITS:
        warnings.warn(
            f"{file.path}: transformers does not know how {name!r} splits texts, and splits them as GPT-2 does",
            stacklevel=5,
        )


def _with_prefix(backend, wanted):
    """Returns the tokenizer with a space in front of texts or without one, as the file says; transformers' classes
    do not ask."""
    from tokenizers import Tokenizer

    if ("▁" in backend.encode("a", add_special_tokens=False).tokens[0]) == wanted:
        return backend
    parts = json.loads(backend.to_str())
    for name, list_name in (("normalizer", "normalizers"), ("pre_tokenizer", "pretokenizers"), ("decoder", "decoders")):
        whole = parts[name] or {"type": "Sequence", list_name: []}
        steps = whole[list_name] if whole["type"] == "Sequence" else [whole]
        steps = [step for step in steps if step["type"] not in ("Prepend", "Strip")]
        for step in steps:
            if step["type"] == "Metaspace":
                step["prepend_scheme"] = "first" if wanted else "never"
        if wanted and not any(step["type"] == "Metaspace" for step in steps):
            steps = {
                "normalizer": [{"type": "Prepend", "prepend": "▁"}, *steps],
                "decoder": [*steps, {"type": "Strip", "content": " ", "start": 1, "stop": 0}],
            }.get(name, steps)
        parts[name] = {"type": "Sequence", list_name: steps} if steps else None
    return Tokenizer.from_str(json.dumps(parts))


def _without_more(backend, count):
    """Returns the tokenizer without the special tokens that transformers' classes add to vocabularies that lack
    them: models have no rows for those."""
    from tokenizers import Tokenizer

    if backend.get_vocab_size() <= count:
        return backend
    parts = json.loads(backend.to_str())
    parts["added_tokens"] = [token for token in parts["added_tokens"] if token["id"] < count]
    return Tokenizer.from_str(json.dumps(parts))


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
    vocabulary = {number: (token, _NORMAL) for token, number in parts["model"]["vocab"].items()}
    for added in parts["added_tokens"]:
        vocabulary[added["id"]] = added["content"], _CONTROL if added["special"] else _USER_DEFINED
    if max(vocabulary) >= rows:
        raise ValueError(f"the tokenizer has tokens up to {max(vocabulary)}, and the model {rows} rows")
    every = [vocabulary.get(number, (f"[PAD{number}]", _UNUSED)) for number in range(rows)]
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
            splits = mapping().GGUF_PRE_TOKENIZER_SPLITS
            name = next((name for name, regex in splits.items() if regex == pattern), None)
            if name is None:
                raise ValueError(f"llama.cpp's name for texts that are split by {pattern!r} is unknown")
            return name
    raise ValueError("llama.cpp's name for texts that are not split is unknown")
