"""Textbook kernels: checking mode raises no alarm and does not change what they compute."""

import torch
from checked_kernels import in_several_orders, run

pytestmark = in_several_orders


def test_scan_in_threadgroup_memory(seed):
    x = torch.randint(0, 100, (256,), dtype=torch.int32)
    _, out = run(
        """
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
}""",
        x.to("mps"),
        torch.zeros(256, dtype=torch.int32, device="mps"),
        threads=256,
        group=256,
        seed=seed,
    )
    assert torch.equal(out, x.cumsum(0).int())


def test_scan_with_simd_operations(seed):
    x = torch.randint(0, 100, (320,), dtype=torch.int32)
    _, out = run(
        """
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
}""",
        x.to("mps"),
        torch.zeros(320, dtype=torch.int32, device="mps"),
        threads=320,
        group=320,
        seed=seed,
    )
    assert torch.equal(out, x.cumsum(0).int())


def test_tiled_matmul_with_double_buffering(seed):
    a, b = torch.randint(-4, 5, (32, 48)).float(), torch.randint(-4, 5, (48, 32)).float()
    *_, c = run(
        """
constant constexpr uint T = 16;
kernel void run(device const float* a, device const float* b, device float* c,
                uint2 t [[thread_position_in_threadgroup]],
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
}""",
        a.to("mps"),
        b.to("mps"),
        torch.zeros(32, 32, device="mps"),
        threads=(32, 32),
        group=(16, 16),
        seed=seed,
    )
    assert torch.equal(c, a @ b)


def test_simdgroup_matrix(seed):
    a, b = torch.randint(-4, 5, (8, 8)).float(), torch.randint(-4, 5, (8, 8)).float()
    *_, c = run(
        """
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
}""",
        a.to("mps"),
        b.to("mps"),
        torch.zeros(8, 8, device="mps"),
        threads=32,
        group=32,
        seed=seed,
    )
    assert torch.equal(c, a @ b + 1)


def test_histogram_of_threadgroup_and_device_atomics(seed):
    x = torch.randint(0, 16, (1024,), dtype=torch.int32)
    _, out = run(
        """
kernel void run(device const int* x, device atomic_int* out, uint i [[thread_position_in_grid]],
                uint t [[thread_position_in_threadgroup]]) {
  threadgroup atomic_int bins[16];
  if (t < 16) atomic_store_explicit(&bins[t], 0, memory_order_relaxed);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  atomic_fetch_add_explicit(&bins[x[i]], 1, memory_order_relaxed);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (t < 16) {
    const int count = atomic_load_explicit(&bins[t], memory_order_relaxed);
    atomic_fetch_add_explicit(&out[t], count, memory_order_relaxed);
  }
}""",
        x.to("mps"),
        torch.zeros(16, dtype=torch.int32, device="mps"),
        threads=1024,
        group=128,
        seed=seed,
    )
    assert torch.equal(out, torch.bincount(x, minlength=16).int())


def test_the_last_threadgroup_adds_what_all_wrote(seed):
    x = torch.randint(0, 9, (16 * 64,)).float()
    *_, done, out = run(
        """
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
}""",
        x.to("mps"),
        torch.zeros(16, device="mps"),
        torch.zeros(1, dtype=torch.int32, device="mps"),
        torch.zeros(1, device="mps"),
        threads=16 * 64,
        group=64,
        seed=seed,
    )
    assert out.item() == x.sum().item()
    assert done.item() == 0


def test_chained_scan_over_threadgroups(seed):
    """Each threadgroup takes a ticket and adds to the value that the one before it published."""
    x = torch.randint(0, 9, (8 * 32,), dtype=torch.int32)
    out = run(
        """
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
}""",
        x.to("mps"),
        torch.zeros_like(x, device="mps"),
        torch.zeros(1, dtype=torch.int32, device="mps"),
        torch.zeros(8, dtype=torch.int32, device="mps"),
        threads=8 * 32,
        group=32,
        seed=seed,
    )[1]
    assert torch.equal(out, x.cumsum(0).int())


def test_bitonic_sort(seed):
    x = torch.randperm(128).float()
    (out,) = run(
        """
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
}""",
        x.to("mps"),
        threads=64,
        group=64,
        seed=seed,
    )
    assert torch.equal(out, torch.arange(128.0))


def test_transpose_through_padded_threadgroup_memory(seed):
    x = torch.arange(64 * 32, dtype=torch.float16).view(64, 32)
    _, out = run(
        """
kernel void run(device const half* x, device half* out, uint2 t [[thread_position_in_threadgroup]],
                uint2 g [[threadgroup_position_in_grid]]) {
  threadgroup half tile[16][17];
  tile[t.y][t.x] = x[(g.y * 16 + t.y) * 32 + g.x * 16 + t.x];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[(g.x * 16 + t.y) * 64 + g.y * 16 + t.x] = tile[t.x][t.y];
}""",
        x.to("mps"),
        torch.zeros(32, 64, dtype=torch.float16, device="mps"),
        threads=(32, 64),
        group=(16, 16),
        seed=seed,
    )
    assert torch.equal(out, x.T)
