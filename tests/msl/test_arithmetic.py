"""The arithmetic of #if and of attributes' arguments is C++'s."""

import time

import pytest

from metalcore.msl.errors import MSLError
from metalcore.msl.language.arithmetic import ArithmeticFailure, evaluate
from metalcore.msl.language.kernels import find_kernels
from metalcore.msl.language.parse import ParsedProgram
from metalcore.msl.language.preprocess import preprocess


@pytest.mark.parametrize("expression", [
    "true", "!false", "not false and true", "true ? 1 : 0",
    "-7 % 3 == -1", "7 % -3 == 1", "-7 / 2 == -3", "10 - 3 - 2 == 5", "100 / 10 / 2 == 5",
    "0b11 == 3", "1'000 == 1000", "0xFFull == 255", "017 == 15", "1 == 1L", "42uLL == 42",
    "9223372036854775807 + 1 < 0", "-9223372036854775807 - 2 > 0", "0xffffffffffffffff > 0",
    "~0u == 18446744073709551615u",
    "18446744073709551615 == -1", "-1 > 0u", "(1 ? -1 : 0u) > 0", "-1 >> 1 == -1", "1 << 63 < 0", "1u << 63 > 0",
    "(-9223372036854775807 - 1) / -1 < 0",
    "!(0 && 1 / 0)", "1 || 1 / 0", "1 ? 2 : 1 / 0", "(0 ? 1 % 0 : 2) == 2", "!(0 && (1 ? 1 / 0 : 1 << 99))",
    "0 ? 0 : 0 ? 0 : 5", "(1 ? 0 ? 3 : 4 : 5) == 4", "1 | 2 ^ 3 & 1", "5 > 4 == 1", "- - ~ -1 == 0",
    "'a' == 97", "'\\n' == 10", "'\\377' < 0", "'\\x41' == 65", "'ab' == 24930", "L'a' == 97",
    "unknown == 0", "defined(__METAL__) && !defined nothing", "defined __has_include",
])  # fmt: skip
def test_true(expression):
    tokens = preprocess(f"#if {expression}\nyes\n#elif !({expression})\nno\n#endif")[0]
    assert [token.text for token in tokens] == ["yes"]


@pytest.mark.parametrize("expression, message", [
    ("1 / 0", "#if 1 / 0: division by zero"),
    ("1 % 0", "remainder of a division by zero"),
    ("0 || 1 / (2 - 2)", "division by zero"),
    ("1 << 64", "shift by 64, which is not 0 to 63"),
    ("1 >> -1", "shift by -1"),
    ("1 << 1000000000000", "shift by 1000000000000"),
    ("18446744073709551616", "does not fit in 64 bits"),
    ("1.5", "'1.5' is no integer"),
    ("08", "'08' is no integer"),
    ("1x", "'1x' is no integer"),
    ("1 +", "expected a value at the end"),
    ("", "#if wants an expression"),
    ("(1", r"expected '\)'"),
    ("1)", r"extraneous '\)'"),
    ("1 ? 2", "expected ':' after"),
    ("1 : 2", "':' without"),
    ("1 2", "'2' is no operator"),
    ("1 = 1", "'=' is no operator"),
    ('"text"', "expected a value before"),
    ("'\\q'", "unknown escape sequence"),
    ("F(1)", "the function-like macro 'F' is not defined"),
    ("defined", "'defined' wants the name of a macro"),
    ("defined(3)", "'defined' wants the name of a macro"),
    ("__has_include <a.h>", "'__has_include' wants the name of a file"),
])  # fmt: skip
def test_refused_with_the_line(expression, message):
    with pytest.raises(MSLError, match=f"^program_source:2: error: .*{message}"):
        preprocess(f"\n#if {expression}\n#endif")


def test_nesting_has_no_end():
    for expression in ("(" * 5000 + "1" + ")" * 5000, "!" * 5000 + "1", "1 ? 1 : " * 5000 + "1"):
        assert preprocess(f"#if {expression}\nyes\n#endif")[0]


def test_names_in_attributes():
    assert evaluate(["kA", "*", "2", "+", "true"], {"kA": 20}.get).value == 41
    with pytest.raises(ArithmeticFailure, match="'kB' is no integer constant"):
        evaluate(["kB"], {}.get)
    program = ParsedProgram(
        preprocess("""
        constant int kSeven = -7;
        kernel void k(device int* a [[buffer(kSeven % 3 + 0b11)]], device int* b [[buffer((kSeven / 2) + 1'0)]]) {}
    """)[0]
    )
    assert [argument.index for argument in find_kernels(program)[0].arguments] == [2, 7]
    begin = time.perf_counter()
    with pytest.raises(MSLError, match="the index of argument 'a' is no integer constant"):
        find_kernels(ParsedProgram(preprocess("kernel void k(device int* a [[buffer(1 << 100000000000)]]) {}")[0]))
    assert time.perf_counter() - begin < 1
