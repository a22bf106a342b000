"""Correct kernels of many styles: checking mode raises no alarm and does not change what they compute."""

import metalcore
import pytest
import torch
from metalcore.simulator import checking

HEADER = """#include <metal_stdlib>
using namespace metal;
"""


def run(source, *arguments, threads, group, seed):
    library = metalcore.compile_shader(HEADER + source)
    with checking(seed=seed):
        library.run(*arguments, threads=threads, group_size=group)
    return [a.cpu() if isinstance(a, torch.Tensor) else a for a in arguments]


@pytest.fixture(params=[0, 1, 2])
def seed(request):
    return request.param


def test_scan_in_threadgroup_memory(seed):
    x = torch.randint(0, 100, (256,), dtype=torch.int32)
    _, out = run("""
kernel void run(device const int* x, device int* out, uint t [[thread_position_in_threadgroup]]) {
  threadgroup int values[2][256];
  values[0][t] = x[t];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  uint from = 0;
  for (uint step = 1; step < 256; step *= 2) {
    values[1 - from][t] = values[from][t] + (t >= step ? values[from][t - step] : 0);
    from = 1 - from;
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  out[t] = values[from][t];
}""", x.to("mps"), torch.zeros(256, dtype=torch.int32, device="mps"), threads=256, group=256, seed=seed)
    assert torch.equal(out, x.cumsum(0).int())


def test_scan_with_simd_operations(seed):
    x = torch.randint(0, 100, (320,), dtype=torch.int32)
    _, out = run("""
kernel void run(device const int* x, device int* out, uint t [[thread_position_in_threadgroup]],
                uint lane [[thread_index_in_simdgroup]], uint s [[simdgroup_index_in_threadgroup]],
                uint count [[simdgroups_per_threadgroup]]) {
  threadgroup int totals[32];
  int sum = simd_prefix_inclusive_sum(x[t]);
  if (lane == 31) totals[s] = sum;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (s == 0) {
    int total = lane < count ? totals[lane] : 0;
    total = simd_prefix_exclusive_sum(total);
    if (lane < count) totals[lane] = total;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[t] = sum + totals[s];
}""", x.to("mps"), torch.zeros(320, dtype=torch.int32, device="mps"), threads=320, group=320, seed=seed)
    assert torch.equal(out, x.cumsum(0).int())


def test_tiled_matmul_with_double_buffering(seed):
    a, b = torch.randint(-4, 5, (32, 48)).float(), torch.randint(-4, 5, (48, 32)).float()
    *_, c = run("""
constant constexpr uint T = 16;
kernel void run(device const float* a, device const float* b, device float* c, uint2 t [[thread_position_in_threadgroup]],
                uint2 g [[threadgroup_position_in_grid]]) {
  threadgroup float as[2][T][T], bs[2][T][T];
  const uint row = g.y * T + t.y, column = g.x * T + t.x;
  float sum = 0;
  as[0][t.y][t.x] = a[row * 48 + t.x];
  bs[0][t.y][t.x] = b[t.y * 32 + column];
  for (uint k = 0; k < 3; ++k) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (k < 2) {
      as[(k + 1) % 2][t.y][t.x] = a[row * 48 + (k + 1) * T + t.x];
      bs[(k + 1) % 2][t.y][t.x] = b[((k + 1) * T + t.y) * 32 + column];
    }
    for (uint i = 0; i < T; ++i) sum += as[k % 2][t.y][i] * bs[k % 2][i][t.x];
  }
  c[row * 32 + column] = sum;
}""", a.to("mps"), b.to("mps"), torch.zeros(32, 32, device="mps"), threads=(32, 32), group=(16, 16), seed=seed)
    assert torch.equal(c, a @ b)


def test_simdgroup_matrix(seed):
    a, b = torch.randint(-4, 5, (8, 8)).float(), torch.randint(-4, 5, (8, 8)).float()
    *_, c = run("""
kernel void run(device const float* a, device const float* b, device float* c) {
  threadgroup float staged[64];
  simdgroup_float8x8 x, y, z = make_filled_simdgroup_matrix<float, 8, 8>(1.0f);
  simdgroup_load(x, a, 8);
  simdgroup_load(y, b, 8);
  simdgroup_multiply_accumulate(z, x, y, z);
  simdgroup_store(z, staged, 8);
  simdgroup_barrier(mem_flags::mem_threadgroup);
  simdgroup_load(x, staged, 8);
  simdgroup_store(x, c, 8);
}""", a.to("mps"), b.to("mps"), torch.zeros(8, 8, device="mps"), threads=32, group=32, seed=seed)
    assert torch.equal(c, a @ b + 1)


def test_simdgroups_with_different_tasks(seed):
    """One simdgroup fills a buffer while the others use the one filled before."""
    x = torch.randint(0, 9, (4 * 32,)).float()
    _, out = run("""
kernel void run(device const float* x, device float* out, uint t [[thread_position_in_threadgroup]],
                uint lane [[thread_index_in_simdgroup]], uint s [[simdgroup_index_in_threadgroup]]) {
  threadgroup float buffers[2][32];
  float sum = 0;
  for (uint step = 0; step <= 4; ++step) {
    if (s == 0) {
      if (step < 4) buffers[step % 2][lane] = x[step * 32 + lane];
    } else if (step > 0) {
      sum += s * buffers[(step - 1) % 2][31 - lane];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  out[t] = sum;
}""", x.to("mps"), torch.zeros(96, device="mps"), threads=96, group=96, seed=seed)
    sums = x.view(4, 32).sum(0).flip(0)
    assert torch.equal(out, torch.cat([0 * sums, sums, 2 * sums]))


def test_histogram_of_threadgroup_and_device_atomics(seed):
    x = torch.randint(0, 16, (1024,), dtype=torch.int32)
    _, out = run("""
kernel void run(device const int* x, device atomic_int* out, uint i [[thread_position_in_grid]],
                uint t [[thread_position_in_threadgroup]]) {
  threadgroup atomic_int bins[16];
  if (t < 16) atomic_store_explicit(&bins[t], 0, memory_order_relaxed);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  atomic_fetch_add_explicit(&bins[x[i]], 1, memory_order_relaxed);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (t < 16) atomic_fetch_add_explicit(&out[t], atomic_load_explicit(&bins[t], memory_order_relaxed), memory_order_relaxed);
}""", x.to("mps"), torch.zeros(16, dtype=torch.int32, device="mps"), threads=1024, group=128, seed=seed)
    assert torch.equal(out, torch.bincount(x, minlength=16).int())


def test_the_last_threadgroup_adds_what_all_wrote(seed):
    x = torch.randint(0, 9, (16 * 64,)).float()
    *_, done, out = run("""
kernel void run(device const float* x, device float* partial, device atomic_uint* done, device float* out,
                uint i [[thread_position_in_grid]], uint t [[thread_position_in_threadgroup]],
                uint g [[threadgroup_position_in_grid]], uint groups [[threadgroups_per_grid]]) {
  threadgroup bool last;
  threadgroup float sums[2];
  float sum = simd_sum(x[i]);
  if (t % 32 == 0) sums[t / 32] = sum;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (t == 0) partial[g] = sums[0] + sums[1];
  threadgroup_barrier(mem_flags::mem_device);
  if (t == 0) last = atomic_fetch_add_explicit(done, 1, memory_order_relaxed) == groups - 1;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (!last) return;
  float total = t < groups ? partial[t] : 0;
  total = simd_sum(total);
  if (t == 0) {
    *out = total;
    atomic_store_explicit(done, 0, memory_order_relaxed);
  }
}""", x.to("mps"), torch.zeros(16, device="mps"), torch.zeros(1, dtype=torch.int32, device="mps"),
                        torch.zeros(1, device="mps"), threads=16 * 64, group=64, seed=seed)
    assert out.item() == x.sum().item()
    assert done.item() == 0


def test_the_last_thread_without_barriers(seed):
    """Each thread publishes its own element and counts itself; who counts last reads all."""
    out = run("""
kernel void run(device uint* values, device atomic_uint* done, device uint* out, uint i [[thread_position_in_grid]],
                uint n [[threads_per_grid]]) {
  values[i] = i + 1;
  if (atomic_fetch_add_explicit(done, 1, memory_order_relaxed) != n - 1) return;
  uint sum = 0;
  for (uint k = 0; k < n; ++k) sum += values[k];
  *out = sum;
}""", *(torch.zeros(n, dtype=torch.int32, device="mps") for n in (50, 1, 1)), threads=50, group=10, seed=seed)[2]
    assert out.item() == 50 * 51 // 2


def test_a_thread_that_waits_for_a_flag(seed):
    """Within a threadgroup, over simdgroups."""
    out = run("""
kernel void run(device uint* out, device uint* data, device atomic_uint* flag, uint t [[thread_position_in_threadgroup]]) {
  if (t == 40) {
    for (uint i = 0; i < 8; ++i) data[i] = i;
    atomic_store_explicit(flag, 1, memory_order_relaxed);
  }
  if (t == 3) {
    while (atomic_load_explicit(flag, memory_order_relaxed) == 0) {}
    uint sum = 0;
    for (uint i = 0; i < 8; ++i) sum += data[i];
    *out = sum;
  }
  threadgroup_barrier(mem_flags::mem_none);
}""", *(torch.zeros(n, dtype=torch.int32, device="mps") for n in (1, 8, 1)), threads=64, group=64, seed=seed)[0]
    assert out.item() == 28


def test_chained_scan_over_threadgroups(seed):
    """Each threadgroup takes a ticket and adds to what the one before it published."""
    x = torch.randint(0, 9, (8 * 32,), dtype=torch.int32)
    out = run("""
kernel void run(device const int* x, device int* out, device atomic_uint* ticket, device atomic_int* published,
                uint lane [[thread_index_in_simdgroup]]) {
  threadgroup uint mine;
  if (lane == 0) mine = atomic_fetch_add_explicit(ticket, 1, memory_order_relaxed);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const uint at = mine * 32 + lane;
  const int sum = simd_prefix_inclusive_sum(x[at]);
  threadgroup int before;
  if (lane == 31) {
    int seen = 0;
    if (mine > 0)
      while ((seen = atomic_load_explicit(&published[mine - 1], memory_order_relaxed)) == 0) {}
    before = mine > 0 ? seen - 1 : 0;
    atomic_store_explicit(&published[mine], before + sum + 1, memory_order_relaxed);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[at] = sum + before;
}""", x.to("mps"), torch.zeros_like(x, device="mps"), torch.zeros(1, dtype=torch.int32, device="mps"),
              torch.zeros(8, dtype=torch.int32, device="mps"), threads=8 * 32, group=32, seed=seed)[1]
    assert torch.equal(out, x.cumsum(0).int())


def test_bitonic_sort(seed):
    x = torch.randperm(128).float()
    (out,) = run("""
kernel void run(device float* x, uint t [[thread_position_in_threadgroup]]) {
  threadgroup float values[128];
  values[t] = x[t];
  values[t + 64] = x[t + 64];
  for (uint k = 2; k <= 128; k *= 2)
    for (uint j = k / 2; j > 0; j /= 2) {
      threadgroup_barrier(mem_flags::mem_threadgroup);
      const uint a = 2 * t - (t & (j - 1)), b = a + j;
      if ((values[a] > values[b]) == ((a & k) == 0)) {
        const float swap = values[a];
        values[a] = values[b];
        values[b] = swap;
      }
    }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  x[t] = values[t];
  x[t + 64] = values[t + 64];
}""", x.to("mps"), threads=64, group=64, seed=seed)
    assert torch.equal(out, torch.arange(128.0))


def test_transpose_through_padded_threadgroup_memory(seed):
    x = torch.arange(64 * 32, dtype=torch.float16).view(64, 32)
    _, out = run("""
kernel void run(device const half* x, device half* out, uint2 t [[thread_position_in_threadgroup]],
                uint2 g [[threadgroup_position_in_grid]]) {
  threadgroup half tile[16][17];
  tile[t.y][t.x] = x[(g.y * 16 + t.y) * 32 + g.x * 16 + t.x];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[(g.x * 16 + t.y) * 64 + g.y * 16 + t.x] = tile[t.x][t.y];
}""", x.to("mps"), torch.zeros(32, 64, dtype=torch.float16, device="mps"), threads=(32, 64), group=(16, 16), seed=seed)
    assert torch.equal(out, x.T)


def test_neighbouring_bytes_of_different_threads(seed):
    _, out = run("""
kernel void run(device const uchar* x, device uchar* out, uint t [[thread_position_in_threadgroup]]) {
  threadgroup uchar values[64];
  values[t] = x[t];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[t] = values[t ^ 1] + 1;
}""", torch.arange(64, dtype=torch.uint8, device="mps"), torch.zeros(64, dtype=torch.uint8, device="mps"), threads=64, group=64,
                 seed=seed)
    assert torch.equal(out, torch.arange(64, dtype=torch.uint8).view(32, 2).flip(1).flatten() + 1)


def test_structs_and_vectors_in_threadgroup_memory(seed):
    out = run("""
struct Pair { float value; uint index; };
kernel void run(device const float* x, device uint* out, device float4* sums, uint t [[thread_position_in_threadgroup]]) {
  threadgroup Pair best[64];
  threadgroup float4 quads[64];
  best[t] = {x[t], t};
  quads[t] = float4(x[t], 1, 2, 3);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint k = 32; k > 0; k /= 2) {
    if (t < k) {
      if (best[t + k].value > best[t].value) best[t] = best[t + k];
      quads[t].yzw += quads[t + k].yzw;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  if (t == 0) {
    *out = best[0].index;
    *sums = quads[0];
  }
}""", torch.rand(64).sort().values.to("mps"), torch.zeros(1, dtype=torch.int32, device="mps"), torch.zeros(4, device="mps"),
              threads=64, group=64, seed=seed)
    assert out[1].item() == 63
    assert out[2].tolist()[1:] == [64, 128, 192]


def test_threads_that_write_the_same_value(seed):
    _, out = run("""
kernel void run(device const int* x, device int* out, uint t [[thread_position_in_threadgroup]]) {
  threadgroup int found;
  threadgroup int length;
  length = 7;
  if (t == 0) found = 0;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (x[t] == 3) found = 1;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[0] = found * length;
}""", (torch.arange(64, dtype=torch.int32) % 8).to("mps"), torch.zeros(1, dtype=torch.int32, device="mps"), threads=64, group=64,
                 seed=seed)
    assert out.item() == 7


def test_exchange_through_device_memory(seed):
    x = torch.arange(256, dtype=torch.int32)
    (out,) = run("""
kernel void run(device int* x, uint i [[thread_position_in_grid]], uint t [[thread_position_in_threadgroup]]) {
  for (uint step = 1; step < 64; step *= 2) {
    const int other = x[i - t + (t ^ step)];
    threadgroup_barrier(mem_flags::mem_device);
    x[i] = other;
    threadgroup_barrier(mem_flags::mem_device);
  }
}""", x.to("mps"), threads=256, group=64, seed=seed)
    assert torch.equal(out, x.view(4, 64).flip(1).flatten())


def test_simdgroup_that_works_alone(seed):
    """Barriers of one simdgroup, also by a part of its lanes, order what its lanes do."""
    out = run("""
kernel void run(device int* out, uint lane [[thread_index_in_simdgroup]], uint s [[simdgroup_index_in_threadgroup]]) {
  threadgroup int values[4][32];
  threadgroup int* mine = values[s];
  mine[lane] = lane;
  simdgroup_barrier(mem_flags::mem_threadgroup);
  for (uint step = 16; step > 0; step /= 2) {
    if (lane < step) mine[lane] += mine[lane + step];
    simdgroup_barrier(mem_flags::mem_threadgroup);
  }
  out[s * 32 + lane] = mine[0];
}""", torch.zeros(128, dtype=torch.int32, device="mps"), threads=128, group=128, seed=seed)[0]
    assert (out == 31 * 16).all()


def test_grid_that_does_not_fill_its_threadgroups(seed):
    out = run("""
kernel void run(device int* out, uint3 i [[thread_position_in_grid]], uint3 n [[threads_per_grid]],
                uint t [[thread_index_in_threadgroup]], uint3 size [[threads_per_threadgroup]]) {
  threadgroup int count;
  if (t == 0) count = size.x * size.y * size.z;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[(i.z * n.y + i.y) * n.x + i.x] = count;
}""", torch.zeros(5 * 3 * 3, dtype=torch.int32, device="mps"), threads=(5, 3, 3), group=(4, 2, 2), seed=seed)[0]
    assert out.view(3, 3, 5)[0, 0].tolist() == [16, 16, 16, 16, 4]
    assert out.view(3, 3, 5)[2, 2].tolist() == [4, 4, 4, 4, 1]


def test_constants_and_local_arrays(seed):
    out = run("""
constant float weights[4] = {1, 2, 4, 8};
constant int2 offsets[] = {int2(1, 0), int2(0, 1)};
kernel void run(device float* out, constant float4& scale, uint i [[thread_position_in_grid]]) {
  float local[4];
  for (uint k = 0; k < 4; ++k) local[(k + i) % 4] = weights[k] * scale[k];
  out[i] = local[i % 4] + offsets[i % 2].x;
}""", torch.zeros(8, device="mps"), [1.0, 1.0, 1.0, 1.0], threads=8, group=8, seed=seed)[0]
    assert out.tolist() == [2.0, 1.0] * 4


def test_strided_and_offset_views(seed):
    storage = torch.arange(40.0, device="mps")
    x, out = storage[3:23], storage[24:34]
    run("""
kernel void run(device const float* x, device float* out, uint i [[thread_position_in_grid]]) { out[i] = x[2 * i]; }""",
        x[::2], out, threads=10, group=10, seed=seed)
    assert torch.equal(out.cpu(), torch.arange(3.0, 23.0, 2))


def test_a_barrier_without_flags_orders_what_was_read(seed):
    """Two reductions through one buffer, each in a barrier that publishes nothing after the first one's reads."""
    x = torch.randint(0, 100, (128,)).float()
    _, out = run("""
kernel void run(device const float* x, device float* out, uint t [[thread_position_in_threadgroup]],
                uint lane [[thread_index_in_simdgroup]], uint s [[simdgroup_index_in_threadgroup]]) {
  threadgroup float totals[4];
  if (lane == 0) totals[s] = x[t];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float first = totals[lane % 4];
  threadgroup_barrier(mem_flags::mem_none);
  if (lane == 0) totals[s] = -x[t];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[t] = first - totals[lane % 4];
}""", x.to("mps"), torch.zeros(128, device="mps"), threads=128, group=128, seed=seed)
    assert torch.equal(out, 2 * x[::32].repeat(32))


def test_a_simd_operation_orders_what_its_lanes_have_read(seed):
    x = torch.randint(0, 100, (32,)).float()
    _, out = run("""
kernel void run(device const float* x, device float* out, uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float values[32];
  values[lane] = x[lane];
  simdgroup_barrier(mem_flags::mem_threadgroup);
  float sum = simd_sum(values[31 - lane]);
  if (lane == 0) values[5] = sum;
  simdgroup_barrier(mem_flags::mem_threadgroup);
  out[lane] = values[5];
}""", x.to("mps"), torch.zeros(32, device="mps"), threads=32, group=32, seed=seed)
    assert torch.equal(out, x.sum().repeat(32))


def test_memory_that_was_not_written_may_be_read_and_left_unused(seed):
    """An exclusive scan over as many lanes as there are simdgroups; the others' values reach nobody."""
    x = torch.randint(0, 100, (96,)).float()
    _, out = run("""
struct Total { float sum; bool known; };
kernel void run(device const float* x, device float* out, uint t [[thread_position_in_threadgroup]],
                uint lane [[thread_index_in_simdgroup]], uint s [[simdgroup_index_in_threadgroup]]) {
  threadgroup float sums[32];
  threadgroup Total totals[32];
  float before = simd_prefix_exclusive_sum(x[t]);
  if (lane == 31) sums[s] = before + x[t];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (s == 0) {
    totals[lane].sum = simd_prefix_exclusive_sum(sums[lane]);
    totals[lane].known = true;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  Total total = totals[s];  // with the bytes between its members
  out[t] = total.known ? total.sum + before : 0;
}""", x.to("mps"), torch.zeros(96, device="mps"), threads=96, group=96, seed=seed)
    assert torch.equal(out, x.cumsum(0) - x)
