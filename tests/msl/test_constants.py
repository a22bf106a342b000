"""Constants of a program that are made from other constants, on the host and on CUDA, and constants that lambdas
capture. The arithmetic of #if and of attributes' arguments is C++'s."""

import math
import re
import struct
import time

import numpy
import pytest
import torch

import metalcore
from metalcore.msl.errors import MSLError
from metalcore.msl.language.arithmetic import ArithmeticFailure, evaluate
from metalcore.msl.language.kernels import find_kernels
from metalcore.msl.language.parse import ParsedProgram
from metalcore.msl.language.preprocess import preprocess
from metalcore.msl.language.translate import translate
from metalcore.msl.nvidia import nvrtc

HEADER = "#include <metal_stdlib>\nusing namespace metal;\n"
# name: (declarations, an expression with them, its value)
FORMS = {
    "scalars": ("constant float a = 2; constant float b = a * 2, c = b + 1;", "b + c", 9),
    "const": ("constant const float a = 2; const constant float b[1] = {a}; constant float c = b[0];", "c", 2),
    "const_argument": (("template <typename T> struct S { int n; }; template <> struct S<const int> { int n, m; }; "
                       "constant const S<const int> s = {1, 2}; constant int b = s.m;"), "b", 2),
    "array": ("constant float a[3] = {1, 2, 3}; constant float b = a[1];", "b", 2),
    "elements": ("constant float a[3] = {1, 2, 3}; constant float b[2] = {a[2], a[1] * 2};", "b[0] * 10 + b[1]", 34),
    "of_unknown_length": ("constant int a[] {4, 5, 6}; constant int b[] = {a[1], a[2]};", "b[0] * 10 + b[1]", 56),
    "length": ("constant uint n = 3; constant uint a[n] = {1, 2, n}; constant uint b = a[2] << n;", "b", 24),
    "function": ("constant float a = sqrt(2.0f); constant float b = max(a, 1.0f) * a;", "round(b * 1e6f)", 2e6),
    "component": ("constant float4 v = float4(1, 2, 3, 4); constant float b = v.x + v.w;", "b", 5),
    "swizzle": ("constant float4 v = float4(1, 2, 3, 4); constant float2 w = v.zy; constant float b = w.x;", "b", 3),
    "index": ("constant int3 v = int3(1, 2, 3); constant int b = v[2];", "b", 3),
    "vectors": ("constant float3 v = float3(3, 0, 4); constant float3 w = normalize(v) * length(v);", "w.x + w.z", 7),
    "matrix": ("constant float2x2 m = float2x2(1, 2, 3, 4); constant float2 v = m * float2(1, 1);", "v.x + v.y", 10),
    "half": ("constant half a = 2.5h; constant half b = a * 3.0h + exp2(a - 0.5h);", "b", 11.5),
    "struct": ("struct S { float a; int n[2]; }; constant S s = {1.5f, {2, 3}}; constant float b = s.a * s.n[1];",
               "b", 4.5),
    "structs": ("struct S { float a; }; constant S s[2] = {{1}, {2}}; constant S t = {s[1].a + 1};", "t.a", 3),
    "of_a_struct": ("constant uint m[2] = {7, 8}; struct B { uint v[2]; }; constant B b = {{m[1], m[0]}};",
                    "b.v[0]", 8),
    "member": ("struct S { static constant float k = 3; }; constant float b = S::k * 2;", "b + S::k", 9),
    "members": ("struct S { static constexpr constant int k = 3; static constant int j = k + 1; };", "S::j", 4),
    "template": ("template <typename T> constant T two = T(2); constant float b = two<float> * 2;", "b + two<int>", 6),
    "of_a_template": (("template <typename T> struct L { static constant T most = T(7); }; "
                      "constant int b = L<int>::most + 1;"),
                      "b + L<float>::most", 15),
    "function_of_ours": ("constexpr float f(float x) { return x * 2; } constant float a = 3; constant float b = f(a);",
                         "b", 6),
    "in_a_function": (("constant float a = 2; float f() { static constant float b = a * 2; static constant float "
                       "c[2] = {b, a}; constant float d = c[1] + 1; return b + c[0] + d; }"), "f()", 11),
    "address": (("constant float a[2] = {1, 2}; constant float b[2] = {a[1], a[0]}; "
                "float g(constant float* p) { return p[0] * 10 + p[1]; }"), "g(b) + g(b + 0) + *(&b[1])", 43),
    "infinity": ("constant float a = 1.0f / 0.0f; constant float b = -a; constant float c = max(b, 3.0f);", "c", 3),
    "choice": ("constant bool on = true; constant float a = on ? 2.0f : 3.0f; constant float b = a;", "b", 2),
    "bits": ("constant uint a = as_type<uint>(1.0f); constant float b = as_type<float>(a + 0x800000);", "b", 2),
}  # fmt: skip


@pytest.mark.usefixtures("compiles_for_cuda")
def test_constants_of_constants(device):
    source = HEADER
    for i, (name, (form, expression, _)) in enumerate(FORMS.items()):
        source += f"namespace {name}_ {{ {form} void run(device float* x) {{ x[{i}] = {expression}; }} }}\n"
    source += f"kernel void k(device float* x) {{ {' '.join(f'{name}_::run(x);' for name in FORMS)} }}"
    x = torch.zeros(len(FORMS), device=device)
    metalcore.compile_shader(source).k(x, threads=1, group_size=1)
    assert dict(zip(FORMS, x.tolist())) == {name: value for name, (_, _, value) in FORMS.items()}


# Math in constants on CUDA: NVRTC computes it by the headers' own functions.

ARGUMENTS = [-88.0, -31.4, -2.5, -1.0, -0.7, -0.25, -1e-3, -1e-8, -0.0, 0.0, 1e-20, 1e-4, 0.3, 0.5, 0.9999, 1.0, 1.7,
             3.0, 10.5, 100.25, 1234.5, 65536.0]  # fmt: skip
FUNCTIONS = {
    "acos": numpy.arccos, "acosh": numpy.arccosh, "asin": numpy.arcsin, "asinh": numpy.arcsinh, "atan": numpy.arctan,
    "atanh": numpy.arctanh, "ceil": numpy.ceil, "cos": numpy.cos, "cosh": numpy.cosh, "exp": numpy.exp,
    "exp2": numpy.exp2, "exp10": lambda x: 10**x, "floor": numpy.floor, "fract": lambda x: x - numpy.floor(x),
    "log": numpy.log, "log2": numpy.log2, "log10": numpy.log10, "rint": numpy.rint,
    "rsqrt": lambda x: 1 / numpy.sqrt(x),
    "round": lambda x: numpy.copysign(numpy.floor(abs(x) + 0.5), x), "sin": numpy.sin, "sinh": numpy.sinh,
    "sqrt": numpy.sqrt, "tan": numpy.tan, "tanh": numpy.tanh, "trunc": numpy.trunc,
    "sinpi": lambda x: numpy.sin(numpy.pi * numpy.fmod(x, 2)),
    "cospi": lambda x: numpy.cos(numpy.pi * numpy.fmod(x, 2)),
}  # fmt: skip
PAIRS = {
    "atan2": numpy.arctan2, "copysign": numpy.copysign, "fdim": lambda x, y: numpy.maximum(x - y, 0),
    "fmod": numpy.fmod, "pow": numpy.power,
}  # fmt: skip


def constants(expressions):
    """The values that NVRTC computes for expressions on float."""
    compiler, source = nvrtc.find(), HEADER + f"constant float values[] = {{{','.join(expressions)}}};\n"
    source += "kernel void k(device float* x, uint i [[thread_position_in_grid]]) { x[i] = values[i]; }"
    text, _ = translate(source).cuda_source([("k", "b0")])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "target", lambda capability: f"compute_{capability}")
        output = compiler.compile(text, 90, msl=source).decode()
    content = re.search(rf"\.b8 \S*values\S*\[{4 * len(expressions)}\] = {{(.*?)}}", output)[1]
    return numpy.array(struct.unpack(f"<{len(expressions)}f", bytes(map(int, content.split(",")))))


@pytest.mark.only_on("simulator", "cuda")
def test_math_in_constants_of_cuda():
    points = [(name, (x,)) for name in FUNCTIONS for x in ARGUMENTS]
    points += [(name, (x, y)) for name in PAIRS for x in ARGUMENTS[::2] for y in (-3.0, -0.5, 0.0, 2.0, 2.5, 7.0)]
    found = constants([f"{name}({', '.join(f'{x!r}f' for x in arguments)})" for name, arguments in points])
    with numpy.errstate(all="ignore"):
        expected = [
            numpy.float32((FUNCTIONS.get(name) or PAIRS[name])(*(numpy.float64(numpy.float32(x)) for x in arguments)))
            for name, arguments in points
        ]
    for (name, arguments), value, wanted in zip(points, found, expected):
        step = abs(float(numpy.spacing(wanted))) if math.isfinite(wanted) else 0
        step += 3e-16 * (name in ("sinpi", "cospi"))  # the error of numpy's product with pi
        assert value == wanted or abs(value - wanted) <= step or value != value and wanted != wanted, (name, arguments)


@pytest.mark.only_on("simulator", "cuda")
def test_rounding_and_parts_in_constants_of_cuda():
    found = constants(["fma(1.00000012f, 1.00000012f, -1.00000024f)", "ldexp(0.75f, 3)", "float(ilogb(0.1f))",
                       "nextafter(1.0f, 2.0f)", "nextafter(0.0f, -1.0f)", "exp(100.0f)", "metal::fast::exp2(3.0f)",
                       "metal::precise::log(1.0f)", "unpack_unorm4x8_to_float(255u).x", "rsqrt(0.0f)"])  # fmt: skip
    expected = [2.0**-46, 6, -4, 1 + 2.0**-23, -(2.0**-149), math.inf, 8, 0, 1, math.inf]
    numpy.testing.assert_array_equal(found, numpy.array(expected, dtype=numpy.float32))


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


# Constants by their types that nested lambdas capture, and other values that they capture.
CAPTURED = """
#include <metal_stdlib>
using namespace metal;

template <typename T, T v>
struct constant_of {
  static constexpr constant T value = v;
  constexpr operator T() const thread { return v; }
};
template <typename F>
void with(int x, F f) {
  if (x > 0) f(constant_of<int, 2>{}, x); else f(constant_of<int, 0>{}, x);
}
template <int a, int b>
int joined() { return 10 * a + b; }

kernel void k(device int* y, uint i [[thread_position_in_grid]]) {
  int count = 0;
  with(int(i), [&](auto first, auto changed) {
    with(1, [&](auto second, int) {
      if constexpr (first && second) count += 100;
      with(1, [&](auto third, int) { count += joined<first.value, third>(); });
      changed += 1000;
    });
    count += changed;
  });
  y[i] = count;
}
"""


@pytest.mark.only_on("simulator", "cuda")
@pytest.mark.usefixtures("compiles_for_cuda")
def test_constants_stay_constants_and_references_refer(device):
    y = torch.zeros(2, dtype=torch.int32, device=device)
    metalcore.compile_shader(CAPTURED).k(y, threads=2)
    assert y.tolist() == [2 + 1000, 100 + 22 + 1001]
