"""Every form in which MSL declares a variable in threadgroup memory: the other threads read what one thread writes. The
forms go through the device, NVRTC and the check."""

import re

import pytest
import torch
from checking import needs_clang

import metalcore
from metalcore.msl.check import check
from metalcore.msl.errors import MSLError
from metalcore.msl.language.translate import translate

pytestmark = pytest.mark.usefixtures("compiles_for_cuda")
HEADER = "#include <metal_stdlib>\nusing namespace metal;\n"
THREADS = 8

# (declared before the kernel, declared in it, an lvalue of float in threadgroup memory for j = 0 … 7)
FORMS = {
    "array": ("", "threadgroup float b[16];", "b[j]"),
    "several": ("", "threadgroup float a, b[2][8], c[4];", "b[1][j]"),
    "attribute first": ("", "threadgroup __attribute__((aligned(16))) float b[16];", "b[j]"),
    "attribute before": ("", "__attribute__((aligned(16))) threadgroup float b[16];", "b[j]"),
    "attribute last": ("", "threadgroup float b[16] __attribute__((aligned(16)));", "b[j]"),
    "attribute of two": ("", "threadgroup float b[8] __attribute__((aligned(16))), c[8] __attribute__((unused));",
                         "c[j]"),
    "alignas first": ("", "alignas(16) threadgroup float b[16];", "b[j]"),
    "alignas between": ("", "threadgroup alignas(16) float b[16];", "b[j]"),
    "alignas of a type": ("", "alignas(float4) threadgroup char b[64];", "((threadgroup float*)b)[j]"),
    "alignas of the name": ("", "threadgroup float b alignas(16) [16];", "b[j]"),
    "standard attribute": ("", "[[maybe_unused]] threadgroup float b [[maybe_unused]] [16];", "b[j]"),
    "parentheses": ("", "threadgroup float (b)[16];", "b[j]"),
    "more parentheses": ("", "threadgroup float ((b)[16]);", "b[j]"),
    "after the type": ("", "float threadgroup b[16];", "b[j]"),
    "after const": ("", "volatile threadgroup float b[16];", "b[j]"),
    "static": ("", "static threadgroup float b[16];", "b[j]"),
    "struct": ("struct S { float x[8]; };", "threadgroup struct S b;", "b.x[j]"),
    "struct defined": ("", "threadgroup struct S { float x; int y; } b[8], c;", "b[j].x"),
    "struct without a name": ("", "threadgroup struct { float x[8]; int y; } s;", "s.x[j]"),
    "struct before the space": ("", "struct { float x[8]; } threadgroup s;", "s.x[j]"),
    "union without a name": ("", "threadgroup union { float x[8]; uint y[8]; } s;", "s.x[j]"),
    "halves in a union": ("", "threadgroup union { struct { half d, m; }; float x; } s[8];", "s[j].x"),
    "typedef": ("", "typedef threadgroup float T; T b[16];", "b[j]"),
    "typedef of an array": ("typedef threadgroup float T[16];", "T b;", "b[j]"),
    "typedef of several": ("", "typedef threadgroup float T, U[8]; U b; T c;", "b[j]"),
    "typedef of a typedef": ("typedef threadgroup float T;\ntypedef T U[16];", "U b;", "b[j]"),
    "typedef in a struct": ("struct S { typedef threadgroup float T; };", "S::T b[16];", "b[j]"),
    "using": ("", "using T = threadgroup float; T b[16];", "b[j]"),
    "template alias": ("template <typename X> using Shared = threadgroup X;", "Shared<float> b[16];", "b[j]"),
    "typedef beside others": (("typedef threadgroup float T;\ntemplate <typename T> T f(T x) { T y = x; return y; }\n"
                              "float g(float x) { typedef float T; T y = x; return y; }"), "T b[16];", "b[j]"),
    "pointer to a typedef": ("typedef threadgroup float T;", "threadgroup float b[16]; T* p = b;", "p[j]"),
    "pointer beside": ("", "threadgroup float b[16], *p = b;", "p[j]"),
    "pointer to it beside": ("", "threadgroup float b[16], (*p)[16] = &b;", "(*p)[j]"),
    "reference beside": ("", "threadgroup float b[16], (&r)[16] = b;", "r[j]"),
    "pointer in threadgroup": ("", ("threadgroup float b[16]; threadgroup float* threadgroup p; if (i == 0) p = b;\n"
                               "threadgroup_barrier(mem_flags::mem_threadgroup);"), "p[j]"),
    "pointers in threadgroup": ("", ("threadgroup float b[16]; threadgroup float* threadgroup p[2];\n"
                                "if (i == 0) p[1] = b;\nthreadgroup_barrier(mem_flags::mem_threadgroup);"), "p[1][j]"),
    "pointer to device in threadgroup": (
        "", ("threadgroup float b[16]; device float* threadgroup p; if (i == 0) p = out + 8;\n"
        "threadgroup_barrier(mem_flags::mem_threadgroup);"), "p[j]"),
    "initialized": ("", "threadgroup float b[8] = {1, 2}; threadgroup int n = 3;", "b[j]"),
    "initialized by braces": ("", "threadgroup float b[8]{}, c{2};", "b[j]"),
    "template": ("template <typename T> struct Two { T x[8], y[8]; };", "threadgroup Two<float> b;", "b.y[j]"),
    "nested templates": ("template <typename T> struct One { T x; };\ntemplate <typename T> struct Two { T x[8]; };",
                         "threadgroup Two<One<float>> b;", "b.x[j].x"),
    "constant bounds": ("constant constexpr int N = 4;", "threadgroup float b[(N > 3 ? 2 : 1) * N];", "b[j]"),
    "vectors": ("", "threadgroup metal::float4 b[2];", "b[j / 4][j % 4]"),
    "decltype": ("", "threadgroup decltype(1.0f) b[8];", "b[j]"),
    "pointer by a trait": ("", "threadgroup float b[8]; metal::conditional_t<true, threadgroup float*, int> p = b;",
                           "p[j]"),
    "lambda": ("", "threadgroup float b[8]; auto f = [&](uint n) -> threadgroup float& { return b[n]; };", "f(j)"),
    "array of pointers": ("", "threadgroup float b[16]; threadgroup float* thread p[1] = {b};", "p[0][j]"),
    "block": ("", "threadgroup float* p;\n{ threadgroup float b[8]; p = b; }", "p[j]"),
    "loop": ("", "threadgroup float* p;\nfor (int n = 0; n < 2; ++n) { threadgroup float b[8]; p = b; }", "p[j]"),
}  # fmt: skip


def program(before, declarations, element):
    """A program in which each of 8 threads writes its number, and reads what the opposite thread has written."""
    return (
        HEADER
        + f"""{before}
kernel void k(device float* out, uint i [[thread_index_in_threadgroup]]) {{
{declarations}
{{ uint j = i; {element} = i + 1; }}
threadgroup_barrier(mem_flags::mem_threadgroup);
{{ uint j = {THREADS - 1} - i; out[i] = {element}; }}
}}"""
    )


@pytest.mark.parametrize("form", FORMS)
def test_what_a_thread_writes_the_others_read(device, form):
    out = torch.zeros(2 * THREADS, device=device)
    metalcore.compile_shader(program(*FORMS[form])).k(out, threads=THREADS, group_size=THREADS)
    assert out.tolist()[:THREADS] == [THREADS - i for i in range(THREADS)]


# Clang accepts no alignas between specifiers and no word before the space, and Apple's compiler refuses the others.
NOT_FOR_MACS = {
    "alignas between": "attribute-place",
    "struct before the space": "language",
    "initialized": "threadgroup-variable",
    "initialized by braces": "threadgroup-variable",
    "lambda": "lambda",
}


@needs_clang
@pytest.mark.parametrize("form", FORMS)
def test_the_check_takes_it_unless_a_mac_does_not(form):
    found = {finding.rule for finding in check(program(*FORMS[form]), strict=False)}
    assert found == ({NOT_FOR_MACS[form]} if form in NOT_FOR_MACS else set())


@pytest.mark.parametrize("alignment", ["alignas(64)", "__attribute__((aligned(64)))", "alignas(Wide)"])
def test_alignment_is_kept(device, alignment):
    source = (
        HEADER
        + f"""
        struct alignas(64) Wide {{ float x; }};
        kernel void k(device int* out, uint i [[thread_index_in_threadgroup]]) {{
          threadgroup char a[1];
          {alignment} threadgroup char b[3];
          threadgroup char c[1], d {alignment.replace("alignas(Wide)", "alignas(64)")} [3];
          a[0] = c[0] = 1;
          out[0] = int((ulong)b % 64) + int((ulong)d % 64) + a[0] + c[0];
        }}"""
    )
    out = torch.zeros(1, dtype=torch.int32, device=device)
    metalcore.compile_shader(source).k(out, threads=1)
    assert out.tolist() == [2]


def test_a_function_ends_with_its_body(device):
    """What follows it is a declaration of its own, whose further names are not the function's."""
    source = (
        HEADER
        + """
        device float* behind(device float* p, uint i) { return p + i; }
        constant constexpr float kFirst = 2.0f, kSecond = 3.0f;
        kernel void k(device float* out) { *behind(out, 1) = kFirst + kSecond; }"""
    )
    out = torch.zeros(2, device=device)
    metalcore.compile_shader(source).k(out, threads=1)
    assert out.tolist() == [0, 5]


REFUSED = [
    ("threadgroup float b[4];", "", "a threadgroup variable .'b'. must be declared in a block"),
    ("struct S { threadgroup float x; };", "", "a threadgroup variable .'x'. must be declared in a block"),
    ("device float b[4];", "", "a variable .'b'. cannot be in device memory"),
    ("", "device float x;", "a variable .'x'. cannot be in device memory"),
    ("void f(threadgroup float x) {}", "", "'x' is itself in threadgroup memory"),
    ("threadgroup float f();", "", "'f' cannot be a function whose result is in threadgroup memory"),
    ("", "threadgroup float x(1);", "initialized by parentheses"),
    ("", "float x = (threadgroup float)i;", "the type here is itself in threadgroup memory"),
    ("", "for (threadgroup float x;;) {}", "'x' is itself in threadgroup memory"),
    ("", "if (i) threadgroup float x;", "must be declared in a block"),
    ("", "threadgroup auto x = 1.0f;", "the type of a threadgroup variable .'x'. must be written"),
    ("", "threadgroup float* device p;", "a variable .'p'. cannot be in device memory"),
    ("", "thread threadgroup float x;", "'x' is in two address spaces, 'thread' and 'threadgroup'"),
    ("", "threadgroup float;", "a threadgroup variable must have a name"),
    ("", "threadgroup;", "it is not understood what 'threadgroup' belongs to"),
    ("", "i = i + threadgroup;", "it is not understood what 'threadgroup' belongs to"),
    ("", "metal::remove_pointer_t<threadgroup float*> b[4];", "whether this type is in threadgroup memory itself"),
    ("", "typename metal::remove_pointer<threadgroup float*>::type b[4];", "whether this type is in threadgroup"),
    ("using T = metal::remove_pointer_t<threadgroup float*>;", "", "whether this type is in threadgroup memory itself"),
    ("", "threadgroup float b[4]; auto f = [=](int n) { return b[n]; };", "must capture by reference"),
    ("", "threadgroup_imageblock float x;", "'threadgroup_imageblock' is not supported"),
    ("typedef threadgroup float T;\nstruct S { T x; };", "", "a threadgroup variable .'x'. must be declared in"),
    ("struct A { typedef threadgroup float T; };\nstruct B { typedef float T; };", "A::T x;", "which 'T' is meant"),
    ("typedef device float T;", "T x;", "a variable .'x'. cannot be in device memory"),
    ("", "threadgroup __attribute__((address_space(3))) float b[4];", "address_space"),
    ("", 'threadgroup float b[4] __attribute__((section("x")));', "section"),
    ("", "__attribute__((unheard_of)) threadgroup float b[4];", "unheard_of"),
    ("", "[[unheard_of]] float b[4];", "unheard_of"),
    ("struct [[clang::trivial_abi]] S { float x; };", "", "trivial_abi"),
]


@pytest.mark.parametrize("before, declarations, message", REFUSED)
def test_what_is_not_understood_is_refused_with_its_line(before, declarations, message):
    source = (
        f"\n\n{before}\nkernel void k(device float* out, uint i [[thread_index_in_threadgroup]]) {{\n{declarations}\n}}"
    )
    lines = source.splitlines()
    line = lines.index((declarations or before).splitlines()[-1]) + 1
    with pytest.raises(MSLError, match=message) as error:
        translate(source)
    assert int(re.match(r"program_source:(\d+): error", str(error.value))[1]) == line
