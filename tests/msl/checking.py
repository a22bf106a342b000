"""Helpers that the tests of the check share."""

import os

import pytest

from metalcore.msl.check.clang import find_clang
from metalcore.msl.errors import CompilerNotFoundError

try:
    find_clang()
    _missing = ""
except CompilerNotFoundError as error:
    _missing = str(error)

# Continuous integration has Clang, or these tests fail there.
needs_clang = pytest.mark.skipif(bool(_missing) and not os.environ.get("CI"), reason=_missing)
