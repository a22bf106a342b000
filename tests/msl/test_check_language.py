"""The check of Metal programs: components of vectors, C++ newer than C++14, keywords. Each fault has a clean twin: the
same program with another line in place of the one that ends with //!"""

import pytest
from checking import assert_found, assert_twins_are_clean, needs_clang

pytestmark = needs_clang

FAULTS = {
    "reference to a component": ("vector-component", """
        kernel void k(device float4* x) {
          float4 v = x[0];
          thread float& r = v.x; //!
          r = 1.0f;
        }""",
        "float r = v.x;"),
    "pointer to a component": ("vector-component", """
        kernel void k(device float4* x) {
          device float* p = &x[0].y; //!
          p[0] = 1.0f;
        }""",
        "device float* p = (device float*)x + 1;"),
    "pointer to an element": ("vector-component", """
        kernel void k(device float* x) {
          auto v = float4(x[0], x[1], x[2], x[3]);
          thread float* p = &v[1]; //!
          p[0] = 1.0f;
        }""",
        "thread float* p = (thread float*)&v;"),
    "component as a result parameter": ("vector-component", """
        inline void f(thread float& a) { a = 1.0f; }
        kernel void k(device float2* x) {
          float2 v = x[0];
          float a = v.x;
          f(v.x); //!
        }""",
        "f(a);"),
    "component of a template's vector": ("vector-component", """
        template <typename T> void f(device T* x) {
          vec<T, 4> v(x[0]);
          thread T* p = &v.y; //!
          x[0] = p[0];
        }
        kernel void k(device float* x) { f(x); }""",
        "thread T* p = (thread T*)&v;"),
    "element of a matrix": ("vector-component", """
        kernel void k(device float2x2* x) {
          float2x2 m = x[0];
          thread float* p = &m[0][1]; //!
          p[0] = 1.0f;
        }""",
        "thread float* p = (thread float*)&m[0];"),
    "fraction as the index of a component": ("language", """
        kernel void k(device float4* x) {
          float4 v = x[0];
          x[0] = v[1.0f]; //!
        }""",
        "x[0] = v[1];"),
    "function defined twice with other names": ("language", """
        inline float f(float a) { return a; }
        inline float f(float b) { return b; } //!
        kernel void k(device float* x) { x[0] = f(x[0]); }""",
        "inline float f(float2 b) { return b.x; }"),
    "extern variable at program scope": ("constant-space", """
        extern float g; //!
        kernel void k(device float* x) { x[0] = 1.0f; }""",
        "extern constant float g;"),
    "fraction in a vector of integers": ("narrowing", """
        kernel void k(device float* x) {
          int2 a = {x[0], x[1]}; //!
          x[0] = a.x;
        }""",
        "int2 a = {int(x[0]), int(x[1])};"),
    "braces that narrow": ("narrowing", """
        kernel void k(device float* x) {
          int a{x[0]}; //!
          x[0] = a;
        }""",
        "int a{int(x[0])};"),
    "vector as a base": ("language", """
        struct P : float4 {}; //!
        kernel void k(device P* x) {}""",
        "struct P { float4 v; };"),
    "value of a kernel": ("language", """
        kernel void k(device float* x) {
          return 1.0f; //!
        }""",
        "return;"),
    "class template without arguments": ("c++17", """
        template <typename T> struct Pair { T a, b; Pair(T x, T y) : a(x), b(y) {} };
        kernel void k(device float* x) {
          Pair p(x[0], x[1]); //!
          x[0] = p.a;
        }""",
        "Pair<float> p(x[0], x[1]);"),
    "template's parameter of any type": ("c++17", """
        template <auto N> //!
        int f() { return N; }
        kernel void k(device int* x) { x[0] = f<3>(); }""",
        "template <int N>"),
    "function's parameter of any type": ("c++17", """
        inline float f(auto a) { return a; } //!
        kernel void k(device float* x) { x[0] = f(x[0]); }""",
        "inline float f(float a) { return a; }"),
    "type that is not said to be one": ("c++17", """
        struct S { typedef float type; };
        template <typename T> float f() {
          T::type a = 1.0f; //!
          return a;
        }
        kernel void k(device float* x) { x[0] = f<S>(); }""",
        "typename T::type a = 1.0f;"),
    "lambda": ("lambda", """
        inline float twice(float a) { return 2.0f * a; }
        kernel void k(device float* x) {
          auto f = [](float a) { return 2.0f * a; }; //!
          x[0] = f(x[0]);
        }""",
        "struct { float operator()(float a) const { return 2.0f * a; } } f;"),
    "lambda as an argument": ("lambda", """
        struct Twice { float operator()(float a) const { return 2.0f * a; } };
        template <typename F> float apply(F f, float a) { return f(a); }
        kernel void k(device float* x) {
          x[0] = apply([&](float a) { return 2.0f * a; }, x[0]); //!
        }""",
        "x[0] = apply(Twice(), x[0]);"),
    "static constant of a function": ("constant-space", """
        kernel void k(device float* x) {
          static const float t[2] = {1.0f, 2.0f}; //!
          x[0] = t[1];
        }""",
        "const float t[2] = {1.0f, 2.0f};"),
    "vertex as a name": ("keyword", """
        kernel void k(device float* x) {
          float4 vertex = float4(1.0f); //!
        }""",
        "float4 vertex_ = float4(1.0f);"),
    "fragment as a member": ("keyword", """
        struct S {
          int fragment; //!
        };
        kernel void k(device S* x) {}""",
        "int fragments;"),
    "noexcept as an operator": ("language", """
        inline float f(float a) noexcept { return a; }
        kernel void k(device float* x) {
          x[0] = noexcept(f(x[0])) ? 1.0f : 0.0f; //!
        }""",
        "x[0] = f(x[0]);"),
    "unknown attribute of a kernel": ("language", """
        [[kernal]] void k(device float* x) { x[0] = 1.0f; } //!""",
        "[[kernel]] void k(device float* x) { x[0] = 1.0f; }"),
}  # fmt: skip
# What Apple's compiler warns about.
WARNINGS = {
    "condition with a variable": ("c++17", """
        kernel void k(device float* x) {
          if (float a = x[0]; a > 1.0f) x[1] = a; //!
        }""",
        "const float a = x[0]; if (a > 1.0f) x[1] = a;"),
    "structured binding": ("c++17", """
        struct P { float a, b; };
        kernel void k(device P* x) {
          P p = x[0];
          auto [a, b] = p; //!
          x[1].a = a + b;
        }""",
        "float a = p.a, b = p.b;"),
    "designated initializer": ("c++17", """
        struct P { float a, b; };
        kernel void k(device P* x) {
          P p = {.a = 1.0f, .b = 2.0f}; //!
          x[0] = p;
        }""",
        "P p = {1.0f, 2.0f};"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_seeded_error_is_caught(name):
    rule, body, _ = FAULTS[name]
    assert_found(body, rule, strict=False)


@pytest.mark.parametrize("name", WARNINGS)
def test_what_apples_compiler_warns_about_is_caught(name):
    rule, body, _ = WARNINGS[name]
    assert_found(body, rule)


def test_the_clean_twins_have_no_findings():
    assert_twins_are_clean({**FAULTS, **WARNINGS})
