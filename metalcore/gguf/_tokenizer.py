"""Tokenizers: a GGUF file's, as llama.cpp has it (src/llama-vocab.cpp), and one of transformers as keys of a file."""

from __future__ import annotations

import array
import json
import warnings
from typing import Any, NamedTuple

from ._metadata import Metadata, control
from ._pre_tokenizers import PRE_TOKENIZERS, PreTokenizer, name_of, steps
from ._reader import GGUFError, GGUFFile

__all__ = ["TAKEN", "tokenizer_keys", "tokenizer_of"]

# Keys of which tokenizers are made, except for those that a model is made of too.
TAKEN = (
    *(f"ggml.{name}" for name in "model pre tokens scores token_type merges unknown_token_id add_space_prefix".split()),
    *("ggml.add_bos_token", "ggml.add_eos_token", "chat_template"),
)
_SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_KINDS = ("gemma4", "gpt2", "llama")
_PHI3_PLAIN = ("<unk>", "<s>", "<|endoftext|>")  # which take no spaces after them


class _Refused(Exception):
    """What a file asks for and metalcore does not know."""


class _Vocabulary(NamedTuple):
    """Tokens, what they are (GGUF's token_type), their scores, and pairs that are joined."""

    kind: str
    tokens: list[str]
    types: list[int]
    scores: list[float]
    merges: list[tuple[str, str]]


def tokenizer_of(file: GGUFFile) -> Any:
    """Returns transformers' tokenizer of a file, or None if the file has none. One that cannot be made is None too, and
    a warning says why.

    Raises:
        GGUFError: the vocabulary contradicts itself, or the model has too few rows for it.
    """
    metadata = Metadata(file)
    kind = metadata.of_file("tokenizer.ggml.model", str)
    if kind in (None, "none", "no_vocab") or "tokenizer.ggml.tokens" not in file.metadata:
        return None
    vocabulary, options = _read(metadata, kind), _options(metadata)
    try:
        return _build(metadata, vocabulary, _way(metadata, kind), options)
    except Exception as error:  # transformers and tokenizers raise what they like for vocabularies they cannot take
        known = isinstance(error, (ValueError, ImportError, _Refused))
        reason = str(error) if known else f"{type(error).__name__}: {error}"
        warnings.warn(f"{file.path}: no tokenizer is made of it: {reason}", stacklevel=3)
        return None


def _read(metadata, kind):
    tokens, embedding = _texts(metadata, "tokens"), metadata.file.tensors.get("token_embd.weight")
    if embedding is not None and len(tokens) > embedding.shape[0]:
        _fail(metadata, "tokens", f"{len(tokens)} tokens, and the model has rows for {embedding.shape[0]}")
    types = _numbers(metadata, "token_type", len(tokens), _NORMAL)
    scores = _numbers(metadata, "scores", len(tokens), 0.0)
    merges = []
    for pair in _texts(metadata, "merges"):
        cut = pair.find(" ", 1)
        if cut < 0:
            _fail(metadata, "merges", f"{pair!r} is no pair of tokens")
        merges.append((pair[:cut], pair[cut + 1 :]))
    if kind in ("gemma4", "gpt2") and "tokenizer.ggml.merges" not in metadata.file.metadata:
        _fail(metadata, "merges", "it is missing")
    return _Vocabulary(kind, _apart(metadata, tokens), types, scores, merges)


def _texts(metadata, name):
    values = metadata.of_file(f"tokenizer.ggml.{name}", list, [])
    if not all(isinstance(value, str) for value in values):
        _fail(metadata, name, "it is no list of texts")
    return values


def _numbers(metadata, name, count, default):
    """Returns a number for each token. A file may have more."""
    values = metadata.of_file(f"tokenizer.ggml.{name}", array.array)
    if values is None:
        return [default] * count
    if len(values) < count:
        _fail(metadata, name, f"{len(values)} numbers for {count} tokens")
    return list(values[:count])


def _apart(metadata, tokens):
    """Returns tokens with texts of their own. Empty ones have llama.cpp's text, and the first of those with the same
    text keeps it. (Google's files of Gemma 4 with 4 bits have such tokens, llama.cpp#25739.)"""
    first: dict[str, int] = {}
    repeated = [i for i, text in enumerate(tokens) if text and first.setdefault(text, i) != i]
    if repeated:
        which = ", ".join(f"{i} ({tokens[i]!r})" for i in repeated[:3]) + ", …" * (len(repeated) > 3)
        _warn(metadata, "tokens", f"other tokens have the texts of {which}, which no text becomes")
    again = set(repeated)
    return [f"[SAME_{i}]" if i in again else text or f"[EMPTY_{i}]" for i, text in enumerate(tokens)]


def _fail(metadata, name, reason):
    raise GGUFError(f"{metadata.file.path}: key 'tokenizer.ggml.{name}': {reason}")


def _warn(metadata, name, reason):
    warnings.warn(f"{metadata.file.path}: key 'tokenizer.ggml.{name}': {reason}", stacklevel=5)


def _options(metadata):
    """Returns options of PreTrainedTokenizerFast, except for its special tokens."""
    options = {
        f"add_{name}_token": metadata.of_file(f"tokenizer.ggml.add_{name}_token", bool) for name in ("bos", "eos")
    }
    template = metadata.of_file("tokenizer.chat_template", str)
    return options if template is None else {**options, "chat_template": template}


def _way(metadata, kind):
    """Returns how texts are split, which SentencePiece's vocabularies do not."""
    if kind not in _KINDS:
        raise _Refused(f"key 'tokenizer.ggml.model': {kind!r} is none of {', '.join(_KINDS)}")
    if kind == "llama":
        return PreTokenizer((), add_bos=True, byte_level=False)
    name = "gemma4" if kind == "gemma4" else metadata.of_file("tokenizer.ggml.pre", str)
    if name is None:
        _warn(metadata, "pre", "it is missing, and llama.cpp's default splits texts, which may not be the model's")
    if (name or "default") not in PRE_TOKENIZERS:
        raise _Refused(f"key 'tokenizer.ggml.pre': metalcore does not know how {name!r} splits texts")
    return PRE_TOKENIZERS[name or "default"]


def _build(metadata, vocabulary, way, options):
    from transformers import PreTrainedTokenizerFast

    tokens = vocabulary.tokens
    for name, key in _SPECIAL.items():
        token = metadata.token(key)
        # Files exist that fill texts with "!", which stays plain text, as in llama.cpp.
        if token is not None and token < len(tokens) and not (name in ("unk", "pad") and _is_plain(vocabulary, token)):
            options[f"{name}_token"] = tokens[token]
    for name, default in (("bos", way.add_bos), ("eos", False)):
        wanted, there = options[f"add_{name}_token"], f"{name}_token" in options
        options[f"add_{name}_token"] = there and (default if wanted is None else wanted)
        if wanted and not there:
            _warn(metadata, f"add_{name}_token", "there is no such token; it is left out")
    backend = _backend(metadata, vocabulary, way, options.get("unk_token"))
    backend.add_tokens(_added(metadata, vocabulary))
    return PreTrainedTokenizerFast(tokenizer_object=backend, **options)


def _is_plain(vocabulary, token):
    """Returns whether a token is a part of texts, where the file says so of some tokens and not of others."""
    return vocabulary.types[token] == _NORMAL and len(set(vocabulary.types)) > 1


def _backend(metadata, vocabulary, way, unknown):
    from tokenizers import Tokenizer, decoders, models, normalizers

    numbers = {text: number for number, text in enumerate(vocabulary.tokens)}
    merges = _merges(metadata.architecture, vocabulary, numbers) if vocabulary.kind == "llama" else vocabulary.merges
    if way.byte_level:
        backend = Tokenizer(models.BPE(numbers, merges, ignore_merges=way.ignore_merges))
        backend.decoder = decoders.ByteLevel()
    else:
        # Texts begin with a space after each special token too, as in llama.cpp and in Llama's first tokenizers.
        prefix = vocabulary.kind == "llama" and metadata.of_file("tokenizer.ggml.add_space_prefix", bool, True)
        backend = Tokenizer(models.BPE(numbers, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
        backend.normalizer = normalizers.Sequence(
            [*([normalizers.Prepend("▁")] if prefix else []), normalizers.Replace(" ", "▁")]
        )
        last = [decoders.Strip(" ", 1, 0)] if prefix else []
        backend.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *last]
        )
    if way.patterns:
        backend.pre_tokenizer = steps(way)
    return backend


def _merges(architecture, vocabulary, numbers):
    """Returns the pairs that make tokens, best first. Gemma's scores do not follow the order in which its pairs were
    learned; that of its tokens does."""
    scores = range(0, -len(numbers), -1) if architecture.startswith("gemma") else vocabulary.scores
    pairs = [
        (scores[number], cut, text)
        for text, number in numbers.items()
        for cut in range(1, len(text))
        if text[:cut] in numbers and text[cut:] in numbers
    ]
    pairs.sort(key=lambda pair: pair[:2], reverse=True)
    return [(text[:cut], text[cut:]) for _, cut, text in pairs]


def _added(metadata, vocabulary):
    """Returns the tokens that are found in a text before it is split."""
    from tokenizers import AddedToken

    strips = any(name in str(metadata.file.metadata.get("general.name")).lower() for name in ("phi-3", "phi3"))
    added, never_plain = [], control(vocabulary.tokens)
    for text, type in zip(vocabulary.tokens, vocabulary.types):
        special = type in (_UNKNOWN, _CONTROL) or text in never_plain
        if special or type == _USER_DEFINED:
            spaces = strips and text not in _PHI3_PLAIN
            added.append(AddedToken(text, special=special, normalized=False, rstrip=spaces))
    return added


def tokenizer_keys(tokenizer: Any, rows: int) -> dict[str, Any]:
    """Returns keys of a fast tokenizer, with as many tokens as the model has rows of embeddings.

    Raises:
        ValueError: it is no BPE, or llama.cpp has no name for how it splits texts, or it has more tokens than rows.
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
        keys["tokenizer.ggml.model"], keys["tokenizer.ggml.pre"] = "gpt2", name_of(parts)
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
    for name, key in _SPECIAL.items():
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
