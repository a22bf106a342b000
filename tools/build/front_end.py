"""The modules of metalcore that the build needs, without metalcore/__init__.py, which needs what is being built."""

import sys
from types import ModuleType

from .places import PACKAGE

if "metalcore" not in sys.modules:
    sys.modules["metalcore"] = ModuleType("metalcore")
    sys.modules["metalcore"].__path__ = [str(PACKAGE)]

from metalcore import _device_library as device_library
from metalcore.msl.cache import translator_files
from metalcore.msl.errors import CompilerNotFoundError
from metalcore.msl.language.inline_headers import inline_headers
from metalcore.msl.language.preprocess import preprocess
from metalcore.msl.language.translate import translate
from metalcore.msl.nvidia import cuda
from metalcore.msl.runtime import host

__all__ = ["cuda", "device_library", "host", "inline_headers", "preprocess", "translate", "translator_files"]


def compiler():
    """Returns the command of the C++ compiler: the one that compile_shader would use."""
    try:
        return host.find_compiler().command
    except CompilerNotFoundError as error:
        raise SystemExit(str(error)) from None
