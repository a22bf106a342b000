"""What the tests of the check share."""

import pytest

from metalcore.msl.check.clang import find_clang
from metalcore.msl.errors import CompilerNotFoundError

try:
    find_clang()
    _missing = ""
except CompilerNotFoundError as error:
    _missing = str(error)

needs_clang = pytest.mark.skipif(bool(_missing), reason=_missing)
