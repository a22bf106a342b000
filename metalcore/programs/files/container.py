"""Files of named tensors and one text, in the format of safetensors: a header in JSON, and then the tensors' bytes.

    write(path, {"weight": tensor}, {"note": "…"})
    with Container(path) as file:
        file.metadata["note"], file.read("weight")

Files come from strangers. The header is read as data: its sizes have to fit each other and the file, byte by byte.

A file that this module writes begins, behind the eight bytes of its header's length, with a digest of all its bytes, in
which the digest's own 64 digits count as zeros. csrc/c_api/program/container.cpp reads such files as well.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
import os
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["DTYPES", "Container", "Entry", "ProgramFileError", "strict_json", "write"]


class ProgramFileError(ValueError):
    """The error of a file that is damaged, is no program or weights file, or has what such a file may not have. Nothing
    of it has run.

    Example:
        >>> from pathlib import Path
        >>> _ = Path("damaged.mcprog").write_bytes(b"damaged")
        >>> try:
        ...     metalcore.load("damaged.mcprog")
        ... except metalcore.programs.ProgramFileError as error:
        ...     print(error)
        damaged.mcprog: it is no file of this kind, or its beginning is damaged
    """


DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_CODES = {dtype: code for code, dtype in DTYPES.items()}
_MOST_HEADER = 100_000_000  # bytes, as in the format's own reader
_MOST_DIMENSIONS = 64
_BLOCK = 1 << 20
_METADATA = "__metadata__"
_DIGEST = "digest"
_LEAD = f'{{"{_METADATA}":{{"{_DIGEST}":"'.encode()  # in front of the digest
_ZEROS = b"0" * 64


class Entry(NamedTuple):
    """A tensor of a file, and where its bytes are, counted from the end of the header."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


def write(path: str | os.PathLike, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Writes a file, or none if something fails: it is written under another name and renamed. The metadata gets a
    digest of the whole file."""
    header: dict[str, Any] = {_METADATA: {_DIGEST: _ZEROS.decode(), **metadata}}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.numel() * tensor.element_size()
        if tensor.dtype not in _CODES:
            raise ValueError(f"{name} is {_text(tensor.dtype)}, which such a file cannot hold")
        header[name] = {"dtype": _CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    beginning = len(text).to_bytes(8, "little") + text
    digest = hashlib.sha256(beginning)
    for tensor in tensors.values():
        digest.update(_bytes(tensor))
    beginning = _with_digest(beginning, digest.hexdigest().encode())
    path = Path(path)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(beginning)
            for tensor in tensors.values():
                file.write(_bytes(tensor))
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _bytes(tensor):
    flat = tensor.detach().cpu().contiguous()
    return ctypes.string_at(flat.data_ptr(), flat.nbytes) if flat.numel() else b""


def _with_digest(beginning, digits):
    """Returns the beginning of a file with other digits in the place of its digest's."""
    place = 8 + len(_LEAD)
    return beginning[:place] + digits + beginning[place + len(digits) :]


class Container:
    """A file that is open for reading.

    Attributes:
        metadata: texts by name.
        entries: the tensors by name.

    Raises:
        ProgramFileError: the file is none of this format, or is damaged.
        OSError: it cannot be read.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        self._file = open(path, "rb")  # noqa: SIM115  (closed by __exit__)
        try:
            self._read_header()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Container:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _wrong(self, reason: object) -> ProgramFileError:
        return ProgramFileError(f"{self.path}: {reason}")

    def _read_header(self):
        status = os.fstat(self._file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise self._wrong("it is no regular file")
        size = status.st_size
        length = int.from_bytes(self._file.read(8), "little")
        if size < 10 or not 2 <= length <= min(size - 8, _MOST_HEADER):
            raise self._wrong("it is no file of this kind, or its beginning is damaged")
        text = self._file.read(length)
        try:
            header = strict_json(text.decode())
        except ValueError as error:
            raise self._wrong(f"its header cannot be read: {error}") from None
        if not isinstance(header, dict):
            raise self._wrong("its header is no object")
        self._begin = 8 + length
        self.metadata = header.get(_METADATA, {})
        if not isinstance(self.metadata, dict) or not all(isinstance(text, str) for text in self.metadata.values()):
            raise self._wrong("its metadata are no texts")
        self.entries = {
            name: self._entry(name, description) for name, description in header.items() if name != _METADATA
        }
        end = 0
        for entry in sorted(self.entries.values(), key=lambda entry: (entry.begin, entry.end)):
            if entry.begin != end:
                raise self._wrong("its tensors overlap, or leave gaps")
            end = entry.end
        if end != size - self._begin:
            raise self._wrong("it has another size than its header says; it may be cut short")

    def _entry(self, name, description):
        if not isinstance(description, dict) or set(description) != {"dtype", "shape", "data_offsets"}:
            raise self._wrong(f"{name!r} is described in no known way")
        dtype = DTYPES.get(description["dtype"]) if isinstance(description["dtype"], str) else None
        shape, offsets = description["shape"], description["data_offsets"]
        if dtype is None:
            raise self._wrong(f"{name!r} has the unknown dtype {str(description['dtype'])[:40]!r}")
        if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2 or len(shape) > _MOST_DIMENSIONS:
            raise self._wrong(f"{name!r} has no possible shape or place")
        if math.prod(shape) * dtype.itemsize != offsets[1] - offsets[0]:
            raise self._wrong(f"{name!r} has another size than its shape and dtype say")
        return Entry(dtype, tuple(shape), *offsets)

    @property
    def has_digest(self) -> bool:
        return _DIGEST in self.metadata

    def check_digest(self) -> None:
        """Raises ProgramFileError unless the file has a digest, and is as it was when that was made."""
        self._file.seek(0)
        beginning = self._file.read(self._begin)
        stated = beginning[8 + len(_LEAD) :][: len(_ZEROS)]
        digest = hashlib.sha256(_with_digest(beginning, _ZEROS))
        while block := self._file.read(_BLOCK):
            digest.update(block)
        if not beginning[8:].startswith(_LEAD) or stated != digest.hexdigest().encode():
            raise self._wrong("it is damaged: its digest is another one")

    def read(self, name: str) -> Tensor:
        """Returns a tensor, on the CPU, in memory of its own."""
        entry = self.entries[name]
        size = entry.end - entry.begin
        if not size:
            return torch.empty(entry.shape, dtype=entry.dtype)
        data = bytearray(size)
        self._file.seek(self._begin + entry.begin)
        if self._file.readinto(data) != size:
            raise self._wrong("it was cut short while it was read")
        flat = torch.frombuffer(data, dtype=torch.uint8)
        if entry.dtype == torch.bool and int(flat.max()) > 1:
            raise self._wrong(f"{name!r} has values that are neither true nor false")
        return flat.view(entry.dtype).view(entry.shape)


def _are_sizes(sizes):
    return isinstance(sizes, list) and all(type(size) is int and 0 <= size < 1 << 48 for size in sizes)


def strict_json(text: str) -> Any:
    """Returns what a text in JSON says. Names must not repeat, and numbers must be finite.

    Raises:
        ValueError: it says nothing, or is nested too deeply.
    """

    def unique(pairs):
        entries = dict(pairs)
        if len(entries) != len(pairs):
            raise ValueError("a name is there twice")
        return entries

    def finite(word):
        number = float(word)
        if not math.isfinite(number):
            raise ValueError(f"{word[:40]} is no finite number")
        return number

    try:
        return json.loads(text, object_pairs_hook=unique, parse_float=finite, parse_constant=finite)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _text(dtype):
    return str(dtype).removeprefix("torch.")
