"""Counts of small kernels are those that one gets by hand."""

import json
import os

import pytest
import torch
from processes import python

import metalcore
from metalcore.estimates import CountedLibrary, counting

SOURCE = """
#include <metal_stdlib>
using namespace metal;

kernel void chain(device float* y, device const float* x, uint i [[thread_position_in_grid]]) {
  float a = x[i];
  for (int k = 0; k < 8; ++k) a = a * a + 1.0f;
  y[i] = a;
}
kernel void copy(device float4* y, device const float4* x, uint i [[thread_position_in_grid]]) { y[i] = x[i]; }
kernel void scale(device float4* y, device const float4* x, uint i [[thread_position_in_grid]]) { y[i] = x[i] * y[i]; }
kernel void strided(device float* y, device const float* x, uint i [[thread_position_in_grid]]) { y[i] = x[32 * i]; }
kernel void banks(device float* y, uint i [[thread_index_in_threadgroup]]) {
  threadgroup float one[64 * 32], padded[64 * 33];
  one[i * 32] = padded[i * 33] = float(i);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  y[i] = one[(63 - i) * 32] + padded[(63 - i) * 33];
}
kernel void lanes(device float* y, uint i [[thread_position_in_grid]]) {
  float a = simd_sum(y[i]);
  y[i] = simd_shuffle_xor(a + 1.0f, 3);
}
kernel void waits(device float* y, constant uint& n, uint i [[thread_index_in_threadgroup]]) {
  for (uint k = 0; k < n; ++k) threadgroup_barrier(mem_flags::mem_threadgroup);
  y[i] = 1.0f;
}
kernel void parts(device float* y, uint i [[thread_position_in_grid]]) {
  float a = y[i];
  if (i % 32 < 16)
    a = exp(a);
  else
    a = log(a);
  y[i] = a;
}
kernel void halves(device float* y, device const half* x, uint i [[thread_position_in_grid]]) {
  half a = x[i] * half(3.0h) + half(1.0h);
  y[i] = float(a);
}
kernel void product(device float* y, device const float* x, uint i [[thread_position_in_grid]]) {
  simdgroup_float8x8 a, b, c = simdgroup_float8x8(0.0f);
  simdgroup_load(a, x, 8);
  simdgroup_load(b, x + 64, 8);
  simdgroup_multiply_accumulate(c, a, b, c);
  simdgroup_store(c, y, 8);
}
kernel void atomics(device atomic_uint* y, uint i [[thread_position_in_grid]]) {
  atomic_fetch_add_explicit(y, i, memory_order_relaxed);
}
kernel void loops(device float* y, uint i [[thread_position_in_grid]]) {
  float a = y[i];
  for (uint k = 0; k < i % 32; ++k) a = cos(a);
  y[i] = a;
}
kernel void integers(device uint* y, constant uint& n, uint i [[thread_position_in_grid]]) {
  uint a = y[i];
  y[i] = (a * n + 5u) ^ a / n;
}
"""


@pytest.fixture(scope="module")
def library():
    return CountedLibrary(SOURCE)


def counted(library, kernel, *arguments, threads=64, group=64, **options):
    with counting() as counts:
        getattr(library, kernel)(*arguments, threads=(threads,), group_size=(group,), **options)
    return counts[0]


def kinds(counts, *prefixes):
    """The instructions of some kinds, of a simdgroup where both do the same."""
    return {kind: times / 2 for kind, times in counts.instructions.items() if kind.startswith(prefixes)}


def values(count, dtype=torch.float32):
    return torch.ones(count, device="mps", dtype=dtype)


def test_chains_of_fused_products(library):
    y, x = values(64), values(64)
    found = counted(library, "chain", y, x)
    assert kinds(found, "float", "device") == {"float32.fma": 8, "device.load": 1, "device.store": 1}
    assert found.memory["device", "load"] == (2, 64, 256, 2, 8, 0, (2, 2))
    assert found.lanes == 1 and found.parted == 0
    assert y.tolist() == [1.0] * 64  # what was counted is undone


def test_vectors_are_one_access_of_four_lines(library):
    found = counted(library, "copy", values(256), values(256))
    assert kinds(found, "device") == {"device.load": 1, "device.store": 1}
    assert found.memory["device", "store"] == (2, 64, 1024, 8, 32, 0, (8, 8))


def test_components_of_two_vectors_that_take_turns_are_two_accesses(library):
    found = counted(library, "scale", values(256), values(256))
    assert kinds(found, "device") == {"device.load": 2, "device.store": 1}
    assert found.memory["device", "load"] == (4, 128, 2048, 16, 64, 0, (16, 16))


def test_strides_touch_a_line_for_each_lane(library):
    found = counted(library, "strided", values(64), values(2048))
    assert found.memory["device", "load"] == (2, 64, 256, 64, 64, 0, (64, 64))
    assert [(buffer.read, buffer.written, buffer.distinct) for buffer in found.buffers] == [(0, 2, 2), (64, 0, 64)]


def test_banks_of_threadgroup_memory(library):
    found = counted(library, "banks", values(64))
    assert found.memory["threadgroup", "store"][:3] == (4, 128, 512)
    assert found.memory["threadgroup", "store"].passes == found.memory["threadgroup", "load"].passes == 2 * (32 + 1)
    assert found.threadgroup_memory == 4 * 64 * (32 + 33)
    assert kinds(found, "barrier", "convert") == {"barrier": 1, "convert": 1}


def test_exchanges_of_lanes(library):
    found = counted(library, "lanes", values(64))
    assert kinds(found, "simd", "float", "thread") == {"simd.reduce": 1, "simd.fetch": 1, "float32.add": 1}


def test_barriers_in_a_loop(library):
    found = counted(library, "waits", values(64), 5, arg_casts={1: "int32"})
    assert kinds(found, "barrier") == {"barrier": 5}


def test_lanes_that_part(library):
    found = counted(library, "parts", values(64))
    assert kinds(found, "special") == {"special.exp": 1, "special.log": 1}
    assert found.parted == 2
    at = next(line for line, text in enumerate(SOURCE.split("\n"), 1) if "exp(a)" in text)
    assert found.lines["program_source", at]["special.exp"] == 2


def test_halves_are_not_converted(library):
    found = counted(library, "halves", values(64), values(64, torch.float16))
    assert kinds(found, "float", "convert") == {"float16.fma": 1, "convert": 1}
    assert found.memory["device", "load"] == (2, 64, 128, 2, 4, 0, (1, 1))


def test_products_of_matrices(library):
    found = counted(library, "product", values(64), values(128), threads=32, group=32)
    assert kinds(found, "matrix") == {"matrix.float32": 0.5}  # one simdgroup
    assert found.memory["device", "load"].lanes == 2 * 32 and found.memory["device", "load"].bytes == 512
    assert found.memory["device", "store"].lines == 2


def test_atomics(library):
    y = torch.zeros(1, device="mps", dtype=torch.int32)
    found = counted(library, "atomics", y)
    assert found.memory["device", "atomic"] == (2, 64, 256, 2, 2, 0, (1, 1))
    assert y.item() == 0


def test_a_simdgroup_loops_as_often_as_its_slowest_lane(library):
    found = counted(library, "loops", values(64))
    assert kinds(found, "special") == {"special.cos": 31}
    assert found.parted == 2 * 31


def test_integers(library):
    found = counted(library, "integers", values(64, torch.int32), 3, arg_casts={1: "int32"})
    assert kinds(found, "int") == {"int32.mul": 1, "int32.add": 2, "int32.div": 1}


def test_a_sample_stands_for_the_whole(library):
    with counting(events=1) as few:
        library.chain(values(64 * 100), values(64 * 100), threads=(6400,), group_size=(64,))
    assert few[0].sampled < few[0].groups == 100
    assert few[0].instructions["float32.fma"] == 2 * 8 * 100
    assert few[0].buffers[0].shared == (0, -1, -1) and few[0].buffers[0].written == 200


def test_ops_are_counted_and_give_their_results():
    x = torch.linspace(-1, 1, 4096, device="mps")
    with counting() as counts:
        y = metalcore.relu(x)
    assert torch.equal(y.cpu(), x.cpu().relu())
    assert counts[0].memory["device", "load"].bytes == counts[0].memory["device", "store"].bytes == 4 * 4096
    with counting() as counts:
        pass
    assert counts == []


def test_counting_within_counting_is_refused():
    with counting(), pytest.raises(RuntimeError, match="counted already"), counting():
        pass
    with counting() as counts:
        metalcore.relu(values(64))
    assert len(counts) == 1


PROCESS = """
import torch, metalcore.simulator
metalcore.compile_shader("kernel void twice(device float* x, uint i [[thread_position_in_grid]]) { x[i] *= 2; }").twice(
    metalcore.relu(torch.ones(64, device="mps")))
"""


def test_the_environment_has_a_process_counted(tmp_path):
    def run(wanted):
        return python("-c", PROCESS, env={**os.environ, "METALCORE_COUNT": wanted})

    result = run(str(tmp_path / "counts-%p.json"))
    [path] = tmp_path.glob("counts-*.json")
    found = json.loads(path.read_text())
    assert [each["kernel"] for each in found] == ["relu_packed_float", "twice"], result.stderr
    assert found[1]["memory"]["device.store"]["bytes"] == 256
    assert ["program_source", 1] in [line[:2] for line in found[1]["lines"]]
    said = run("m2-max").stderr
    assert "m2-max, 38 cores" in said and "twice: " in said
    assert "ValueError: METALCORE_COUNT must be a path" in run("1").stderr
