"""The check of Metal programs: arguments of kernels, function constants, threadgroup variables, atomics. Each fault has
a clean twin: the same program with another line in place of the one that ends with //!"""

import pytest
from checking import HEAD, assert_found, assert_twins_are_clean, needs_clang

from metalcore.msl.check import check

pytestmark = needs_clang

FAULTS = {
    "scalar by value": ("kernel", """
        kernel void k(device float* x [[buffer(0)]],
                      uint n [[buffer(1)]]) { x[0] = n; } //!""",
        "constant uint& n [[buffer(1)]]) { x[0] = n; }"),
    "struct by value": ("kernel", """
        struct P { int n; };
        kernel void k(device int* x [[buffer(0)]],
                      P p [[buffer(1)]]) { x[0] = p.n; } //!""",
        "constant P& p [[buffer(1)]]) { x[0] = p.n; }"),
    "rvalue reference": ("kernel", """
        kernel void k(
            device float&& x [[buffer(0)]]) { x = 1.0f; } //!""",
        "device float& x [[buffer(0)]]) { x = 1.0f; }"),
    "default of an argument": ("kernel", """
        kernel void k(device float* x,
                      uint i [[thread_position_in_grid]] = 0) { x[i] = 1.0f; } //!""",
        "uint i [[thread_position_in_grid]]) { x[i] = 1.0f; }"),
    "kernel called": ("kernel", """
        kernel void one(device float* x) { x[0] = 1.0f; }
        inline void plain(device float* x) { x[0] = 1.0f; }
        kernel void k(device float* x) {
          one(x); //!
        }""",
        "plain(x);"),
    "instantiation of no kernel": ("kernel", """
        template <typename T> kernel void k(device T* x) {}
        template <typename T> void f(device T* x) {}
        template [[host_name("f_float")]] void f<float>(device float*); //!""",
        'template [[host_name("k_float")]] kernel void k<float>(device float*);'),
    "array without a space": ("address-space", """
        kernel void k(
            float x [[buffer(0)]] [4]) { float a = x[0]; } //!""",
        "constant float x [[buffer(0)]] [4]) { float a = x[0]; }"),
    "pointer to a pointer": ("address-space", """
        kernel void k(
            device float** x [[buffer(0)]]) { x[0][0] = 1.0f; } //!""",
        "device float* device* x [[buffer(0)]]) { x[0][0] = 1.0f; }"),
    "a position twice": ("attribute-type", """
        kernel void k(device float* x, uint i [[thread_position_in_grid]],
                      uint j [[thread_position_in_grid]]) { x[i] = j; } //!""",
        "uint j [[threads_per_grid]]) { x[i] = j; }"),
    "two names of a width": ("attribute-type", """
        kernel void k(device float* x, uint i [[thread_execution_width]],
                      uint j [[threads_per_simdgroup]]) { x[i] = j; } //!""",
        "uint j [[simdgroups_per_threadgroup]]) { x[i] = j; }"),
    "two positions in one": ("attribute-type", """
        kernel void k(device float* x,
                      uint i [[thread_position_in_grid]] [[thread_index_in_threadgroup]]) { x[i] = 1.0f; } //!""",
        "uint i [[thread_position_in_grid]]) { x[i] = 1.0f; }"),
    "position in memory": ("attribute-type", """
        kernel void k(device float* x,
                      device uint* i [[thread_position_in_grid]]) { x[0] = 1.0f; } //!""",
        "uint i [[thread_position_in_grid]]) { x[i] = 1.0f; }"),
    "buffer in threadgroup": ("attribute-type", """
        kernel void k(device float* x,
                      threadgroup float* t [[buffer(1)]]) { t[0] = x[0]; } //!""",
        "threadgroup float* t [[threadgroup(1)]]) { t[0] = x[0]; }"),
    "threadgroup argument in device": ("attribute-type", """
        kernel void k(
            device float* x [[threadgroup(0)]]) { x[0] = 1.0f; } //!""",
        "threadgroup float* x [[threadgroup(0)]]) { x[0] = 1.0f; }"),
    "initialized function constant": ("function-constant", """
        constant bool f [[function_constant(0)]] = true; //!
        kernel void k(device float* x) { x[0] = f; }""",
        "constant bool f [[function_constant(0)]];"),
    "function constant of a class": ("function-constant", """
        struct P { int a; };
        constant P f [[function_constant(1)]]; //!
        kernel void k(device float* x) {}""",
        "constant int4 f [[function_constant(1)]];"),
    "array of function constants": ("function-constant", """
        constant int f [[function_constant(2)]] [2]; //!
        kernel void k(device float* x) {}""",
        "constant int f [[function_constant(2)]];"),
    "function constants of one index": ("function-constant", """
        constant bool f [[function_constant(3)]];
        constant bool g [[function_constant(3)]]; //!
        kernel void k(device float* x) { x[0] = f && g; }""",
        "constant bool g [[function_constant(4)]];"),
    "index of a function constant": ("function-constant", """
        constant int f [[function_constant(65536)]]; //!
        kernel void k(device float* x) { x[0] = f; }""",
        "constant int f [[function_constant(65535)]];"),
    "initialized threadgroup variable": ("threadgroup-variable", """
        kernel void k(device float* x) {
          threadgroup float t = 0.0f; //!
          x[0] = t;
        }""",
        "threadgroup float t; t = 0.0f;"),
    "initialized threadgroup array": ("threadgroup-variable", """
        kernel void k(device float* x) {
          threadgroup float t[2] = {1.0f, 2.0f}; //!
          x[0] = t[0];
        }""",
        "threadgroup float t[2];"),
    "order of an atomic": ("memory-order", """
        kernel void k(device atomic_int* x) {
          atomic_fetch_add_explicit(x, 1, memory_order_seq_cst); //!
        }""",
        "atomic_fetch_add_explicit(x, 1, memory_order_relaxed);"),
    "order of an exchange that fails": ("memory-order", """
        kernel void k(device atomic_int* x) {
          int e = 0;
          atomic_compare_exchange_weak_explicit(x, &e, 1, memory_order_relaxed, memory_order_acquire); //!
        }""",
        "atomic_compare_exchange_weak_explicit(x, &e, 1, memory_order_relaxed, memory_order_relaxed);"),
    "minimum of an atomic float": ("language", """
        kernel void k(device atomic_float* x) {
          atomic_fetch_min_explicit(x, 1.0f, memory_order_relaxed); //!
        }""",
        "atomic_fetch_sub_explicit(x, 1.0f, memory_order_relaxed);"),
    "atomic float in threadgroup": ("address-space", """
        kernel void k(threadgroup atomic_float* x, threadgroup atomic_int* y) {
          atomic_fetch_add_explicit(x, 1.0f, memory_order_relaxed); //!
        }""",
        "atomic_fetch_add_explicit(y, 1, memory_order_relaxed);"),
    "sum of atomic bools": ("language", """
        kernel void k(device atomic_bool* x) {
          atomic_fetch_add_explicit(x, true, memory_order_relaxed); //!
        }""",
        "atomic_exchange_explicit(x, true, memory_order_relaxed);"),
    "copy of an atomic": ("language", """
        kernel void k(device atomic_int* x) {
          x[0] = x[1]; //!
        }""",
        "atomic_store_explicit(x, atomic_load_explicit(x + 1, memory_order_relaxed), memory_order_relaxed);"),
    "bits of floats of a simdgroup": ("language", """
        kernel void k(device float* x) {
          x[0] = simd_xor(x[0]); //!
        }""",
        "x[0] = as_type<float>(simd_xor(as_type<uint>(x[0])));"),
}  # fmt: skip
# What Apple's compiler accepts, although the specification does not.
ACCEPTED = {
    "threadgroup variable with a constructor": ("threadgroup-constructor", """
        struct Zero { float a; Zero() : a(0.0f) {} };
        struct Plain { float a; Plain() = default; };
        kernel void k(device float* x) {
          threadgroup Zero t; //!
          x[0] = t.a;
        }""",
        "threadgroup Plain t;"),
    "threadgroup variable with a member's default": ("threadgroup-constructor", """
        struct One { float a = 1.0f; };
        struct Plain { float a; };
        kernel void k(device float* x) {
          threadgroup One t[2]; //!
          x[0] = t[1].a;
        }""",
        "threadgroup Plain t[2];"),
    "threadgroup array of zeros": ("threadgroup-variable", """
        kernel void k(device float* x) {
          threadgroup float t[4] = {0}; //!
          x[0] = t[0];
        }""",
        "threadgroup float t[4];"),
    "threadgroup variable in a loop": ("threadgroup-scope", """
        kernel void k(device float* x) {
          for (int i = 0; i < 4; ++i) {
            threadgroup float t[4]; //!
            x[i] = t[i];
          }
        }""",
        "threadgroup float* t = (threadgroup float*)nullptr;"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_seeded_error_is_caught(name):
    rule, body, _ = FAULTS[name]
    assert_found(body, rule, strict=False)


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_apples_compiler_accepts_is_caught_in_strict_mode_only(name):
    rule, body, _ = ACCEPTED[name]
    assert_found(body, rule)
    assert not check(HEAD + body, strict=False)


def test_the_clean_twins_have_no_findings():
    assert_twins_are_clean({**FAULTS, **ACCEPTED})
