"""inline_headers: what Metal compiles from memory is the text that the preprocessor would have seen."""

from pathlib import Path

import pytest

from metalcore.msl.errors import MSLError
from metalcore.msl.inline_headers import inline_headers
from metalcore.msl.preprocess import preprocess

KERNELS = Path(__file__).resolve().parents[2] / "kernels"


def tokens(source, include_dirs):
    return [token.text for token in preprocess(source, include_dirs=include_dirs, filename="program.metal")[0]]


@pytest.mark.parametrize("path", sorted(KERNELS.rglob("*.metal")), ids=lambda path: path.stem)
def test_every_kernel_keeps_its_tokens(path):
    inlined = inline_headers(path.read_text(), "program.metal", [path.parent, KERNELS])
    assert '#include "' not in inlined
    assert tokens(inlined, []) == tokens(path.read_text(), [path.parent, KERNELS])


def test_a_header_comes_in_once_and_is_found_beside_its_includer(tmp_path):
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "outer.h").write_text('#pragma once\n#include "inner.h"\nint outer;\n')
    (tmp_path / "parts" / "inner.h").write_text("int inner;\n")
    source = '#include "parts/outer.h"\n#include "parts/inner.h"\nint last;\n'
    inlined = inline_headers(source, "program.metal", [tmp_path])
    declarations = [line for line in inlined.splitlines() if line.startswith("int")]
    assert declarations == ["int inner;", "int outer;", "int last;"]
    assert inlined.splitlines()[-2:] == ['#line 3 "program.metal"', "int last;"]


def test_a_header_that_is_nowhere_is_named_with_its_line():
    with pytest.raises(MSLError, match=r'program\.metal:2: error: "missing\.h" file not found'):
        inline_headers('\n#include "missing.h"\n', "program.metal", [])
