"""Copies of files that programs may have open."""

import os
import shutil


def copy(source, target):
    """Replaces an older target as a whole: a process that has the old file open keeps it."""
    if target.exists() and target.stat().st_mtime >= source.stat().st_mtime:
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    shutil.copy2(source, temporary)
    os.replace(temporary, target)


def copy_tree(source, target):
    for path in source.rglob("*"):
        if path.is_file():
            copy(path, target / path.relative_to(source))


def remove_others(folder, kept):
    """Removes the files of a folder that are not among those kept, and empty folders."""
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()
        elif path.is_file() and path not in kept:
            path.unlink()
