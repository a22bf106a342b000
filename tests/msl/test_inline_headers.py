"""inline_headers: Metal compiles the text from memory that the preprocessor would have seen."""

from pathlib import Path

import pytest

from metalcore.msl.errors import MSLError
from metalcore.msl.language.inline_headers import inline_headers
from metalcore.msl.language.preprocess import preprocess

KERNELS = Path(__file__).resolve().parents[2] / "kernels"


def tokens(source, include_dirs):
    return [token.text for token in preprocess(source, include_dirs=include_dirs, filename="program.metal")[0]]


def headers(path):
    return path.read_text().count('#include "')


# The file with the most headers of each family.
FILES = {path.parent: path for path in sorted(KERNELS.rglob("*.metal"), key=headers)}


@pytest.mark.parametrize("path", list(FILES.values()), ids=lambda path: path.stem)
def test_kernels_keep_their_tokens(path):
    inlined = inline_headers(path.read_text(), "program.metal", [path.parent, KERNELS])
    assert '#include "' not in inlined
    assert tokens(inlined, []) == tokens(path.read_text(), [path.parent, KERNELS])


def test_a_header_comes_in_once_and_is_found_beside_its_includer(tmp_path):
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "outer.h").write_text('#pragma once\n#include "inner.h"\nint outer;\n')
    (tmp_path / "parts" / "inner.h").write_text("#pragma once\nint inner;\n")
    source = '#include "parts/outer.h"\n#include "parts/inner.h"\nint last;\n'
    inlined = inline_headers(source, "program.metal", [tmp_path])
    declarations = [line for line in inlined.splitlines() if line.startswith("int")]
    assert declarations == ["int inner;", "int outer;", "int last;"]
    assert inlined.splitlines()[-2:] == ['#line 3 "program.metal"', "int last;"]


def test_a_header_that_is_nowhere_is_named_with_its_line():
    with pytest.raises(MSLError, match=r'program\.metal:2: error: "missing\.h" file not found'):
        inline_headers('\n#include "missing.h"\n', "program.metal", [])


def inlined(tmp_path, source, **headers):
    """(the tokens of a program whose headers were put in, those that the preprocessor sees)."""
    for name, text in headers.items():
        (tmp_path / f"{name}.h").write_text(text)
    found = tokens(inline_headers(source, "program.metal", [tmp_path]), [])
    assert found == tokens(source, [tmp_path])
    return found


def test_a_header_without_a_guard_comes_in_each_time(tmp_path):
    source = '#define X a\n#include "list.h"\n#undef X\n#define X b\n#include "list.h"\n'
    assert inlined(tmp_path, source, list="X X\n") == ["a", "a", "b", "b"]


@pytest.mark.parametrize("header", ["#pragma once\nx\n", "// x\n/* y\n */\n#ifndef A_H\n#define A_H\nx\n#endif\n"])
def test_a_header_that_was_left_out_at_first_comes_in_later(tmp_path, header):
    source = '#if 0\n#include "a.h"\n#endif\n#ifdef __METAL__\n#include "a.h"\n#endif\n#include "a.h"\ny\n'
    assert inlined(tmp_path, source, a=header) == ["x", "y"]


def test_headers_that_include_each_other(tmp_path):
    headers = {"a": '#pragma once\n#include "b.h"\nx\n', "b": '#ifndef B\n#define B\n#include "a.h"\ny\n#endif\n'}
    assert inlined(tmp_path, '#include "a.h"\n#include "b.h"\nz\n', **headers) == ["y", "x", "z"]
    (tmp_path / "c.h").write_text('\n#include "c.h"\n')
    with pytest.raises(MSLError, match=r"c\.h:2: error: #include nested too deeply"):
        inline_headers('#include "c.h"\n', "program.metal", [tmp_path])
