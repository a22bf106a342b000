"""Preprocessing and parsing: macros, lines, declarations, refusals, errors that show the user's line, and texts with
their headers, which Metal compiles from memory."""

from pathlib import Path

import pytest

from metalcore.msl.errors import MSLError
from metalcore.msl.language.inline_headers import inline_headers
from metalcore.msl.language.kernels import find_kernels
from metalcore.msl.language.parse import ParsedProgram
from metalcore.msl.language.preprocess import preprocess
from metalcore.msl.language.rewrite import refuse_unsupported
from metalcore.msl.language.translate import translate


def words(source, **options):
    return " ".join(token.text for token in preprocess(source, **options)[0])


def kernels_of(source):
    return {kernel.name: kernel for kernel in find_kernels(ParsedProgram(preprocess(source)[0]))}


@pytest.mark.parametrize(
    "source, expected",
    [
        ("#define TWICE(x) (x) * 2\nTWICE(a + 1)", "( a + 1 ) * 2"),
        ("#define CALL(f, ...) f(0 __VA_OPT__(,) __VA_ARGS__)\nCALL(g) CALL(g, 1, 2)", "g ( 0 ) g ( 0 , 1 , 2 )"),
        ("#define NAME(a, b) a##_##b #a\nNAME(x, 1)", 'x_1 "x"'),
        ("#define ALL(...) #__VA_ARGS__\nALL(a,  b)", '"a, b"'),
        ("#define f 3\n1.f 0x1p-3f 2.5e-3h 1'000u", "1.f 0x1p-3f 2.5e-3h 1'000u"),
        ("a>>=b; c->*d ...", "a >>= b ; c ->* d ..."),
        ("__COUNTER__ __COUNTER__ __LINE__", "0 1 1"),
        ("#if __METAL_VERSION__ >= 310 && defined(__METAL__)\nyes\n#else\nno\n#endif", "yes"),
        ('#if __has_include(<metal_stdlib>) && !__has_include("nowhere.h")\nyes\n#endif', "yes"),
        ('#pragma clang loop unroll(full)\nx _Pragma("unroll") y', "MSL_UNROLL x MSL_UNROLL y"),
        (
            "#pragma unroll // all\n#pragma unroll(4)\n#pragma unroll N\n#pragma nounroll\nx",
            "MSL_UNROLL MSL_UNROLL_BY ( 4 ) MSL_UNROLL_BY ( N ) MSL_UNROLL_BY ( 1 ) x",
        ),
        ("#if 0\n#pragma unroll\n#endif\n#pragma once\n#pragma METAL fp contract(off)\nx", "x"),
        ("#include <metal_stdlib>\n#import <metal_simdgroup_matrix>\nx", "x"),
        ("#ifdef A\none\n#elifdef __METAL__\ntwo\n#elifndef B\nthree\n#else\nfour\n#endif", "two"),
        ("#ifdef A\none\n#elifndef B\ntwo\n#endif", "two"),
        ("#ifdef __has_include\nyes\n#endif\n#pragma\n#pragma /* nothing */\nx", "yes x"),
        ("a /* one\n two */ b // three \\\n four\nc", "a b c"),
    ],
)
def test_preprocess(source, expected):
    assert words(source) == expected


def test_lines_survive_macros_comments_and_continuations():
    source = (
        "/* a\n comment */\n#define LONG(x) \\\n  x + \\\n  x\n\nfirst\nLONG(\n  second)\n#if 0\nnothing\n#endif\nthird"
    )
    lines = {token.text: token.line for token in preprocess(source)[0]}
    assert (lines["first"], lines["second"], lines["third"]) == (7, 8, 13)


def test_includes_are_searched_in_order_and_recorded(tmp_path):
    for name, value in (("one", "from_one"), ("two", "from_two")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.h").write_text(f'#pragma once\n#include "b.h"\n{value}')
        (tmp_path / name / "b.h").write_text(f"b_{value}\n")
    tokens, included, _ = preprocess(
        '#include "a.h"\n#include "a.h"\nend', include_dirs=[tmp_path / "one", tmp_path / "two"]
    )
    assert [token.text for token in tokens] == ["b_from_one", "from_one", "end"]
    assert [token.line for token in tokens] == [1, 3, 3]
    assert sorted(included) == [str(tmp_path / "one" / "a.h"), str(tmp_path / "one" / "b.h")]


@pytest.mark.parametrize(
    "source, message",
    [
        ("\n#include <nowhere.h>", "program_source:2: error: 'nowhere.h' file not found"),
        ("\n\n#error no such GPU", "program_source:3: error: #error no such GPU"),
        ("#define F(a, b) a\nF(1)", "program_source:2: error: .*requires 2 arguments"),
        ("#ifdef A\n", "program_source:1: error: Unterminated #ifdef"),
        ("\n#ifdef\n#endif", "program_source:2: error: #ifdef wants the name of a macro"),
        ("#define", "program_source:1: error: #define wants the name of a macro"),
        ("#define 3 4", "program_source:1: error: #define wants the name of a macro"),
        ("#include", "program_source:1: error: #include wants the name of a file"),
        ("#if 1\n#else\n#else\n#endif", "program_source:3: error: #else after #else"),
        ("#if 0\n#else\n#elif 1\n#endif", "program_source:3: error: #elif after #else"),
        ("#nonsense", "program_source:1: error: invalid preprocessing directive '#nonsense'"),
        ("void f() {\n  g(];\n}", r"program_source:2: error: expected '\)'"),
        ("\nvoid f() {", "program_source:2: error: expected '}'"),
        ("int x", "program_source:1: error: expected ';'"),
    ],
)
def test_errors_carry_the_line(source, message):
    with pytest.raises(MSLError, match=message):
        ParsedProgram(preprocess(source)[0])


def test_kernels_and_their_arguments():
    kernels = kernels_of("""
        namespace outer { kernel void inside(device float* x) {} }
        [[kernel, max_total_threads_per_threadgroup(64)]] void plain(
            device float* out, constant int& n [[buffer(3)]], device const float* in,
            threadgroup float* scratch, uint3 position [[thread_position_in_grid]],
            ushort lane [[thread_index_in_simdgroup]]) {}
        template <typename T, int N> kernel void made(device T* x [[buffer(1)]]) {}
        template [[host_name("made_" "float")]] kernel void made<float, (4 > 2)>(device float* x [[buffer(1)]]);
        template [[host_name("made_half")]] [[kernel]] decltype(made<half, 2>) made<half, 2>;
        [[host_name("renamed")]] kernel void original() {}
    """)
    assert list(kernels) == ["outer::inside", "plain", "renamed", "made_float", "made_half"]
    plain = kernels["plain"]
    assert [(a.name, a.kind, a.index) for a in plain.arguments] == [
        ("out", "buffer", 0),
        ("n", "buffer", 3),
        ("in", "buffer", 1),
        ("scratch", "threadgroup", 0),
        ("position", "position_in_grid", 0),
        ("lane", "index_in_simdgroup", 0),
    ]
    assert plain.max_total_threads == 64
    assert [(a.name, a.index) for a in kernels["made_half"].arguments] == [("x", 1)]


def test_the_bound_of_threads_may_depend_on_template_parameters():
    kernels = kernels_of("""
        constexpr constant uint kEach = 32;
        template <typename T, uint N, bool wide = true, int M = N + 1>
        [[kernel]] [[max_total_threads_per_threadgroup(kEach * N * (wide ? M : 1))]] void k(device T* x) {}
        template [[host_name("two")]] [[kernel]] void k<float, 2>(device float*);
        template [[host_name("four")]] [[kernel]] decltype(k<half, 4, false>) k<half, 4, false>;
        template [[host_name("own")]] [[kernel]] [[max_total_threads_per_threadgroup(7)]] void k<int, 1>(device int*);
    """)
    assert {name: kernel.max_total_threads for name, kernel in kernels.items()} == {"two": 192, "four": 128, "own": 7}
    with pytest.raises(MSLError, match="program_source:2: error: the argument of max_total_threads_per_threadgroup"):
        kernels_of("""template <typename T> constexpr uint size();
            template <typename T> [[kernel, max_total_threads_per_threadgroup(size<T>())]] void k(device T* x) {}
            template [[host_name("k")]] [[kernel]] void k<int>(device int*);""")


def test_indices_may_be_named_constants():
    kernel = kernels_of("""
        enum Index { kFirst, kSecond = 4, kThird };
        enum class Scoped : uint { value = 0x10 };
        constexpr constant int kBase = 3 * 2;
        kernel void k(device int* a [[buffer(kSecond)]], device int* b [[buffer(Index::kThird)]],
                      device int* c [[buffer(kBase + 1)]], device int* d [[buffer(Scoped::value)]], device int* e) {}
    """)["k"]
    assert [a.index for a in kernel.arguments] == [4, 5, 7, 16, 0]


def test_kernels_made_by_macros():
    kernels = kernels_of("""
        template <typename T> kernel void fill(device T* x) {}
        #define INSTANTIATE(name, T) template [[host_name("fill_" #name)]] kernel void fill<T>(device T*);
        #define EACH(F) F(f32, float) F(i32, int)
        EACH(INSTANTIATE)
        #define SIMPLE(name) kernel void name(device int* x) { x[0] = 1; }
        SIMPLE(one) SIMPLE(two)
    """)
    assert sorted(kernels) == ["fill_f32", "fill_i32", "one", "two"]


def test_which_kernels_synchronize():
    kernels = kernels_of("""
        float leaf(float x) { return simd_sum(x); }
        template <typename Op> float middle(Op op, float x) { return op(x); }
        struct Sum { float operator()(float x) const { return leaf(x); } };
        struct Quiet { float operator()(float x) const { return x; } float loud(float x) { return leaf(x); } };
        template <typename Op> kernel void k(device float* x) { x[0] = middle(Op(), x[0]); }
        template [[host_name("sum")]] kernel void k<Sum>(device float*);
        kernel void barrier(device float* x) { threadgroup_barrier(mem_flags::mem_device); }
        kernel void matrix(device float* x) { simdgroup_float8x8 m; }
        kernel void names_only(device float* x, uint simd_lane [[thread_index_in_simdgroup]]) { x[simd_lane] = 1; }
        kernel void plain(device float* x) { x[0] = 1; }
    """)
    assert {name for name, kernel in kernels.items() if kernel.synchronizes} == {"sum", "barrier", "matrix"}


@pytest.mark.parametrize(
    "source, message",
    [
        ("kernel void k(texture2d<float> t [[texture(0)]]) {}", "1: error: textures and samplers"),
        ("void f() {\n  constexpr sampler s(filter::linear);\n}", "2: error: textures and samplers"),
        ("\nvertex float4 v(uint i [[vertex_id]]) { return 0; }", "2: error: 'vertex' functions"),
        ("fragment float4 f() { return 0; }", "1: error: 'fragment' functions"),
        ("[[mesh]] void m() {}", r"1: error: \[\[mesh\]\] functions"),
        ("kernel void k(device float* x) {\n  double y = 0;\n}", "2: error: 'double' is not supported in Metal"),
        ("void f(raytracing::ray r) {}", "1: error: raytracing is not supported"),
        ("kernel void k(visible_function_table<int(int)> t [[buffer(0)]]) {}", "1: error: visible function tables"),
        ("kernel void k(float x) {}", "1: error: argument 'x' of kernel 'k' has no attribute"),
        ("kernel void k(uint x [[amplification_id]]) {}", r"1: error: \[\[amplification_id\]\] is not supported"),
        (
            'template [[host_name("a")]] kernel void missing<int>(device int*);',
            "1: error: explicit instantiation of 'missing'",
        ),
    ],
)
def test_what_is_not_supported_is_named_with_its_line(source, message):
    with pytest.raises(MSLError, match="program_source:" + message):
        kernels_of_supported(source)


def kernels_of_supported(source):
    program = ParsedProgram(preprocess(source)[0])
    refuse_unsupported(program)
    return find_kernels(program)


def test_a_long_source_keeps_its_lines():
    line = (
        "kernel void k{i}(device float* x, uint i [[thread_position_in_grid]]) {{ "
        "if (i < 4) {{ x[i] = x[i] > 0 ? 1.0 : 2.0; }} }}\n"
    )
    source = "".join(line.format(i=i) for i in range(2_000))
    program = ParsedProgram(preprocess(source)[0])
    assert len(program.declarations) == 2_000 and program.tokens[-1].line == 2_000


def test_arguments_whose_types_are_names_of_pointers():
    kernels = kernels_of("""using P = device float*; using C = device const float*; typedef constant uint& R;
        typedef P Q; typedef const Q S; typedef device half H, *G;
        namespace N { using T = threadgroup float*; }
        kernel void k(P x, C y, R n, N::T t, Q q, S s, G g) {}""")
    found = [(a.name, a.kind, a.index, a.type, a.is_writable) for a in kernels["k"].arguments]
    assert found == [
        ("x", "buffer", 0, "", True),
        ("y", "buffer", 1, "", False),
        ("n", "buffer", 2, "uint", False),
        ("t", "threadgroup", 0, "", False),
        ("q", "buffer", 3, "", True),
        ("s", "buffer", 4, "", True),
        ("g", "buffer", 5, "", True),
    ]


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
