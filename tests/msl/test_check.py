"""The check of Metal programs raises no false alarm, and can be called as a library and as a command."""

from pathlib import Path

import pytest
from checking import needs_clang

from metalcore.cli import main
from metalcore.msl.check import check
from metalcore.msl.check.clang import find_clang
from metalcore.msl.errors import CompilerNotFoundError
from tools import kernel_check

# They are checked whatever the record says, so that a record that hides a fault of the check itself does not last.
ALWAYS = kernel_check.families()[::16]

# Programs that Apple's compiler accepts, where C++ for OpenCL has other rules than Metal.
ACCEPTED = """
#include <metal_stdlib>
using namespace metal;

constant float kTable[2] = {1.0f, 2.0f};
constant int3 kSeeds = {13, 19, 12};
constant bool kScaled [[function_constant(0)]];
constant bool kScale = is_function_constant_defined(kScaled) ? kScaled : true;

struct Complex {
  float re, im;
  constexpr Complex(float a, float b) thread : re(a), im(b) {}
  constexpr Complex(float a, float b) constant : re(a), im(b) {}
  Complex() = default;
  float norm() const thread { return re * re + im * im; }
  float norm() const device { return re * re + im * im; }
  float norm() const threadgroup { return re * re + im * im; }
  float norm() const constant { return re * re + im * im; }
};

struct Cells {
  float v[4];
  device float& operator[](int i) device { return v[i]; }
  const device float& operator[](int i) const device { return v[i]; }
  const constant float& operator[](int i) const constant { return v[i]; }
  device float* at(int i) device { return v + i; }
};

struct Tile {
  float4 values[4];
  thread float4& at(short i) { return values[i]; }
};

struct Params { int sizes[3]; float2 origin; };

template <typename T> using Operation = T (*)(T);
template <typename T> T twice(T x) { return x * 2; }
template <typename T, Operation<T> operation> T apply(T x) { return operation(x); }

template <typename To, typename From> To converted(const thread From& x) { return To(x); }
template <> inline half converted<half, float>(const thread float& x) { return half(x); }
inline float sum(const thread float& a, float b) { return a + b; }
template <uint N> void clear(thread float4 (&rows)[N]) { rows[0] = float4(0x1p-3f, 0.0f, 0.0f, 0.0f); }
inline void advance(const device float*& p) { p += 1; }

template <typename T>
[[kernel, max_total_threads_per_threadgroup(256)]] void k(
    device T* x [[buffer(0)]], constant Params& params [[buffer(1)]], device const Complex* z [[buffer(2)]],
    constant Complex& w [[buffer(3)]], device atomic_uint* count [[buffer(4)]],
    device Cells& cells [[buffer(6)]], constant Cells& given [[buffer(7)]],
    device packed_float3* points [[buffer(5)]], threadgroup float* scratch [[threadgroup(0)]],
    const device float* from [[buffer(30)]],
    uint3 i [[thread_position_in_grid]], ushort lane [[thread_index_in_simdgroup]]) {
  threadgroup float4 shared[64];
  const Params copy = params;
  Tile tile;
  tile.at(0) = float4(points[0], 1.0f);
  tile.at(1).xy = tile.at(0).wz + float2(copy.origin.y);
  shared[lane] = tile.at(1);
  threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);
  scratch[0] = sum(2.0f, z[0].norm() + w.norm()) + kTable[1] + kSeeds.x;
  advance(from);
  device float& cell = cells[1];
  cell = given[0] + *cells.at(2);
  thread const device float* rows[2];
  rows[0] = from;
  const float row = rows[0][0];
  scratch[1] = converted<half, float>(row) * float4(z[0].re).x;
  bool4 positive = shared[0] > 0.0f;
  float4 chosen = select(shared[0], float4(0.0f), positive);
  x[i.x] = static_cast<T>(simd_sum(chosen.x)) + apply<T, twice<T>>(x[0]);
  x[1] = kScale ? x[0] : T(0.5f);
  T zero = 0;
  x[3] = zero < 1 ? 0 : zero;
  uint4 seeds = {i.x, i.y, 1u};
  x[2] = max(float(zero), 1.0f) > 0 ? x[2] : T(from[0]);
  atomic_fetch_add_explicit(count, 1, memory_order_relaxed);
  simdgroup_matrix<T, 8, 8> m;
  simdgroup_load(m, x, 8);
  simdgroup_multiply(m, m, m);
  simdgroup_store(m, x, 8);
}
template [[host_name("k_float")]] [[kernel]] decltype(k<float>) k<float>;
template [[host_name("k_half")]] [[kernel]] decltype(k<half>) k<half>;
template [[host_name("k_bfloat")]] [[kernel]] decltype(k<bfloat>) k<bfloat>;
"""


@needs_clang
@pytest.mark.parametrize("family", kernel_check.families())
def test_built_in_kernels(family):
    """`python -m tools.kernel_check --record` renews the record, which is believed for most files."""
    if family in ALWAYS or kernel_check.recorded().get(family) != kernel_check.digest(family):
        findings = kernel_check.findings(family)
        assert not findings, "\n".join(map(str, findings))


@needs_clang
def test_the_digest_is_of_what_decides(tmp_path, monkeypatch):
    """The kernels, the headers that they include, the rules and Clang's version decide."""
    monkeypatch.setattr(kernel_check, "KERNELS", tmp_path)
    (tmp_path / "one.h").write_text("#pragma once\n")
    (tmp_path / "one.metal").write_text('#include "one.h"\nkernel void k(device float* x) {}\n')
    digests = {kernel_check.digest("one")}
    (tmp_path / "one.h").write_text("#pragma once\n#define ONE 1.0f\n")
    kernel_check._text.cache_clear()
    digests.add(kernel_check.digest("one"))
    monkeypatch.setattr(kernel_check, "_rules", lambda: "others")
    digests.add(kernel_check.digest("one"))
    kernel_check._text.cache_clear()
    assert len(digests) == 3


@needs_clang
def test_no_false_alarm():
    findings = check(ACCEPTED)
    assert not findings, "\n".join(map(str, findings))


@needs_clang
def test_an_error_in_an_included_file(tmp_path):
    (tmp_path / "helper.h").write_text("#pragma once\n\ninline float first(float* x) { return x[0]; }\n")
    path = tmp_path / "kernel.metal"
    path.write_text('#include "helper.h"\nkernel void k(device float* x) { float a = 0.0f; x[0] = first(&a); }\n')
    (finding,) = check(path.read_text(), filename=str(path))
    assert (Path(finding.file).name, finding.line, finding.rule) == ("helper.h", 3, "address-space")


@needs_clang
def test_command(tmp_path, capsys):
    good, bad = tmp_path / "good.metal", tmp_path / "bad.metal"
    good.write_text("kernel void k(device float* x [[buffer(FIRST)]]) { x[0] = SCALE; }\n")
    bad.write_text("kernel void k(device float* x) {\n  x[0] = 2.0;\n}\n")
    assert main(["check", "-D", "SCALE=2.0f", "-D", "FIRST", str(good)]) == 0
    assert capsys.readouterr().out == ""
    assert main(["check", str(good), str(bad), "-D", "SCALE=2.0f", "-D", "FIRST"]) == 1
    captured = capsys.readouterr()
    assert captured.out.startswith(f"{bad}:2: error: the literal 2.0 has no type") and "[literal]" in captured.out
    assert "1 of 2" in captured.err
    assert main(["check", "--lenient", str(bad)]) == 0


def test_without_clang(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CLANG", raising=False)
    with pytest.raises(CompilerNotFoundError, match="Clang 15 or newer.*apt install clang-19"):
        find_clang()
    path = tmp_path / "kernel.metal"
    path.write_text("kernel void k(device float* x) {}\n")
    assert main(["check", str(path)]) == 2
    assert "needs Clang" in capsys.readouterr().err


def test_an_older_clang_is_named(tmp_path, monkeypatch):
    script = tmp_path / "clang"
    script.write_text("#!/bin/sh\necho '#define __clang_major__ 14'\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CLANG", raising=False)
    with pytest.raises(CompilerNotFoundError, match="clang: Clang 14"):
        find_clang()


def test_unknown_attributes_are_refused_as_compile_shader_does():
    (finding,) = check("\nkernel void k(device float* x [[bufer(0)]]) { x[0] = 1.0f; }")
    assert (finding.line, finding.rule) == (2, "language") and "bufer" in finding.message
