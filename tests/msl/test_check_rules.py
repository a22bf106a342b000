"""The check of Metal programs catches a seeded error for each rule, and names the rule and the line."""

import pytest
from checking import HEAD, assert_found, needs_clang

from metalcore.msl.check import check
from metalcore.msl.errors import MSLError
from metalcore.msl.language.translate import translate
from metalcore.msl.runtime import host

pytestmark = needs_clang

# name: (rule, the program after HEAD). The fault is in the line that ends with //!
FAULTS = {
    "device pointer to a thread parameter": ("address-space", """
        void f(thread float* p);
        kernel void k(device float* x) { f(x); } //!"""),
    "device pointer to a constant parameter": ("address-space", """
        float f(constant float* p) { return *p; }
        kernel void k(device float* x) { x[0] = f(x); } //!"""),
    "constant pointer to a device variable": ("address-space", """
        kernel void k(constant float* x) { device const float* p = x; } //!"""),
    "threadgroup address as a device one": ("address-space", """
        kernel void k(threadgroup float* x) { device float* p = (device float*)x; } //!"""),
    "threadgroup reference to a local": ("address-space", """
        kernel void k(device float* x) { float a = 0.0f; threadgroup float& r = a; } //!"""),
    "template of a space called with another": ("address-space", """
        template <typename T> T first(threadgroup const T* p) { return p[0]; }
        kernel void k(device float* x) { x[0] = first(x); } //!"""),
    "local pointer without a space": ("address-space", """
        kernel void k(device float* x) {
          float* p = x; //!
        }"""),
    "parameter without a space": ("address-space", """
        float f(float& x) { return x; } //!
        kernel void k(device float* x) { float a = 0.0f; x[0] = f(a); }"""),
    "member without a space": ("address-space", """
        struct S { float* p; }; //!
        kernel void k(device float* x) {}"""),
    "kernel argument without a space": ("address-space", """
        kernel void k(float* x) {} //!"""),
    "kernel argument in thread": ("address-space", """
        kernel void k(thread float* x) {} //!"""),
    "method of an object in constant": ("address-space", """
        struct S { float a; float get() const { return a; } };
        kernel void k(constant S& s, device float* x) { x[0] = s.get(); } //!"""),
    "inside an instantiated template": ("address-space", """
        template <typename T> void f(device T* x) { threadgroup T* p = x; } //!
        kernel void k(device float* x) { f(x); }"""),
    "float to half": ("narrowing", """
        kernel void k(device half* y, device float* x) { y[0] = x[0]; } //!"""),
    "float to bfloat": ("narrowing", """
        kernel void k(device float* x) { bfloat b = x[0]; } //!"""),
    "float to bfloat as a result": ("narrowing", """
        bfloat f(float x) { return x; } //!
        kernel void k(device float* x) { x[0] = f(x[0]); }"""),
    "float4 to half4": ("language", """
        kernel void k(device half4* y, device float4* x) { y[0] = x[0]; } //!"""),
    "double": ("double", """
        kernel void k(device float* x) { double d = 1.0f; } //!"""),
    "long long": ("language", """
        kernel void k(device float* x) { unsigned long long n = 1; x[0] = n; } //!"""),
    "integer of 128 bits": ("language", """
        kernel void k(device float* x) { __int128 n = 1; x[0] = n; } //!"""),
    "array of variable length": ("language", """
        kernel void k(device int* x, constant int& n) { int a[n]; x[0] = a[x[1]]; } //!"""),
    "literal": ("literal", """
        kernel void k(device float* x) { x[0] = x[0] * 2.0; } //!"""),
    "recursion": ("recursion", """
        int f(int n) { return n < 2 ? 1 : n * f(n - 1); } //!
        kernel void k(device int* x) { x[0] = f(x[1]); }"""),
    "recursion through another": ("recursion", """
        int g(int n);
        int f(int n) { return n < 2 ? 1 : g(n); } //!
        int g(int n) { return f(n - 1); } //!
        kernel void k(device int* x) { x[0] = f(x[1]); }"""),
    "function pointer": ("function-pointer", """
        float f(float x) { return x; }
        kernel void k(device float* x) { float (*p)(float) = f; x[0] = p(x[0]); } //!"""),
    "function pointer by its alias": ("function-pointer", """
        typedef float (*F)(float);
        float call(F f, float x) { return f(x); } //!
        kernel void k(device float* x) {}"""),
    "virtual": ("virtual", """
        struct S { virtual float f() { return 0.0f; } }; //!
        kernel void k(device float* x) {}"""),
    "threadgroup variable outside a kernel": ("threadgroup-scope", """
        void f() { threadgroup float t[32]; } //!
        kernel void k(device float* x) { f(); }"""),
    "threadgroup memory": ("threadgroup-memory", """
        template <typename T>
        kernel void k(device T* x) { threadgroup T t[8000]; threadgroup T u[200]; t[0] = u[0]; } //!
        template [[host_name("k_float")]] kernel void k(device float*);
        template [[host_name("k_half")]] kernel void k(device half*);"""),
    "barrier flags": ("barrier-flags", """
        kernel void k(device int* x) { threadgroup_barrier(mem_flags(x[0])); } //!"""),
    "simdgroup barrier flags": ("barrier-flags", """
        void f(mem_flags flags) { simdgroup_barrier(flags); } //!
        kernel void k(device int* x) { f(mem_flags::mem_device); }"""),
    "position as float": ("attribute-type", """
        kernel void k(device float* x,
                      float i [[thread_position_in_grid]]) {} //!"""),
    "position as int": ("attribute-type", """
        kernel void k(device float* x,
                      int i [[thread_position_in_threadgroup]]) {} //!"""),
    "position of four": ("attribute-type", """
        kernel void k(device float* x,
                      uint4 i [[threadgroup_position_in_grid]]) {} //!"""),
    "lane as a vector": ("attribute-type", """
        kernel void k(device float* x,
                      uint2 i [[thread_index_in_simdgroup]]) {} //!"""),
    "positions of different sizes": ("attribute-type", """
        kernel void k(uint2 i [[thread_position_in_grid]], uint j [[thread_position_in_threadgroup]]) {} //!"""),
    "buffer index": ("argument-index", """
        kernel void k(device float* x [[buffer(31)]]) {} //!"""),
    "buffer index twice": ("argument-index", """
        kernel void k(device float* x [[buffer(1)]],
                      device float* y [[buffer(1)]]) {} //!"""),
    "threadgroup index twice": ("argument-index", """
        kernel void k(threadgroup float* x [[threadgroup(0)]],
                      threadgroup float* y [[threadgroup(0)]]) {} //!"""),
    "argument by value": ("kernel", """
        kernel void k(float x) {} //!"""),
    "kernel with a result": ("kernel", """
        kernel float k(device float* x) { return x[0]; } //!"""),
    "host name twice": ("host-name", """
        template <typename T> kernel void k(device T* x) {}
        template [[host_name("k")]] kernel void k(device float*);
        template [[host_name("k")]] kernel void k(device half*); //!"""),
    "plain kernels of one name": ("host-name", """
        kernel void k(device float* x) {}
        kernel void k(device int* x) {} //!"""),
    "host name of another kernel": ("host-name", """
        kernel void k(device float* x) {}
        [[host_name("k")]] kernel void other(device float* x) {} //!"""),
    "host name that is no string": ("host-name", """
        [[host_name(k)]] kernel void k(device float* x) {} //!"""),
    "empty host name": ("host-name", """
        [[host_name("")]] kernel void k(device float* x) {} //!"""),
    "main": ("language", """
        kernel void main(device float* x) {} //!"""),
    "static variable of a function": ("constant-space", """
        kernel void k(device float* x) { static float n = 0.0f; x[0] = n; n += 1.0f; } //!"""),
    "threads of a threadgroup": ("max-threads", """
        [[max_total_threads_per_threadgroup(2048)]] kernel void k(device float* x) {} //!"""),
    "threads of a threadgroup, no constant": ("max-threads", """
        [[max_total_threads_per_threadgroup(n)]] kernel void k(device float* x) {} //!"""),
    "program scope": ("constant-space", """
        float scale = 2.0f; //!
        kernel void k(device float* x) { x[0] = scale; }"""),
    "static member": ("constant-space", """
        struct S { static constexpr int n = 3; }; //!
        kernel void k(device float* x) { x[0] = S::n; }"""),
    "writing to constant memory": ("constant-space", """
        kernel void k(constant float* x) { x[0] = 1.0f; } //!"""),
    "threads of a threadgroup, beyond 32 bits": ("max-threads", """
        [[max_total_threads_per_threadgroup(4294967297)]] kernel void k(device float* x) {} //!"""),
    "buffer index beyond 32 bits": ("argument-index", """
        kernel void k(device float* x [[buffer(4294967296)]]) {} //!"""),
    "negative buffer index": ("argument-index", """
        kernel void k(device float* x [[buffer(-1)]]) {} //!"""),
    "32 buffers": ("argument-index", """
        kernel void k(""" + ", ".join(f"device float* x{i}" for i in range(32)) + """) {} //!"""),
    "mutable static member": ("constant-space", """
        struct S { static int n; }; //!
        kernel void k(device float* x) {}"""),
    "assembly": ("language", """
        kernel void k(device float* x) { __asm("nop"); } //!"""),
    "assembly after a condition": ("language", """
        kernel void k(device float* x) { if (x[0] > 0.0f) asm volatile("nop"); } //!"""),
    "delete": ("allocation", """
        kernel void k(device int* x) { delete x; } //!"""),
    "try": ("exceptions", """
        kernel void k(device float* x) { try { x[0] = 1.0f; } catch (...) {} } //!"""),
    "thread_local": ("language", """
        kernel void k(device float* x) { thread_local float y = 1.0f; x[0] = y; } //!"""),
    "typeid": ("language", """
        kernel void k(device float* x) { x[0] = typeid(x) == typeid(x); } //!"""),
    "dynamic_cast": ("language", """
        struct S { int a; };
        kernel void k(device S* x) { x[0] = *dynamic_cast<device S*>(x); } //!"""),
    "maximum of an atomic float": ("language", """
        kernel void k(device atomic_float* x) { atomic_fetch_max_explicit(x, 1.0f, memory_order_relaxed); } //!"""),
    "result of a 64-bit atomic": ("language", """
        kernel void k(device atomic_ulong* x) { atomic_fetch_add_explicit(x, 1, memory_order_relaxed); } //!"""),
    "goto": ("language", """
        kernel void k(device float* x) {
          goto end; //!
          end: x[0] = 1.0f;
        }"""),
    "exceptions": ("exceptions", """
        kernel void k(device float* x) { throw 1; } //!"""),
    "new": ("allocation", """
        kernel void k(device float* x) { thread int* p = new int; } //!"""),
    "ambiguous overload": ("language", """
        kernel void k(device uint* x) { x[0] = min(x[0], 1); } //!"""),
    "shuffle of 64 bits": ("language", """
        kernel void k(device ulong* x) { x[0] = simd_sum(x[0]); } //!"""),
    "too few components": ("language", """
        kernel void k(device float4* x) { x[0] = float4(1.0f, 2.0f, 3.0f); } //!"""),
    "unknown function": ("language", """
        kernel void k(device float* x) { x[0] = cbrt(x[0]); } //!"""),
}  # fmt: skip


# What Apple's compiler accepts.
LENIENT = [
    "float to half",
    "literal",
    "recursion",
    "recursion through another",
    "threadgroup memory",
    "function pointer",
    "function pointer by its alias",
]


@pytest.mark.parametrize("name", FAULTS)
def test_a_seeded_error_is_caught(name):
    """Without strictness where that is enough; with it there are more findings, and other files have it."""
    rule, body = FAULTS[name]
    assert_found(body, rule, strict=name in LENIENT)


@pytest.mark.parametrize("name", LENIENT)
def test_lenient_leaves_out_what_apples_compiler_accepts(name):
    assert not check(HEAD + FAULTS[name][1], strict=False)


# Faults that compile_shader refuses as well.
SHARED = [
    name
    for name, (rule, _) in FAULTS.items()
    if rule in ("virtual", "allocation", "exceptions", "argument-index", "attribute-type", "host-name", "max-threads")
]
SHARED.remove("positions of different sizes")
SHARED += [
    "main",
    "goto",
    "assembly",
    "assembly after a condition",
    "long long",
    "integer of 128 bits",
    "thread_local",
    "typeid",
    "dynamic_cast",
    "program scope",
    "mutable static member",
    "static variable of a function",
    "kernel argument without a space",
    "kernel argument in thread",
]


@pytest.mark.parametrize("name", SHARED)
def test_compile_shader_refuses_it_in_the_same_words(name):
    source = HEAD + FAULTS[name][1]
    line = next(i for i, line in enumerate(source.splitlines(), 1) if line.endswith("//!"))
    told = [finding.message for finding in check(source, filename="kernel.metal") if finding.line == line]
    with pytest.raises(MSLError) as error:
        translate(source, filename="kernel.metal")
    place, _, message = str(error.value).splitlines()[0].partition(" error: ")
    assert place == f"kernel.metal:{line}:" and message in told


def test_arrays_of_variable_length_do_not_compile():
    source = HEAD + FAULTS["array of variable length"][1]
    with pytest.raises(MSLError, match="program_source:4:.*variable.length array"):
        host.check_source(translate(source).source(), msl=source)


@pytest.mark.parametrize("name", ["maximum of an atomic float", "result of a 64-bit atomic"])
def test_atomics_that_metal_has_not(name):
    with pytest.raises(MSLError, match="program_source:4:.*no matching function for call to 'atomic_fetch_"):
        host.check_source(translate(HEAD + FAULTS[name][1]).source(), msl=HEAD + FAULTS[name][1])


def test_what_only_looks_like_it_is_not_refused():
    translate(
        HEAD
        + """
        struct S { S() = default; S(int) = delete; };
        void label() __asm("air.label");
        constant int4 seeds = {1, 2, 3, 4};
        constexpr int limit = 3;
        struct T { static constexpr int n = limit; int renewed, throwing; };
        typedef unsigned int index_t;
        kernel void k(device float* x [[buffer(30)]], index_t i [[thread_position_in_grid]],
                      unsigned j [[thread_index_in_simdgroup]], metal::ushort2 t [[grid_origin]]) { x[i] = j; }"""
    )
