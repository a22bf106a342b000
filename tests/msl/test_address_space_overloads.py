"""Functions and specializations that differ in address spaces only: each call means the one that Metal would call."""

import re

import pytest
import torch

import metalcore
from metalcore.msl.errors import MSLError
from metalcore.msl.language.translate import translate

pytestmark = pytest.mark.usefixtures("compiles_for_cuda")
HEADER = "#include <metal_stdlib>\nusing namespace metal;\n"


def run(device, body, out=8):
    result = torch.zeros(out, device=device)
    metalcore.compile_shader(HEADER + body).k(result, threads=1)
    return result.tolist()


def test_functions(device):
    body = """
        void copy(threadgroup float* to, const device float* from, uint n, float scale = 2) {
          for (uint i = 0; i < n; ++i) to[i] = from[i] * scale;
        }
        void copy(device float* to, const threadgroup float* from, uint n, float scale = 2) {
          for (uint i = 0; i < n; ++i) to[i] = from[i] * scale + 1;
        }
        kernel void k(device float* out) {
          threadgroup float x[2];
          out[0] = 3; out[1] = 4;
          copy(x, out, 2);
          copy(out + 2, x, 2);
          copy(out + 4, x, 2, 1.0f);
        }"""
    assert run(device, body, out=6) == [3, 4, 13, 17, 7, 9]


def test_a_call_between_the_two_definitions(device):
    body = """
        float first(device float* p) { return p[0] + 1; }
        float later(device float* p) { return first(p); }
        float first(threadgroup float* p) { return p[0] + 2; }
        kernel void k(device float* out) {
          threadgroup float x[1];
          out[0] = x[0] = 10;
          out[1] = later(out); out[2] = first(x); out[3] = first(out);
        }"""
    assert run(device, body, out=4) == [10, 11, 12, 11]


def test_templates_references_and_arrays(device):
    body = """
        template <typename T, int N> T where(threadgroup T (&a)[N]) { return a[0] + 1; }
        template <typename T, int N> T where(thread T (&a)[N]) { return a[0] + 2; }
        template <int N, typename T> T at(device const T* p) { return p[N] + 10; }
        template <int N, typename T> T at(threadgroup const T* p) { return p[N] + 20; }
        template <typename T> T one(const thread T& x) { return x + 100; }
        template <typename T> T one(const threadgroup T& x) { return x + 200; }
        void move(thread device float*& p, int n) { p += n; }
        void move(thread threadgroup float*& p, int n) { p += 2 * n; }
        kernel void k(device float* out) {
          threadgroup float x[4] = {5, 6, 7, 8};
          float y[1] = {6};
          out[0] = where(x); out[1] = where(y);
          out[2] = at<1>(x); out[3] = at<0>(out);
          out[4] = one(x[0]); out[5] = one(y[0]);
          threadgroup float* p = x; device float* q = out;
          move(p, 1); move(q, 1);
          out[6] = p[0]; out[7] = q[0];
        }"""
    assert run(device, body) == [6, 8, 26, 16, 205, 106, 7, 8]


def test_methods_and_operators(device):
    body = """
        template <typename T> struct Box {
          T value;
          T who() const device { return 1; }
          T who() const thread { return 2; }
          T who() const threadgroup { return 3; }
          T any() const { return 4; }
          T any() const threadgroup { return 5; }
          T operator[](int i) const device { return 10 + i; }
          T operator[](int i) const threadgroup { return 20 + i; }
          T same() const device { return value; }
          T same() const threadgroup { return value; }
        };
        kernel void k(device float* out) {
          threadgroup Box<float> shared; Box<float> own; device Box<float>* far = (device Box<float>*)out;
          out[7] = far->who(); out[1] = own.who(); out[2] = shared.who();
          out[3] = own.any(); out[4] = shared.any();
          out[5] = shared[1]; out[6] = (*far)[2];
          shared.value = 9; out[0] = shared.same();
        }"""
    assert run(device, body) == [9, 2, 3, 4, 5, 21, 12, 1]


def test_integers_of_different_width_beside_the_spaces(device):
    """metal-flash-attention counts rows of tiles in ushort, and those of matrices in uint."""
    body = """
        struct Event {
          template <typename T>
          void async_copy(threadgroup T* to, ushort row, ushort2 tile, const device T* from,
                          uint from_row, ushort2 size, bool transposed = false, int mode = 0) thread {
            to[0] = from[0] * row + from_row + mode;
          }
          template <typename T>
          void async_copy(device T* to, uint row, ushort2 tile, const threadgroup T* from,
                          ushort from_row, ushort2 size, bool transposed = false) thread {
            to[0] = from[0] + row + 1000 * from_row + transposed;
          }
        };
        kernel void k(device float* out) {
          threadgroup float x[1];
          Event event;
          out[0] = 2;
          event.async_copy(x, 3, ushort2(1), out, 70000, ushort2(1));
          out[1] = x[0];
          event.async_copy(out + 2, 70000, ushort2(1), x, ushort(4), ushort2(1), true);
          event.async_copy(x, 3, ushort2(1), out, 1, ushort2(1), false, 5);
          out[3] = x[0];
        }"""
    assert run(device, body, out=4) == [2, 70006, 70006 + 70000 + 4001, 12]


def test_specializations(device):
    body = """
        template <typename T> struct place { enum { value = 0 }; };
        template <typename T> struct place<device T*> { enum { value = 1 }; };
        template <typename T> struct place<constant T*> { enum { value = 2 }; };
        template <typename T> struct place<T*> { enum { value = 3 }; };
        template <typename P, int N> struct Reader;
        template <typename T, int N> struct Reader<threadgroup T*, N> {
          threadgroup T* p;
          T get() { return p[0] + N; }
        };
        template <typename T, int N> struct Reader<device T*, N> { device T* p; T get() { return p[0] - N; } };
        template <typename T> constant constexpr int is_far = 0;
        template <typename T> constant constexpr int is_far<device T*> = 5;
        kernel void k(device float* out) {
          threadgroup float x[1] = {40};
          Reader<threadgroup float*, 1> near{x};
          Reader<device float*, 2> far{out};
          out[0] = 50;
          out[1] = near.get(); out[2] = far.get();
          out[3] = place<device float*>::value + 10 * place<constant float*>::value;
          out[4] = place<threadgroup float*>::value + 10 * place<float>::value;
          out[5] = is_far<device float*> + is_far<thread float*>;
          out[6] = is_same_v<device float*, threadgroup float*>;
          out[7] = metal::is_same<device float*, device float*>::value;
        }"""
    assert run(device, body) == [50, 41, 48, 21, 3, 5, 0, 1]


# (program, the line that the error names, its message)
REFUSED = [
    (("int f(device int* p) { return 1; }\nint f(constant int* p) { return *p; }\n"
      "template <typename T> int g(device T* p) { return 1; }\n"
      "template <typename T> int g(constant T* p) { return 2; }"),
     4, r"'g' differs from the one at program_source:3 in address spaces only, and no address tells device"),
    ("struct S { int v;\n int f() const device { return 1; }\n int f() const constant { return 2; } };",
     3, r"'f' differs from the one at program_source:2"),
    ("struct S { int v;\n S(device int* p) : v(1) {}\n S(threadgroup int* p) : v(2) {} };",
     3, r"'S' differs from the one at program_source:2 .* cannot be chosen as it runs"),
    ("struct S { int v;\n operator int() const device { return 1; }\n operator int() const thread { return 2; } };",
     3, r"'operatorint' differs from the one at program_source:2"),
    ("int f(threadgroup int* p) { return 1; }\nfloat f(device int* p) { return 2; }",
     2, "'f' differs from the one at program_source:1 .* their results or qualifiers differ"),
    ("int f(threadgroup int* p) { return 1; }\ntemplate <typename T> int f(device T* p) { return 2; }",
     2, "'f' differs from the one at program_source:1 .* one is a template of another kind"),
    ("int f(device int* device* p) { return 1; }\nint f(threadgroup int* device* p) { return 2; }",
     2, "what pointers to pointers point to"),
]  # fmt: skip


@pytest.mark.parametrize("source, line, message", REFUSED)
def test_what_cannot_be_told_apart_is_refused_with_both_lines(source, line, message):
    with pytest.raises(MSLError, match=message) as error:
        translate(source)
    assert int(re.match(r"program_source:(\d+)", str(error.value))[1]) == line


DEDUCED = """
template <typename T> struct is_far { enum { value = 0 }; };
template <typename T> struct is_far<device T*> { enum { value = 1 }; };
template <typename P> int f(P p) { return is_far<P>::value; }
kernel void k(device float* out) { threadgroup float x[1]; out[0] = f(x); }
"""


@pytest.mark.parametrize("source", [
    DEDUCED,
    ("template <typename P, typename Q> int f(P p, Q q) { return is_same_v<P, Q>; }\n"
    "kernel void k(device float* out) { threadgroup float x[1]; out[0] = f(out, x); }"),
], ids=["specialization", "is_same"])  # fmt: skip
def test_a_pointer_whose_space_is_not_known_does_not_compile(source, device):
    with pytest.raises(MSLError, match="the address space of this pointer is not known here"):
        metalcore.compile_shader(HEADER + source)


@pytest.mark.only_on("simulator")
def test_a_null_pointer_tells_no_overload(device):
    body = """
        float f(device float* p) { return 1; }
        float f(threadgroup float* p) { return 2; }
        kernel void k(device float* out) { threadgroup float* none = nullptr; out[0] = f(none); }"""
    with pytest.raises(metalcore.simulator.KernelError):
        run(device, body)


EVENTS = """
struct _simdgroup_event_t;
thread _simdgroup_event_t* __metal_simdgroup_async_copy_2d(
    ulong, ulong, threadgroup void*, ulong, ulong, ulong2, const device void*, ulong, ulong, ulong2, long2, int)
    __asm("air.simdgroup_async_copy_2d.p3i8.p1i8");
thread _simdgroup_event_t* __metal_simdgroup_async_copy_2d(
    ulong, ulong, device void*, ulong, ulong, ulong2, const threadgroup void*, ulong, ulong, ulong2, long2, int)
    __asm("air.simdgroup_async_copy_2d.p1i8.p3i8");
void __metal_wait_simdgroup_events(int, thread _simdgroup_event_t**) __asm("air.wait_simdgroup_events");
struct Copy {
  thread _simdgroup_event_t* event;
  template <typename T>
  void tile(threadgroup T* to, ushort to_row, ushort2 to_size, const device T* from, uint from_row, ushort2 size) {
    event = __metal_simdgroup_async_copy_2d(sizeof(T), alignof(T), (threadgroup void*)to, ushort(to_row), 1,
                                            ulong2(to_size), (const device void*)from, uint(from_row), 1, ulong2(size),
                                            long2(0), 0);
  }
  template <typename T>
  void tile(device T* to, uint to_row, ushort2 to_size, const threadgroup T* from, ushort from_row, ushort2 size) {
    event = __metal_simdgroup_async_copy_2d(sizeof(T), alignof(T), (device void*)to, uint(to_row), 1, ulong2(to_size),
                                            (const threadgroup void*)from, ushort(from_row), 1, ulong2(size), long2(0),
                                            0);
  }
  void wait() { __metal_wait_simdgroup_events(1, &event); }
};
kernel void k(device float* out, device const float* in, uint i [[thread_index_in_threadgroup]]) {
  threadgroup float tile[8 * 9];
  if (i < 32) {
    Copy copy;
    copy.tile(tile, 9, ushort2(8, 8), in, 100, ushort2(6, 7));
    copy.wait();
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (i < 32) {
    Copy copy;
    copy.tile(out, 16, ushort2(8, 8), tile, ushort(9), ushort2(8, 8));
    copy.wait();
  }
}
"""


def test_copies_of_tiles_between_device_and_threadgroup_memory(device):
    matrix = torch.arange(800.0).reshape(8, 100)
    out = torch.full((8, 16), -1.0, device=device)
    metalcore.compile_shader(HEADER + EVENTS).k(out, matrix.to(device), threads=64, group_size=64)
    expected = torch.full((8, 16), -1.0)
    expected[:, :8] = 0
    expected[:7, :6] = matrix[:7, :6]
    assert torch.equal(out.cpu(), expected)
