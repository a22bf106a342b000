"""Values of a GGUF file's architecture, checked as they are read."""

from __future__ import annotations

import array
import math
from typing import Any

import torch

from ._reader import GGUFError, GGUFFile

__all__ = ["Metadata"]


class Metadata:
    """Values of a file's architecture, by their keys without its name.

    Raises:
        GGUFError: the file names no architecture. The methods raise it for a value that is missing or of another type.
    """

    def __init__(self, file: GGUFFile):
        self.file = file
        architecture = self._checked("general.architecture", str)
        if not architecture:
            raise GGUFError(f"{file.path}: key 'general.architecture' is missing")
        self.architecture: str = architecture

    def get(self, key: str, kinds: Any, default: Any = None) -> Any:
        """The value of a key, or the default where it is missing."""
        return self._checked(f"{self.architecture}.{key}", kinds, default)

    def number(self, key: str, default: float | None = None) -> float:
        value = float(self._required(key, self.get(key, (int, float), default)))
        if not math.isfinite(value):
            raise GGUFError(f"{self.file.path}: key '{self.architecture}.{key}': {value} is no finite number")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """A number of 1 or more. A file may give it for each layer, if all have the same."""
        value = self.get(key, (int, array.array), default)
        if isinstance(value, array.array):
            if len(set(value)) != 1:
                raise GGUFError(f"{self.file.path}: key '{self.architecture}.{key}': layers differ")
            value = value[0]
        if not isinstance(self._required(key, value), int) or value < 1:
            raise GGUFError(f"{self.file.path}: key '{self.architecture}.{key}': {value} is no number of 1 or more")
        return value

    def token(self, name: str) -> int | None:
        """The number of a special token ("bos", "eos" …), or None."""
        return self._checked(f"tokenizer.ggml.{name}_token_id", int)

    def floats(self, tensor: str) -> list[float] | None:
        """The numbers of a float32 tensor, or None if there is none."""
        info = self.file.tensors.get(tensor)
        if info is None:
            return None
        if info.type.name != "F32" or len(info.shape) != 1:
            raise GGUFError(f"{self.file.path}: tensor {tensor!r} must be F32 of one dimension")
        return self.file.packed(tensor).view(torch.float32).tolist()

    def _checked(self, key: str, kinds: Any, default: Any = None) -> Any:
        value = self.file.metadata.get(key)
        if value is None:
            return default
        if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool):
            raise GGUFError(f"{self.file.path}: key {key!r}: {value!r} is of a wrong type")
        return value

    def _required(self, key, value):
        if value is None:
            raise GGUFError(f"{self.file.path}: key '{self.architecture}.{key}' is missing")
        return value
