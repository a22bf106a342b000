"""Models that gguf-split, or a writer with a limit, has divided into several files.

The first part has the metadata. Each part says which one it is, how many there are, and how many tensors all of them
have; the names of the files tell where the others are.
Source of the format: github.com/ggml-org/llama.cpp, tools/gguf-split.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from torch import Tensor

from ._reader import GGUFError, GGUFFile

__all__ = ["WholeFile", "part_path", "whole"]

_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)
_MOST = 2**16 - 1  # parts: their number has 16 bits


class WholeFile(GGUFFile):
    """The parts of a model as one file: the first one's path, version and metadata, and the tensors of all."""

    def __init__(self, parts: list[GGUFFile]):
        first = parts[0]
        self.path, self.version, self.metadata = first.path, first.version, first.metadata
        self.read, self.size = set(), sum(part.size for part in parts)
        self.parts = tuple(parts)
        self.tensors, self._of = {}, {}
        for part in parts:
            for name, info in part.tensors.items():
                if name in self.tensors:
                    raise GGUFError(f"{part.path}: tensor {name!r} is in {self._of[name].path.name} too")
                self.tensors[name], self._of[name] = info, part

    def packed(self, name: str) -> Tensor:
        return self._of[name].packed(name)


def part_path(prefix: Path, number: int, count: int) -> Path:
    """Returns the path of a part, whose number begins at 0."""
    return prefix.with_name(f"{prefix.name}-{number + 1:05d}-of-{count:05d}.gguf")


def whole(path: str | os.PathLike[str]) -> GGUFFile:
    """Returns a file, with all parts of its model where it is one of several, whichever it is.

    Raises:
        GGUFError: a file is damaged, a part is missing, or what lies in its place belongs to another model.
        OSError: a file cannot be read.
    """
    file = GGUFFile(path)
    count = _number(file, "split.count", 1, 0, _MOST)
    if count <= 1:
        return file
    number = _number(file, "split.no", None, 0, count - 1)
    match = _NAME.fullmatch(file.path.name)
    if match is None or (int(match[2]), int(match[3])) != (number + 1, count):
        ending = f"-{number + 1:05d}-of-{count:05d}.gguf"
        raise GGUFError(
            f"{file.path}: it is part {number + 1} of {count}; its name must end in {ending}, as the others'"
        )
    prefix = file.path.with_name(match[1])
    parts = [file if one == number else _part(prefix, one, count, file) for one in range(count)]
    file = WholeFile(parts)
    expected = _number(parts[0], "split.tensors.count", None, 0, 2**31 - 1)
    if len(file.tensors) != expected:
        counts = " + ".join(str(len(part.tensors)) for part in parts)
        raise GGUFError(f"{file.path}: the parts have {counts} tensors, and split.tensors.count is {expected}")
    return file


def _part(prefix, number, count, first):
    path = part_path(prefix, number, count)
    try:
        part = GGUFFile(path)
    except FileNotFoundError:
        raise GGUFError(f"{first.path}: part {number + 1} of {count} is missing: {path}") from None
    says = tuple(part.metadata.get(f"split.{key}") for key in ("no", "count", "tensors.count"))
    expected = (number, count, first.metadata.get("split.tensors.count"))
    if says != expected:
        keys = "split.no, split.count and split.tensors.count"
        raise GGUFError(
            f"{path}: it belongs to another model: {keys} are {says}, and {first.path.name} needs {expected}"
        )
    architecture, other = (one.metadata.get("general.architecture") for one in (first, part))
    if None not in (architecture, other) and architecture != other:
        raise GGUFError(f"{path}: it belongs to another model: {other!r}, and {first.path.name} is {architecture!r}")
    return part


def _number(file, key, default, least, most):
    value = file.metadata.get(key, default)
    if type(value) is not int or not least <= value <= most:
        raise GGUFError(f"{file.path}: key {key!r}: {value!r} is no number from {least} to {most}")
    return value
