"""Programs without an end, or with too many of something, are refused soon and with their line."""

import sys
import time

import pytest

from metalcore.msl.errors import MSLError
from metalcore.msl.language.parse import ParsedProgram
from metalcore.msl.language.preprocess import preprocess
from metalcore.msl.language.translate import translate

KERNEL = "kernel void k(device float* x) { x[0] = 1; }\n"


def at_depth(depth, call):
    """Makes a call from a stack that is deeper by `depth` calls."""
    return at_depth(depth - 1, call) if depth else call()


@pytest.mark.parametrize("depth", [0, 300])
def test_headers_that_include_themselves_or_each_other(tmp_path, depth):
    (tmp_path / "self.h").write_text('int a;\n#include "self.h"\n')
    (tmp_path / "one.h").write_text('\n#include "other.h"\n')
    (tmp_path / "other.h").write_text('#include "one.h"\n#include "one.h"\n')
    for name, place in (("self.h", "self.h:2"), ("one.h", r"one.h:2|other.h:1")):
        with pytest.raises(MSLError, match=f"({place}): error: #include nested too deeply"):
            at_depth(depth, lambda: preprocess(f'#include "{name}"\n', include_dirs=[tmp_path]))


def test_as_many_headers_as_clang_nests(tmp_path):
    for i in range(200):
        (tmp_path / f"{i}.h").write_text(f'#include "{i + 1}.h"\n')
    (tmp_path / "200.h").write_text("last")
    assert [t.text for t in preprocess('#include "1.h"', include_dirs=[tmp_path])[0]] == ["last"]
    with pytest.raises(MSLError, match="199.h:1: error: #include nested too deeply"):
        preprocess('#include "0.h"', include_dirs=[tmp_path])


def test_headers_that_double(tmp_path):
    for i in range(40):
        (tmp_path / f"{i}.h").write_text(f'#include "{i + 1}.h"\n' * 2)
    (tmp_path / "40.h").write_text("")
    with pytest.raises(MSLError, match=r"\.h:[12]: error: too many files are included"):
        preprocess('#include "0.h"', include_dirs=[tmp_path])


@pytest.mark.parametrize("source", [
    "#define A0 x x\n" + "".join(f"#define A{i + 1} A{i} A{i}\n" for i in range(40)) + "A40\n",
    "#define A0(x) x x\n" + "".join(f"#define A{i + 1}(x) A{i}(x) A{i}(x)\n" for i in range(40)) + "A40(1)\n",
    "#define F(x) x x\n" + "F(" * 40 + "1" + ")" * 40 + "\n",
], ids=["names", "functions", "arguments"])  # fmt: skip
def test_macros_that_double(source):
    line = source.count("\n")
    with pytest.raises(MSLError, match=f"program_source:{line}: error: the macros of this line expand to too many tok"):
        preprocess(source)


@pytest.mark.parametrize("source", [
    "#define A0 1\n" + "".join(f"#define A{i + 1} A{i}\n" for i in range(2000)) + "A2000\n",
    "#define F(x) x\n" + "F(" * 2000 + "1" + ")" * 2000 + "\n",
], ids=["names", "arguments"])  # fmt: skip
def test_macros_in_macros(source):
    line = source.count("\n")
    with pytest.raises(MSLError, match=f"program_source:{line}: error: macros or headers are nested too deeply"):
        preprocess(source)


def test_many_macros_of_a_long_program():
    source = "#define F(x) x x x\n#define G(x) F(x) F(x)\n" + "G(G(a)) G(b)\n" * 1000
    assert len(preprocess(source)[0]) == 42_000


@pytest.mark.parametrize("depth", [0, 500])
@pytest.mark.parametrize("source", [
    "template<" * 5000 + "class T" + "> class" * 5000 + " U> void f();\n",
    "template<class T> " * 5000 + "void f();\n",
    "int x = " + "(" * 5000 + "1" + ")" * 5000 + ";\n",
    "namespace a {" * 5000 + "}" * 5000,
    "struct a {" * 5000 + "};" * 5000,
    "void f() " + "{" * 5000 + "}" * 5000,
], ids=["template<", "template<>", "(", "namespace", "struct", "{"])  # fmt: skip
def test_brackets_in_brackets(source, depth):
    with pytest.raises(MSLError, match="program_source:1: error: bracket nesting level exceeded maximum of 256"):
        at_depth(depth, lambda: translate(source + KERNEL))


@pytest.mark.parametrize("opening, closing", [("namespace a {", "}"), ("struct a {", "};")])
def test_what_python_cannot_nest_is_an_error_of_the_program(opening, closing):
    source = opening * 250 + closing * 250 + KERNEL
    assert [kernel.name for kernel in translate(source).kernels] == ["k"]
    with pytest.raises(MSLError, match="program_source:1: error: the program is nested too deeply"):
        at_depth(sys.getrecursionlimit() - 300, lambda: translate(source))  # Inductor raises the limit


def test_comparisons_in_a_row():
    comparisons = " && ".join(["a < b"] * 100)
    ParsedProgram(preprocess(f"bool f(int a, int b) {{ bool c = {comparisons}; return c; }}")[0])


def test_a_long_chain_of_conditionals_takes_linear_time():
    chain = " ".join(f"x[1] == {i} ? {i} :" for i in range(3000))
    started = time.perf_counter()
    text = translate(f"kernel void k(device int* x) {{ x[0] = {chain} 7; }}").source()
    assert text.count("msl::chosen(") == 3000
    assert time.perf_counter() - started < 20  # seconds; it took 40 when each `?` walked over the rest of the chain
