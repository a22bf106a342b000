"""Runs a function when somebody has imported a module, without importing it for that."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable

__all__ = ["after_import"]


def after_import(module: str, function: Callable[[], object]) -> None:
    """Calls the function once `module` has been imported: now, if it has been."""
    found = sys.modules.get(module)
    if found is not None and not getattr(found.__spec__, "_initializing", False):
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
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute, function = spec.loader.exec_module, self._function

            def exec_module(module):
                execute(module)
                function()

            spec.loader.exec_module = exec_module
        return spec
