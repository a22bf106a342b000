"""The on-disk cache of compiled programs: one file per entry, named by a digest of everything that went into it.

An entry is written under another name and renamed, so that readers (of any process) see all of it or nothing. It ends
in a digest of itself, so that one cut short by a full disk or a crash is noticed and made again; the loader of shared
objects ignores what follows them.
"""

import atexit
import contextlib
import fcntl
import functools
import hashlib
import os
import shutil
import tempfile
import warnings
from pathlib import Path

_MARK = b"metalcore-entry-1"
_FOOTER = len(_MARK) + hashlib.sha256().digest_size


def digest(*parts):
    """A name for an entry: a digest of strings."""
    combined = hashlib.sha256()
    for part in parts:
        data = part.encode()
        combined.update(len(data).to_bytes(8, "little") + data)
    return combined.hexdigest()[:40]


@functools.lru_cache(maxsize=1)
def translator_digest():
    """A digest of this package: of what translates programs, and of the headers that all translated ones include."""
    combined, package = hashlib.sha256(), Path(__file__).parent
    headers = [path for path in (package / "include").rglob("*") if path.is_file()]
    for path in sorted([*package.glob("*.py"), *headers]):
        combined.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes())
    return combined.hexdigest()


def cache_directory():
    """$METALCORE_CACHE_DIR, else $XDG_CACHE_HOME/metalcore, else ~/.cache/metalcore."""
    if os.environ.get("METALCORE_CACHE_DIR"):
        return Path(os.environ["METALCORE_CACHE_DIR"]).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path("~/.cache").expanduser()) / "metalcore"


def entry(name, make, *, accept=lambda content: True):
    """The path of the entry `name`, which `make(path)` writes where it is not there yet or is damaged.

    Where the cache directory cannot be written, entries go to a temporary directory of this process, with one warning.

    Args:
        name: of the entry.
        make: called with a path, writes the entry there.
        accept: called with an entry's bytes, says whether it is still valid.
    """
    return _find(name, make, accept)[0]


def content(name, make, *, accept=lambda content: True):
    """The bytes of the entry `name`, made as `entry` does."""
    return _find(name, make, accept)[1]


def is_intact(path):
    """Whether a complete entry lies at path."""
    return _read(path) is not None


def _find(name, make, accept):
    """(path, bytes) of an entry. Where it is there, that is all that is looked at: one file, read once."""

    def valid(path):
        body = _read(path)
        return None if body is None or not accept(body) else (path, body)

    path = cache_directory() / name
    if found := valid(path):
        return found
    try:
        with _lock(path):
            return valid(path) or _fill(path, make)
    except OSError as error:
        fallback = _fallback_directory(str(path.parent), error.strerror or str(error)) / name
        return valid(fallback) or _fill(fallback, make)


def _read(path):
    """The bytes of the entry at path; None where there is none, or only part of one."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    body, footer = content[:-_FOOTER], content[-_FOOTER:]
    return body if footer == _MARK + hashlib.sha256(body).digest() else None


@contextlib.contextmanager
def _lock(path):
    """Held by whoever makes the entry, so that processes that start together compile it once."""
    locks = path.parent / ".locks"
    locks.mkdir(parents=True, exist_ok=True)
    with open(locks / path.name, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            pass  # a file system without locks: each compiles its own, and the last rename wins
        yield


def _fill(path, make):
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, partial = tempfile.mkstemp(prefix=".", suffix=f"-{path.name}", dir=path.parent)
    os.close(handle)
    partial = Path(partial)
    try:
        make(partial)
        body = partial.read_bytes()
        with open(partial, "ab") as file:
            file.write(_MARK + hashlib.sha256(body).digest())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return path, body


@functools.lru_cache(maxsize=None)
def _fallback_directory(directory, reason):
    temporary = Path(tempfile.mkdtemp(prefix="metalcore-cache-"))
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    warnings.warn(
        f"metalcore: the cache directory {directory} cannot be written ({reason}); compiled programs are kept in "
        f"{temporary} until this process ends. Set METALCORE_CACHE_DIR to a directory that can be written.",
        RuntimeWarning,
        stacklevel=2,
    )
    return temporary
