"""Directories and files that only this user and root can change: code is loaded from no others.

Each part of a path is opened inside the part before it, without following symbolic links, and judged once it is open.
So the file that was judged is the one that is used, even if someone renames directories meanwhile.
"""

import contextlib
import errno
import grp
import os
import pwd
import stat
from pathlib import Path

_DIRECTORY = os.O_DIRECTORY | os.O_NOFOLLOW | getattr(os, "O_PATH", os.O_RDONLY)
# Opening must not wait for a fifo that stands in a file's place.
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK


@contextlib.contextmanager
def opened_directory(path):
    """Opens a directory and gives its descriptor. It makes missing directories, also those above, with mode 0700.

    Args:
        path: absolute, without symbolic links.

    Raises:
        OSError: it cannot be made. PermissionError: it belongs to other users, they can write to it, or they could put
            another directory in its place.
    """
    path = Path(path)
    descriptor = os.open(path.anchor, _DIRECTORY)
    try:
        for place in [*reversed(path.parents), path]:
            if place.name:
                inner = _open_inside(descriptor, place)
                os.close(descriptor)
                descriptor = inner
            found = _status(descriptor)
            problem = _problem(found) if place == path else _problem_above(found)
            if problem:
                raise PermissionError(errno.EPERM, problem, str(place))
        yield descriptor
    finally:
        os.close(descriptor)


def open_file(directory, path, flags):
    """Returns a descriptor of a regular file, opened with these flags by its name in an open directory.

    Raises:
        OSError: it is missing. PermissionError: it is no regular file, it belongs to other users, or they can write to
            it.
    """
    try:
        descriptor = os.open(path.name, flags | _FILE, 0o600, dir_fd=directory)
    except OSError as error:
        raise _at(path, error) from None
    found = _status(descriptor)
    problem = _problem(found) if stat.S_ISREG(found.st_mode) else "is not a regular file"
    if problem:
        os.close(descriptor)
        raise PermissionError(errno.EPERM, problem, str(path))
    return descriptor


def _open_inside(descriptor, place):
    try:
        with contextlib.suppress(FileNotFoundError):
            return os.open(place.name, _DIRECTORY, dir_fd=descriptor)
        with contextlib.suppress(FileExistsError):  # another process may make it meanwhile
            os.mkdir(place.name, 0o700, dir_fd=descriptor)
            os.chmod(place.name, 0o700, dir_fd=descriptor)  # the umask may have removed permissions
        return os.open(place.name, _DIRECTORY, dir_fd=descriptor)
    except OSError as error:
        raise _at(place, error) from None


def _at(path, error):
    """Returns the error, with the whole path in its message."""
    if error.errno in (errno.ELOOP, errno.EMLINK, errno.ENOTDIR) and path.is_symlink():
        return PermissionError(errno.EPERM, "is a symbolic link", str(path))
    return OSError(error.errno, error.strerror, str(path))


_status = os.fstat


def _problem(found):
    """Returns why a file or directory is not used; None where it is used."""
    if found.st_uid not in (0, os.geteuid()):
        return f"belongs to {_user(found.st_uid)}"
    return "can be written by others" if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) else None


def _problem_above(found):
    """Returns why files below a directory are not used; None where they are used."""
    if found.st_uid not in (0, os.geteuid(), _root_here()):
        return f"belongs to {_user(found.st_uid)}"
    writers = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if writers == stat.S_IWGRP and _is_own_group(found.st_gid):
        return None
    # In a directory with the sticky bit, such as /tmp, nobody can rename files of other users.
    return "can be written by others" if writers and not found.st_mode & stat.S_ISVTX else None


def _root_here():
    """Returns the user id that this process sees for the machine's root, who owns /proc: a user namespace may have no
    root."""
    try:
        return os.stat("/proc").st_uid
    except OSError:
        return 0


def _is_own_group(group):
    """Returns whether a group is the one that many systems make for each user: it has the user's name and no other
    members."""
    try:
        user, found = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    return (found.gr_gid, found.gr_name) == (user.pw_gid, user.pw_name) and set(found.gr_mem) <= {user.pw_name}


def _user(number):
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"user {number}"
