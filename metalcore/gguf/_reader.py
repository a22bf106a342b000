"""GGUF files as they are: metadata, and where each tensor lies, also of models that are divided into several files.

Nothing in a file is believed: each count, length and offset is compared with the bytes that are left, so no more is
read than the file has, and time and memory grow with the file's size only.
Source of the format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md

gguf-split, or a writer with a limit, divides models. The first part has the metadata. Each part says which one it is,
how many there are, and how many tensors all of them have; the names of the files tell where the others are.
Source: github.com/ggml-org/llama.cpp, tools/gguf-split.
"""

from __future__ import annotations

import array
import math
import mmap
import os
import re
import struct
import sys
import warnings
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from ..quant._types import BY_NUMBER, Type

__all__ = ["GGUFError", "GGUFFile", "TensorInfo", "WholeFile", "part_path", "whole"]


class GGUFError(ValueError):
    """The error of a GGUF file that is damaged, or says what metalcore does not know.

    Example:
        >>> from pathlib import Path
        >>> _ = Path("damaged.gguf").write_bytes(b"GGUF")
        >>> try:
        ...     metalcore.gguf.load("damaged.gguf")
        ... except metalcore.gguf.GGUFError as error:
        ...     print(error)
        damaged.gguf: header at byte 4: 4 bytes are needed, and the file has 0 more
    """


class TensorInfo(NamedTuple):
    """The place and the type of a tensor in a GGUF file.

    Attributes:
        name: its name, as "blk.0.attn_q.weight".
        shape: its shape in PyTorch's order, the contiguous dimension last.
        type: GGML's type.
        offset: where its first byte is in the file.
        nbytes: its bytes.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(vocab_size=32, hidden_size=32, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
        >>> [path] = metalcore.gguf.save_gguf(LlamaForCausalLM(LlamaConfig(**sizes)), "tiny.gguf")
        >>> metalcore.gguf.GGUFFile(path).tensors["output_norm.weight"].type.name
        'F32'
    """

    name: str
    shape: tuple[int, ...]
    type: Type
    offset: int
    nbytes: int


_STRING, _ARRAY = 8, 9
# GGUF's number of a type of metadata: struct's and array's letter.
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_MAX_DIMENSIONS, _MAX_NAME, _MAX_KEY = 4, 64, 65535


class GGUFFile:
    """A GGUF file, mapped into memory for as long as this object or a tensor of it lives. The file must not shrink
    meanwhile.

    Args:
        path: of a file of GGUF's version 2 or 3, little-endian.

    Attributes:
        path: as given.
        version: GGUF's version.
        metadata: keys and values in the file's order. Arrays of numbers are array.array, others are lists. Bytes of
            strings that are not UTF-8 are kept as surrogates.
        tensors: TensorInfo of each tensor by name, in the file's order.
        size: the file's bytes.
        read: the keys that somebody has asked for, whether the file has them or not.

    Raises:
        GGUFError: the file is damaged; the message names the file, the thing and where it is.
        OSError: it cannot be read.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(vocab_size=32, hidden_size=32, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
        >>> [path] = metalcore.gguf.save_gguf(LlamaForCausalLM(LlamaConfig(**sizes)), "tiny.gguf")
        >>> metalcore.gguf.GGUFFile(path).tensors["token_embd.weight"].shape
        (32, 32)
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self.read: set[str] = set()
        with open(self.path, "rb") as file:
            self.size = os.fstat(file.fileno()).st_size
            if self.size == 0:
                raise GGUFError(f"{self.path}: the file is empty")
            self._bytes = mmap.mmap(file.fileno(), self.size, access=mmap.ACCESS_READ)
        self._at, self._what = 0, "header"
        tensors, keys = self._header()
        self.metadata = self._metadata(keys)
        self.tensors = self._tensors(tensors)

    def packed(self, name: str) -> Tensor:
        """Returns a tensor's bytes where the file is mapped: uint8 (*shape[:-1], bytes of a row). It must not be
        written to."""
        info = self.tensors[name]
        *lead, length = info.shape or (1,)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            flat = torch.frombuffer(self._bytes, dtype=torch.uint8, count=info.nbytes, offset=info.offset)
        return flat.view(*lead, length // info.type.block * info.type.nbytes)

    def _fail(self, reason) -> NoReturn:
        raise GGUFError(f"{self.path}: {self._what} at byte {self._at}: {reason}")

    def _need(self, count):
        left = self.size - self._at
        if count > left:
            self._fail(f"{count} bytes are needed, and the file has {left} more")

    def _numbers(self, letters):
        """Returns numbers by struct's letters."""
        self._need(struct.calcsize("<" + letters))
        numbers = struct.unpack_from("<" + letters, self._bytes, self._at)
        self._at += struct.calcsize("<" + letters)
        return numbers

    def _string(self, most=None):
        (length,) = self._numbers("Q")
        if most is not None and length > most:
            self._fail(f"a name of {length} bytes; {most} are allowed")
        self._need(length)
        self._at += length
        return self._bytes[self._at - length : self._at]

    def _name(self, most):
        raw = self._string(most)
        try:
            name = raw.decode()
        except UnicodeDecodeError:
            self._fail(f"the name {raw!r} is not UTF-8")
        if not name:
            self._fail("an empty name")
        return name

    def _header(self):
        self._need(4)
        if self._bytes[:4] != b"GGUF":
            self._fail(f"a GGUF file begins with GGUF, and this one with {self._bytes[:4]!r}")
        self._at = 4
        (version,) = self._numbers("I")
        if version & 0xFFFF == 0:
            self._fail("the file is big-endian, or has no version; metalcore reads little-endian files")
        if version not in (2, 3):
            self._fail(f"version {version}; metalcore reads 2 and 3")
        self.version = version
        tensors, keys = self._numbers("QQ")
        # The least that a tensor and a key can take, so that a count is refused before its loop.
        if tensors * 25 + keys * 14 > self.size - self._at:
            self._fail(f"{tensors} tensors and {keys} keys do not fit into {self.size} bytes")
        return tensors, keys

    def _metadata(self, count):
        metadata: dict[str, Any] = {}
        for number in range(count):
            self._what = f"key {number + 1} of {count}"
            key = self._name(_MAX_KEY)
            self._what = f"key {key!r}"
            if key in metadata:
                self._fail("it is there twice")
            (kind,) = self._numbers("I")
            metadata[key] = self._value(kind)
        return metadata

    def _value(self, kind):
        if kind in _NUMBERS:
            if kind == 7:
                return self._booleans(self._numbers("B"))[0]
            return self._numbers(_NUMBERS[kind])[0]
        if kind == _STRING:
            return self._string().decode(errors="surrogateescape")
        if kind == _ARRAY:
            return self._array(*self._numbers("IQ"))
        self._fail(f"unknown type {kind} of metadata")

    def _array(self, kind, count):
        if kind == _ARRAY:
            self._fail("an array of arrays")
        if kind == _STRING:
            self._need(8 * count)
            return [self._string().decode(errors="surrogateescape") for _ in range(count)]
        if kind not in _NUMBERS:
            self._fail(f"an array of unknown type {kind}")
        letter = "B" if kind == 7 else _NUMBERS[kind]
        numbers = array.array(letter)
        self._need(numbers.itemsize * count)
        end = self._at + numbers.itemsize * count
        numbers.frombytes(self._bytes[self._at : end])
        if sys.byteorder == "big":
            numbers.byteswap()
        numbers = self._booleans(numbers) if kind == 7 else numbers
        self._at = end
        return numbers

    def _booleans(self, numbers):
        for value in numbers:
            if value > 1:
                self._fail(f"a boolean is 0 or 1, and not {value}")
        return [bool(value) for value in numbers]

    def _tensors(self, count):
        infos: dict[str, TensorInfo] = {}
        for number in range(count):
            self._what = f"tensor {number + 1} of {count}"
            info = self._tensor()
            if info.name in infos:
                self._fail("it is there twice")
            infos[info.name] = info
        self._what = "alignment"
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1) or alignment >= 2**32:
            self._fail(f"general.alignment is a power of two, and not {alignment!r}")
        start = -(-self._at // alignment) * alignment
        placed = {info.name: self._placed(info, start, alignment) for info in infos.values()}
        self._apart(placed.values())
        return placed

    def _tensor(self):
        name = self._name(_MAX_NAME)
        self._what = f"tensor {name!r}"
        (dimensions,) = self._numbers("I")
        if dimensions > _MAX_DIMENSIONS:
            self._fail(f"{dimensions} dimensions; GGML has at most {_MAX_DIMENSIONS}")
        shape = self._numbers("Q" * dimensions)[::-1]
        number, offset = self._numbers("IQ")
        if number not in BY_NUMBER:
            self._fail(f"unknown type {number}")
        kind = BY_NUMBER[number]
        length = shape[-1] if shape else 1
        if 0 in shape:
            self._fail(f"shape {shape} has no elements")
        if length % kind.block:
            self._fail(f"{kind.name}'s blocks of {kind.block} do not divide rows of {length}")
        nbytes = math.prod(shape) // kind.block * kind.nbytes
        if nbytes > self.size:
            self._fail(f"{kind.name} of shape {shape} has {nbytes} bytes, and the file {self.size}")
        return TensorInfo(name, shape, kind, offset, nbytes)

    def _placed(self, info, start, alignment):
        self._what = f"tensor {info.name!r}"
        if info.offset % alignment:
            self._fail(f"offset {info.offset} is not a multiple of the alignment {alignment}")
        first = start + info.offset
        if first + info.nbytes > self.size:
            self._fail(f"it is at bytes {first} to {first + info.nbytes}, and the file has {self.size}")
        return info._replace(offset=first)

    def _apart(self, infos):
        end, before = 0, None
        for info in sorted(infos, key=lambda info: info.offset):
            if info.offset < end:
                self._what = f"tensor {info.name!r}"
                self._fail(f"it begins at byte {info.offset}, inside of {before!r}, which ends at {end}")
            end, before = info.offset + info.nbytes, info.name


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
