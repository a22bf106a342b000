"""One compressed file for a folder of artifacts: a ZIP archive with a list of its files' digests.

Archives come from strangers. Nothing is written before all of an archive has been read and found right: names are those
of artifacts, there are no links, no more and no larger files than artifacts have, and every digest fits.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

__all__ = ["pack", "unpack", "unpacked"]

_MANIFEST = "digests.json"
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,200}/(meta\.json|values\.bin)")
_MOST_FILES, _MOST_BYTES = 20_000, 1 << 28
_TIME = (2020, 1, 1, 0, 0, 0)  # the same folder makes the same file


def pack(folder: Path, file: Path) -> None:
    """Writes the artifacts in a folder to one file.

    Raises:
        ValueError: the folder has none, or files that are no artifact's.
    """
    paths = sorted(path for path in folder.rglob("*") if not path.is_dir())
    contents = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths if not path.is_symlink()}
    if foreign := [path for path in paths if not _NAME.fullmatch(path.relative_to(folder).as_posix())]:
        raise ValueError(f"{foreign[0]} is no file of an artifact")
    if not contents:
        raise ValueError(f"{folder} has no artifacts")
    manifest = json.dumps({name: hashlib.sha256(data).hexdigest() for name, data in contents.items()}).encode()
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in {_MANIFEST: manifest, **contents}.items():
            archive.writestr(zipfile.ZipInfo(name, _TIME), data, zipfile.ZIP_DEFLATED, 9)


def unpack(file: Path, folder: Path) -> None:
    """Writes the artifacts of a packed file to a folder that is not there, or is empty.

    Raises:
        ValueError: the file is damaged or is not what pack() writes, or the folder has files.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} has files already")
    for name, data in read(file).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


@contextlib.contextmanager
def unpacked(file: Path) -> Iterator[Path]:
    """Yields a folder with the artifacts of a packed file, inside the block."""
    with tempfile.TemporaryDirectory() as folder:
        unpack(file, Path(folder))
        yield Path(folder)


def read(file: Path) -> dict[str, bytes]:
    """Returns the contents of a packed file, by name.

    Raises:
        ValueError: the file is damaged or is not what pack() writes.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            return _read(archive)
    except (zipfile.BadZipFile, ValueError, EOFError, NotImplementedError, RuntimeError, RecursionError) as error:
        raise ValueError(f"{file} is no packed golden artifacts: {error}") from None
    except Exception as error:  # zlib.error, struct.error and others, which zipfile lets through
        if isinstance(error, OSError):
            raise
        raise ValueError(f"{file} is damaged: {type(error).__name__}: {error}") from None


def _read(archive):
    entries = archive.infolist()
    if len(entries) > _MOST_FILES or sum(entry.file_size for entry in entries) > _MOST_BYTES:
        raise ValueError("it holds more than artifacts do")
    contents = {}
    for entry in entries:
        if entry.filename != _MANIFEST and not _is_name(entry.filename):
            raise ValueError(f"{entry.filename!r} is no file of an artifact")
        if entry.filename in contents:
            raise ValueError(f"{entry.filename!r} is there twice")
        if entry.external_attr >> 28 not in (0, 8):  # Unix's type of a file: none, or a regular one
            raise ValueError(f"{entry.filename!r} is no regular file")
        with archive.open(entry) as stream:  # it reads no more than it is asked for, whatever the header says
            data = stream.read(entry.file_size + 1)
        if len(data) != entry.file_size:
            raise ValueError(f"{entry.filename!r} has another size than the archive says")
        contents[entry.filename] = data
    digests = json.loads(contents.pop(_MANIFEST, b"null"))
    if not isinstance(digests, dict) or {n: hashlib.sha256(d).hexdigest() for n, d in contents.items()} != digests:
        raise ValueError("the files are not those of its list of digests")
    return contents


def _is_name(name):
    return bool(_NAME.fullmatch(name)) and not name.startswith(".")
