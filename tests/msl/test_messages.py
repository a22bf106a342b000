"""Errors of the front end show the user's line, as the compiler's do."""

import pytest

from metalcore.msl.errors import MSLError
from metalcore.msl.language.translate import translate


@pytest.mark.parametrize(
    "line, message",
    [
        ("kernel int f(device float* x) { return 1; }", "kernel 'f' must return void"),
        ("kernel void f(device float* x, uint i) { x[i] = 1; }", "argument 'i' of kernel 'f' has no attribute"),
        ("kernel void f(device double* x) { x[0] = 1; }", "'double' is not supported"),
        ("kernel void f(device float* x { x[0] = 1; }", r"expected '\)'"),
        (
            "kernel void f(device char* x) { x[0] = *(device int*)static_cast<device char*(x); }",
            "expected '>' at the end of the template's arguments",
        ),
        ('#include "no_such_file.h"', "'no_such_file.h' file not found"),
        ("#error not like this", "#error not like this"),
    ],
)
def test_the_line_is_shown(line, message):
    with pytest.raises(MSLError, match=f"^program_source:2: error: .*{message}.*\n") as error:
        translate(f"// first\n{line}\n")
    assert str(error.value).splitlines()[1] == line
