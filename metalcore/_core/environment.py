"""What surrounds metalcore: variables of the environment that switch something on or off, and other libraries, which it
imports only where a caller has them or needs them."""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

__all__ = ["after_import", "require_transformers", "switched_on"]

_ON = ("1", "on", "yes", "true")
_OFF = ("0", "off", "no", "false")


def switched_on(variable: str, default: bool = False) -> bool:
    """Returns whether a variable of the environment is 1, on, yes or true and not 0, off, no or false, in any case. An
    empty one is as none, which has the default. csrc/backends/simulator/modes.cpp is the same in C++.

    Raises:
        ValueError: it is something else.
    """
    setting = os.environ.get(variable, "")
    text = setting.lower()
    if text and text not in (*_ON, *_OFF):
        raise ValueError(
            f"metalcore: {variable} must be {', '.join(_ON[:-1])} or {_ON[-1]}, or {', '.join(_OFF[:-1])} or "
            f"{_OFF[-1]}, got '{setting}'"
        )
    return text in _ON if text else default


def require_transformers(what: str, least: tuple[int, int] = (5, 4)) -> Any:
    """Returns the module transformers, for `what`, which goes with the release `least` and newer ones.

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


def after_import(module: str, function: Callable[[], object]) -> None:
    """Calls the function once `module` has been imported: now, if it has been."""
    entry = sys.modules.get(module)
    if entry is not None and not getattr(entry.__spec__, "_initializing", False):
        function()
    else:
        sys.meta_path.insert(0, _Finder(module, function))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module as the other finders do, and lets its loader call the function at the end."""

    def __init__(self, module, function):
        self._module, self._function = module, function

    def find_spec(self, fullname, path, target=None):
        if fullname != self._module:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            sys.meta_path.insert(0, self)  # who asks for the spec may not import the module
        if spec is not None and spec.loader is not None:
            execute, function = spec.loader.exec_module, self._function

            def exec_module(module):
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                execute(module)
                function()

            spec.loader.exec_module = exec_module
        return spec
