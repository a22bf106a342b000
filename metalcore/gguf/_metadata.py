"""Values of a GGUF file's architecture, checked as they are read, and tokens that have a meaning by their texts."""

from __future__ import annotations

import array
import math
import reprlib
import warnings
from typing import Any

import torch

from ._reader import GGUFError, GGUFFile

__all__ = ["Metadata", "control", "stops"]

_LARGEST = 2**32 - 1  # llama.cpp's counts have 32 bits
# Special tokens of a kind of vocabulary, where the file does not say. (llama.cpp takes 11 for byte-level ones, which is
# Falcon's, and a comma of most others.)
_TOKENS = {"llama": {"bos": 1, "eos": 2, "unknown": 0}}
# Tokens that have a meaning by their texts, whatever a file says of them: files exist that name another end than their
# chat template writes, or that take the tokens of a template for plain text. Source of the texts:
# github.com/ggml-org/llama.cpp, src/llama-vocab.cpp.
_ENDS = frozenset(
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|> </s> <|eom_id|> "
    "<EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <|tool_response> [e~[ "
    "<\uff5cend\u2581of\u2581sentence\uff5c> <|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD] <|fim_repo|> <|repo_name|> "
    "<fim-repo> <REPO> <reponame> <|file_sep|>".split()
)
_CONTROL = _ENDS | frozenset(
    "<|fim_prefix|> <fim-prefix> <fim_prefix> <\uff5cfim\u2581begin\uff5c> <PRE> \u2581<PRE> <|code_prefix|> "
    "<|fim_suffix|> <fim-suffix> <fim_suffix> <\uff5cfim\u2581hole\uff5c> <SUF> \u2581<SUF> <|code_suffix|> "
    "<|fim_middle|> <fim-middle> <fim_middle> <\uff5cfim\u2581end\uff5c> <MID> \u2581<MID> <|code_middle|> "
    "<|prefix|> <|suffix|> <|middle|>".split()
)
# With all of these, another text is no end: messages of harmony's and Solar's templates have several parts.
_PARTS = (
    ({"<|return|>", "<|call|>"}, "<|end|>"),
    ({"<|calls|>", "<|flush|>"}, "<|end|>"),
    ({"<|tool_response>"}, "</s>"),
)


class Metadata:
    """Values of a file's architecture, by their keys without its name.

    Raises:
        GGUFError: the file names no architecture. The methods raise it for a value that is missing or of another type.
    """

    def __init__(self, file: GGUFFile):
        self.file = file
        architecture = self.of_file("general.architecture", str)
        if not architecture:
            raise GGUFError(f"{file.path}: key 'general.architecture' is missing")
        self.architecture: str = architecture

    def get(self, key: str, kinds: Any, default: Any = None) -> Any:
        """Returns the value of a key, or the default where it is missing."""
        return self.of_file(f"{self.architecture}.{key}", kinds, default)

    def of_file(self, key: str, kinds: Any, default: Any = None) -> Any:
        """Returns the value of a whole key, or the default where it is missing."""
        value = self.file.metadata.get(key)
        self.file.read.add(key)
        if value is None:
            return default
        is_bool = kinds is bool or isinstance(kinds, tuple) and bool in kinds
        if not isinstance(value, kinds) or (isinstance(value, bool) and not is_bool):
            raise GGUFError(f"{self.file.path}: key {key!r}: {reprlib.repr(value)} is of a wrong type")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = float(self._required(key, self.get(key, (int, float), default)))
        if not math.isfinite(value):
            raise GGUFError(f"{self.file.path}: key '{self.architecture}.{key}': {value} is no finite number")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """Returns a number of 1 or more, of 32 bits. A file may give it for each layer, if all have the same."""
        value = self.get(key, (int, array.array), default)
        if isinstance(value, array.array):
            if len(set(value)) != 1:
                raise GGUFError(f"{self.file.path}: key '{self.architecture}.{key}': layers differ")
            value = value[0]
        if not isinstance(self._required(key, value), int) or not 1 <= value <= _LARGEST:
            raise GGUFError(
                f"{self.file.path}: key '{self.architecture}.{key}': {value} is no number from 1 to {_LARGEST}"
            )
        return value

    def experts(self) -> tuple[int, int]:
        """Returns how many experts a layer has, and how many of them a token takes."""
        count, used = self.count("expert_count"), self.count("expert_used_count")
        if used > count:
            raise GGUFError(f"{self.file.path}: {used} of {count} experts cannot be used")
        return count, used

    def token(self, name: str) -> int | None:
        """Returns the number of a special token ("bos", "eos" …), or None. One that the model has no row for is None
        too, with a warning, as in llama.cpp: files exist that say -1."""
        key = f"tokenizer.ggml.{name}_token_id"
        token, embedding = self.of_file(key, int), self.file.tensors.get("token_embd.weight")
        if token is None:
            token = _TOKENS.get(self.of_file("tokenizer.ggml.model", str), {}).get(name)
        if token is None or embedding is None or 0 <= token < embedding.shape[0]:
            return token
        warnings.warn(f"{self.file.path}: key {key!r}: the model has no token {token}; it is left out", stacklevel=4)
        return None

    def factors(self, tensor: str, count: int) -> list[float] | None:
        """Returns the numbers of a float32 tensor that divide frequencies, or None if there is none."""
        info = self.file.tensors.get(tensor)
        if info is None:
            return None
        if info.type.name != "F32" or info.shape != (count,):
            raise GGUFError(f"{self.file.path}: tensor {tensor!r} must be F32 of shape ({count},), not {info.shape}")
        factors = self.file.packed(tensor).clone().view(torch.float32).tolist()  # the file may lie at any byte
        if not all(0 < value < math.inf for value in factors):
            raise GGUFError(f"{self.file.path}: tensor {tensor!r} must have finite numbers above 0")
        return factors

    def _required(self, key, value):
        if value is None:
            raise GGUFError(f"{self.file.path}: key '{self.architecture}.{key}' is missing")
        return value


def control(tokens: list[str]) -> set[str]:
    """Returns the texts of tokens that are never plain text. (Gemma 4 has </s> as a tag of HTML.)"""
    control = {text for text in tokens if text in _CONTROL}
    return control - {"</s>"} if "<|tool_response>" in control else control


def stops(metadata: Metadata) -> list[int]:
    """Returns the tokens that end a text or a turn; the one that the file calls its end comes first."""
    named = [metadata.token(name) for name in ("eos", "eot", "eom")]
    texts = metadata.of_file("tokenizer.ggml.tokens", list, [])
    ends = {text: number for number, text in enumerate(texts) if text in _ENDS}
    for all_of, text in _PARTS:
        if all_of <= ends.keys():
            ends.pop(text, None)
    return list(dict.fromkeys(token for token in (*named, *ends.values()) if token is not None))
