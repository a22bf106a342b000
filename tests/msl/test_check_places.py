"""The check of Metal programs: where attributes, alignas and address spaces stand, casts between spaces, constants, and
what is new in MSL. Each line of BAD and NEW is a fault by itself; the lines of GOOD are one program."""

from pathlib import Path

import pytest
from checking import HEAD, assert_found, needs_clang

from metalcore.cli import main
from metalcore.msl.check import check

pytestmark = needs_clang
KERNELS = Path(__file__).parents[2] / "kernels"
PARAMETERS = "device float* x, constant float* c, threadgroup float* t, device atomic_uint* u"

# rule: lines that break it in a kernel's body, which has the PARAMETERS
IN_KERNELS = {
    "attribute-place": """
        threadgroup alignas(16) float y[4];
        threadgroup float alignas(16) y[4];
        threadgroup float y[4] alignas(16);
        static alignas(16) constant float y[4] = {};
        const alignas(16) float y[4] = {};
        constexpr alignas(8) float y = 1.0f;
        using T = alignas(16) float;
        typedef alignas(16) float T;
        typedef float T alignas(16);
        thread float* alignas(8) y = nullptr;
        alignas(3) float y[4];
        alignas(2) float y;
        float y [[buffer(0)]] = 1.0f;
        float y [[thread_position_in_grid]] = 1.0f;
        [[max_total_threads_per_threadgroup(32)]] float y = 1.0f;
        for (int i = 0; i < 2; ++i) [[kernel]] {}""",
    "address-space": """
        auto y = (device float*)c;
        auto y = (const device float*)c;
        auto y = reinterpret_cast<const device float*>(c);
        auto y = static_cast<const device float*>(c);
        auto y = const_cast<device float*>(c);
        using P = const device float*; auto y = P(c);
        auto y = (constant float*)x;
        auto y = reinterpret_cast<constant float*>(x);
        auto y = static_cast<constant float*>(x);
        const device float& y = (const device float&)*c;
        float y = *(constant float*)x;
        float y = *(float*)x;
        float y = *reinterpret_cast<float*>(t);
        auto y = (device float*)t;
        typedef float* P;
        using P = float*;""",
    "constant-space": "extern float y;",
    "double": "float y = 1.0l;\nauto y = 1e3L;",
    "language": """
        wchar_t y = 0;
        char16_t y = 0;
        _Float16 y;
        _Complex float y;
        bool y = simd_sum(true);""",
    "version": """
        atomic_thread_fence(mem_flags::mem_device, memory_order_seq_cst, thread_scope_device);
        threadgroup_barrier(mem_flags::mem_device, thread_scope_device);
        volatile coherent device float* y = x;
        coherent(device) device float* y = x;
        os_log_default.log("text");""",
    "lambda": "auto y = [](float a) { return a; };",
}
OUTSIDE = {
    "attribute-place": """
        constant alignas(16) float y[4] = {};
        constexpr alignas(16) constant float y[4] = {};
        constant float y[4] alignas(16) = {};
        constant float alignas(16) y[4] = {};
        alignas(16) void f();
        void f() alignas(16);
        void f(alignas(16) float y);
        void f(float y alignas(16));
        template <class T> using A = alignas(16) T;
        using A alignas(16) = float;
        struct S alignas(16) { float y; };
        struct S { const alignas(16) float y; };
        struct S { float alignas(16) y; };
        enum alignas(8) E { a };
        inline [[noreturn]] void f();
        kernel void q(device float* [[buffer(0)]] y) {}
        kernel void q(device [[buffer(0)]] float* y) {}
        kernel void q(device float [[buffer(0)]] * y) {}
        kernel void q(device float* y) [[buffer(0)]] {}
        kernel void [[max_total_threads_per_threadgroup(32)]] q(device float* y) {}
        static [[kernel]] void q(device float* y) {}
        kernel [[max_total_threads_per_threadgroup(32)]] void q(device float* y) {}
        kernel void q(device float* y) [[max_total_threads_per_threadgroup(32)]] {}
        kernel void q(threadgroup float y[4] [[threadgroup(0)]]) {}
        kernel void q(constant float y[4] [[buffer(0)]]) {}
        [[kernel]] template <class T> void q(device T* y) {}
        constant int [[function_constant(0)]] n;
        constant [[function_constant(0)]] int n;""",
    "language": """
        kernel void q [[buffer(0)]] (device float* y) {}
        kernel template <class T> void q(device T* y) {}
        void q(device float* y) kernel {}""",
    "constant-space": """
        constant float* y;
        union { float a; int b; } y;
        struct S { int a; } y;""",
    "constant-initializer": """
        int f(); constant int y = f();
        struct S { float a; S(float b) : a(b) {} }; constant S y = S(1.0f);
        struct S { ~S() {} }; constant S y = {};""",
    "function-constant": "constant int n [[function_constant]];",
    "version": "[[required_threads_per_threadgroup(32, 1, 1)]] kernel void q(device float* y) {}",
}
BAD = [(rule, f"kernel void k({PARAMETERS}) {{\n{line} //!\n}}") for rule, lines in IN_KERNELS.items()
       for line in lines.strip().splitlines()]  # fmt: skip
BAD += [(rule, line + " //!") for rule, lines in OUTSIDE.items() for line in lines.strip().splitlines()]

GOOD = """
constant float table [[maybe_unused]] [2] = {1.0f, 2.0f};
alignas(16) constant float wide[4] = {};
constant float named alignas(16) [4] = {};
constant int chosen [[function_constant(0)]];
constant bool is_chosen = is_function_constant_defined(chosen) ? chosen > 2 : false;
constant int doubled = chosen * 2;
constant float4 corner = float4(0.0f, 1.0f, 2.0f, 3.0f);
constant float lowest = numeric_limits<float>::lowest();
struct alignas(16) Aligned { float a; alignas(8) float b; float c alignas(8); };
struct Value { float a; constexpr Value(float b) : a(b) {} float get() const constant { return a; } };
constant Value value = Value(2.0f);
struct Bound { device float* x [[id(0)]]; float many [[id(1)]] [2]; };
using Pointer = device float*;
typedef const constant float* Table;
[[maybe_unused]] static float unused() { return 1.0f; }
[[noreturn]] void never();
template <class T> T first(T x [[maybe_unused]]) { return x; }
[[kernel]] void plain(device float* [[buffer(2)]], uint [[thread_position_in_grid]]) {}
[[kernel, max_total_threads_per_threadgroup(64)]] void both([[buffer(0)]] device float* x, uint i
                                                            [[thread_position_in_grid]]) { x[i] = 1.0f; }
[[max_total_threads_per_threadgroup(64)]] kernel void before(device float (*rows [[buffer(1)]])[4]) { rows[0][1] = 1; }
template <class T> [[kernel]] void of(device T* x [[buffer(0)]], constant T values [[buffer(1)]] [4],
                                      threadgroup T* shared [[threadgroup(0)]]) { x[0] = values[0] + shared[0]; }
template [[host_name("of_float")]] [[kernel]] decltype(of<float>) of<float>;
template [[host_name("of_half")]] kernel void of<half>(device half* [[buffer(0)]], constant half[4],
                                                       threadgroup half*);
kernel void last(device float* x, constant float* c, const device int* n, uint2 at [[thread_position_in_grid]]) {
  alignas(16) threadgroup float tile[4];
  [[maybe_unused]] threadgroup float more alignas(16) [4];
  threadgroup float old[4] __attribute__((aligned(16)));
  alignas(float4) thread float row[4] = {};
  float device* here = x;
  auto there = (const device float4*)x;
  auto bits = reinterpret_cast<device uint*>(x);
  auto pair = (constant float2*)c;
  auto address = (ulong)c;
  auto again = (device float*)(ulong)n[0];
  const device float& same = (const device float&)x[0];
  [[maybe_unused]] const float one = 1.0f, two [[maybe_unused]] = 2.0f;
  switch (n[0]) { case 0: row[0] = 1.0f; [[fallthrough]]; default: row[1] = 2.0f; }
  tile[0] = more[0] + old[0] + row[0] + here[0] + there->x + pair->x + float(bits[0] + address) + same + again[0];
  x[at.x] = tile[0] + corner.x + value.get() + lowest + float(doubled) + (is_chosen ? wide[0] : named[0]);
}
"""


@pytest.mark.parametrize(
    "rule, body", BAD, ids=[f"{rule}: {body.splitlines()[-2:][0].strip()[:60]}" for rule, body in BAD]
)
def test_a_fault_is_found(rule, body):
    assert_found(body, rule, strict=False)


def test_what_stands_in_its_place_is_not_found():
    findings = check(HEAD + GOOD, strict=False)
    assert not findings, "\n".join(map(str, findings))


def test_a_kernel_with_alignas_between_its_specifiers():
    path = KERNELS / "gemm" / "gemm.metal"
    source = path.read_text()
    moved = source.replace("alignas(16) threadgroup float", "threadgroup alignas(16) float")
    assert moved != source
    (finding,) = check(moved, filename=str(path), include_dirs=[path.parent, KERNELS])
    line = next(i for i, line in enumerate(moved.splitlines(), 1) if "threadgroup alignas" in line)
    assert (finding.line, finding.rule) == (line, "attribute-place")


NEW = """
kernel void k(coherent(device) device float* x, device float* y) {
  auto twice = [](float a) { return 2.0f * a; };
  atomic_thread_fence(mem_flags::mem_device, memory_order_acq_rel, thread_scope_device);
  threadgroup_barrier(mem_flags::mem_device, thread_scope_device);
  os_log_default.log_debug("twice");
#if __METAL_VERSION__ >= 400
  if (float a = twice(y[0]); a > 1.0f) x[0] = a;
#endif
}
"""


def test_a_newer_version_of_msl():
    assert {finding.rule for finding in check(HEAD + NEW, strict=False)} == {"version", "lambda"}
    for standard in ("metal3.2", "metal4.0"):
        findings = check(HEAD + NEW, std=standard)
        assert not findings, "\n".join(map(str, findings))
    required = HEAD + OUTSIDE["version"]
    assert check(required, std="metal3.2") and not check(required, std="metal4.0")
    assert check(HEAD + "kernel void k(device int* x) { if (int n = x[0]; n) x[1] = n; }", std="metal3.2")
    with pytest.raises(ValueError, match="'metal2.0', and must be one of metal3.1, metal3.2, metal4.0, metal4.1"):
        check(NEW, std="metal2.0")


def test_the_command_takes_a_version(tmp_path, capsys):
    path = tmp_path / "new.metal"
    path.write_text(HEAD + NEW)
    assert main(["check", "--std", "metal3.2", str(path)]) == 0
    assert main(["check", str(path)]) == 1
    assert "'coherent' is new in MSL 3.2, and the program is read as metal3.1 [version]" in capsys.readouterr().out
