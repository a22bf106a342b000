"""transformers, of the releases that metalcore goes with."""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["require_transformers"]


def require_transformers(what: str, least: tuple[int, int] = (5, 4)) -> Any:
    """The module transformers, for `what`, which goes with the release `least` and newer ones.

    In 5.4 masks of attention got the arguments that they have now.

    Raises:
        ImportError: transformers is not installed, or is older.
    """
    library = import_module("transformers")  # by its name, since a type checker would read thousands of files
    if tuple(map(int, library.__version__.split(".")[:2])) < least:
        raise ImportError(
            f"{what} needs transformers {least[0]}.{least[1]} or newer, and this is {library.__version__}"
        )
    return library
