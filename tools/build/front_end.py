"""The modules of metalcore that the build needs, without metalcore/__init__.py, which needs what is being built."""

import sys
from types import ModuleType

from .places import PACKAGE

if "metalcore" not in sys.modules:
    sys.modules["metalcore"] = ModuleType("metalcore")
    sys.modules["metalcore"].__path__ = [str(PACKAGE)]

from metalcore import _device_library as device_library
from metalcore.msl import cuda, host
from metalcore.msl.errors import CompilerNotFoundError
from metalcore.msl.inline_headers import inline_headers
from metalcore.msl.preprocess import preprocess
from metalcore.msl.translate import translate

__all__ = ["cuda", "device_library", "host", "inline_headers", "preprocess", "translate"]


def compiler():
    """The command of the C++ compiler: the one that compile_shader would use."""
    try:
        return host.find_compiler().command
    except CompilerNotFoundError as error:
        raise SystemExit(str(error)) from None


def translator():
    """The files that every translated program depends on."""
    folder = PACKAGE / "msl"
    return [path for path in [*folder.glob("*.py"), *(folder / "include").rglob("*")] if path.is_file()]
