"""The on-disk cache of compiled programs: one file per entry, named by a digest of everything that went into it.

An entry is written under another name and renamed, so that readers in any process see all of it or nothing. It ends in
its own digest, so that an entry that a full disk or a crash cut short is noticed and made again; the loader of shared
objects ignores the digest. Entries run as native code, so an entry that other users could have written is never used:
where private_files.py refuses the directory or an entry, a private directory takes its place, with one warning.
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

from .private_files import open_file, opened_directory

_PACKAGE = Path(__file__).parent
_MARK = b"metalcore-entry-1"
_FOOTER = len(_MARK) + hashlib.sha256().digest_size


def digest(*parts):
    """Returns a name for an entry: a digest of strings."""
    combined = hashlib.sha256()
    for part in parts:
        data = part.encode()
        combined.update(len(data).to_bytes(8, "little") + data)
    return combined.hexdigest()[:40]


@functools.lru_cache(maxsize=1)
def translator_digest():
    """Returns a digest of what every translated program depends on."""
    combined = hashlib.sha256()
    for path in sorted(translator_files()):
        combined.update(path.relative_to(_PACKAGE).as_posix().encode() + b"\0" + path.read_bytes())
    return combined.hexdigest()


def translator_files():
    """Returns the files that every translated program depends on: this package without `check`, and the headers that
    programs include."""
    modules = [path for path in _PACKAGE.rglob("*.py") if "check" not in path.relative_to(_PACKAGE).parts]
    return [*modules, *(path for path in (_PACKAGE / "include").rglob("*") if path.is_file())]


def cache_directory():
    """Returns $METALCORE_CACHE_DIR, else metalcore in $XDG_CACHE_HOME or ~/.cache, else temporary_directory()."""
    if chosen := os.environ.get("METALCORE_CACHE_DIR"):
        return Path(os.path.realpath(os.path.expanduser(chosen)))
    for variable, below in (("XDG_CACHE_HOME", "metalcore"), ("HOME", ".cache/metalcore")):
        if os.path.isabs(base := os.environ.get(variable, "")):
            return Path(os.path.realpath(os.path.join(base, below)))
    return temporary_directory()


def temporary_directory():
    """Returns the user's own directory among the temporary files. A link that others may have put there is not
    followed."""
    return Path(os.path.realpath(tempfile.gettempdir()), f"metalcore-{os.geteuid()}")


def entry(name, make, *, accept=lambda content: True):
    """Returns the path of the entry `name`. `make(path)` writes it where it is missing or damaged.

    Where the cache directory cannot be written, or others can write to it, entries go to temporary_directory(), or to
    one of this process alone, with one warning.

    Args:
        name: of the entry.
        make: called with a path, writes the entry there.
        accept: called with an entry's bytes, says whether it is still valid.
    """
    return _find(name, make, accept)[0]


def content(name, make, *, accept=lambda content: True):
    """Returns the bytes of the entry `name`, made as `entry` does."""
    return _find(name, make, accept)[1]


def existing(name):
    """Returns the path of the entry `name`, or None where there is none."""
    places = (directory / name for directory in (cache_directory(), temporary_directory()))
    return next(filter(is_intact, places), None)


def is_intact(path):
    """Returns whether a complete entry lies at path, which this user can trust."""
    if not os.path.lexists(path):
        return False
    try:
        with opened_directory(path.parent) as folder:
            return _read(folder, path) is not None
    except OSError:
        return False


def problem():
    """Returns why the cache directory is not used, in words; None where it is used or can be made."""
    directory = cache_directory()
    try:
        if os.path.lexists(directory):
            with opened_directory(directory):
                pass
    except OSError as error:
        return _words(error)
    return None


def _find(name, make, accept):
    directory = cache_directory()
    try:
        return _find_in(directory, name, make, accept)
    except OSError as error:
        return _find_in(_fallback_directory(directory, _words(error)), name, make, accept)


def _find_in(directory, name, make, accept):
    """Returns (path, bytes) of an entry. An entry that exists costs one read of one file."""
    path = directory / name
    with opened_directory(path.parent) as folder:

        def valid():
            body = _read(folder, path)
            return None if body is None or not accept(body) else (path, body)

        if found := valid():
            return found
        with _lock(path):
            return valid() or _fill(folder, path, make)


def _read(folder, path):
    """Returns the bytes of the entry at path, in the directory opened as `folder`; None where it is missing or
    incomplete."""
    try:
        descriptor = open_file(folder, path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    with open(descriptor, "rb") as file:
        content = file.read()
    body, footer = content[:-_FOOTER], content[-_FOOTER:]
    return body if footer == _MARK + hashlib.sha256(body).digest() else None


@contextlib.contextmanager
def _lock(path):
    """Holds a lock while an entry is made, so that processes that start together compile it once."""
    place = path.parent / ".locks" / path.name
    with opened_directory(place.parent) as locks:
        descriptor = open_file(locks, place, os.O_RDWR | os.O_CREAT)
    with open(descriptor, "r+b", buffering=0):
        # A file system may have no locks: then each process compiles its own, and the last rename wins.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield


def _fill(folder, path, make):
    # A directory that nobody else can enter protects the file: compilers give their output the umask's permissions.
    work = tempfile.mkdtemp(prefix=".", suffix=f"-{path.name}", dir=path.parent)
    try:
        partial = Path(work, path.name)
        make(partial)
        with open(partial, "r+b") as file:
            os.fchmod(file.fileno(), 0o600)
            body = file.read()
            file.write(_MARK + hashlib.sha256(body).digest())
        os.replace(partial, path.name, dst_dir_fd=folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return path, body


@functools.cache
def _fallback_directory(directory, reason):
    fallback, until = temporary_directory(), ""
    try:
        if fallback == directory:
            raise FileExistsError(fallback)
        with opened_directory(fallback):
            pass
    except OSError:
        fallback = Path(os.path.realpath(tempfile.mkdtemp(prefix="metalcore-cache-")))
        until = " until this process ends"
        atexit.register(shutil.rmtree, fallback, ignore_errors=True)
    warnings.warn(
        f"metalcore: the cache directory {directory} is not used ({reason}); compiled programs are kept in {fallback}"
        f"{until}. Set METALCORE_CACHE_DIR to a directory that only you can write to.",
        RuntimeWarning,
        stacklevel=2,
    )
    return fallback


def _words(error):
    return f"{error.filename}: {error.strerror}" if error.filename else error.strerror or str(error)
