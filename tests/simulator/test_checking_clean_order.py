"""Kernels that order their threads without a barrier of the whole threadgroup: checking mode raises no alarm."""

import torch
from checked_kernels import in_several_orders, run

pytestmark = in_several_orders


def test_simdgroups_with_different_tasks(seed):
    """One simdgroup fills a buffer while the others use the one that it filled before."""
    x = torch.randint(0, 9, (4 * 32,)).float()
    _, out = run(
        """
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
}""",
        x.to("mps"),
        torch.zeros(96, device="mps"),
        threads=96,
        group=96,
        seed=seed,
    )
    sums = x.view(4, 32).sum(0).flip(0)
    assert torch.equal(out, torch.cat([0 * sums, sums, 2 * sums]))


def test_the_last_thread_without_barriers(seed):
    """Each thread publishes its own element and counts itself; the last one to count reads every element."""
    out = run(
        """
kernel void run(device uint* values, device atomic_uint* done, device uint* out, uint i [[thread_position_in_grid]],
                uint n [[threads_per_grid]]) {
  values[i] = i + 1;
  if (atomic_fetch_add_explicit(done, 1, memory_order_relaxed) != n - 1) return;
  uint sum = 0;
  for (uint k = 0; k < n; ++k) sum += values[k];
  *out = sum;
}""",
        *(torch.zeros(n, dtype=torch.int32, device="mps") for n in (50, 1, 1)),
        threads=50,
        group=10,
        seed=seed,
    )[2]
    assert out.item() == 50 * 51 // 2


def test_a_thread_that_waits_for_a_flag(seed):
    """The same within a threadgroup, across simdgroups."""
    out = run(
        """
kernel void run(device uint* out, device uint* data, device atomic_uint* flag,
                uint t [[thread_position_in_threadgroup]]) {
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
}""",
        *(torch.zeros(n, dtype=torch.int32, device="mps") for n in (1, 8, 1)),
        threads=64,
        group=64,
        seed=seed,
    )[0]
    assert out.item() == 28


def test_threads_that_write_the_same_value(seed):
    _, out = run(
        """
kernel void run(device const int* x, device int* out, uint t [[thread_position_in_threadgroup]]) {
  threadgroup int found;
  threadgroup int length;
  length = 7;
  if (t == 0) found = 0;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (x[t] == 3) found = 1;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[0] = found * length;
}""",
        (torch.arange(64, dtype=torch.int32) % 8).to("mps"),
        torch.zeros(1, dtype=torch.int32, device="mps"),
        threads=64,
        group=64,
        seed=seed,
    )
    assert out.item() == 7


def test_exchange_through_device_memory(seed):
    x = torch.arange(256, dtype=torch.int32)
    (out,) = run(
        """
kernel void run(device int* x, uint i [[thread_position_in_grid]], uint t [[thread_position_in_threadgroup]]) {
  for (uint step = 1; step < 64; step *= 2) {
    const int other = x[i - t + (t ^ step)];
    threadgroup_barrier(mem_flags::mem_device);
    x[i] = other;
    threadgroup_barrier(mem_flags::mem_device);
  }
}""",
        x.to("mps"),
        threads=256,
        group=64,
        seed=seed,
    )
    assert torch.equal(out, x.view(4, 64).flip(1).flatten())


def test_simdgroup_that_works_alone(seed):
    """Barriers of one simdgroup, or of a part of its lanes, order the accesses of these lanes."""
    out = run(
        """
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
}""",
        torch.zeros(128, dtype=torch.int32, device="mps"),
        threads=128,
        group=128,
        seed=seed,
    )[0]
    assert (out == 31 * 16).all()


def test_a_barrier_without_flags_orders_what_was_read(seed):
    """Two reductions use one buffer; the barrier after the first one's reads publishes nothing."""
    x = torch.randint(0, 100, (128,)).float()
    _, out = run(
        """
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
}""",
        x.to("mps"),
        torch.zeros(128, device="mps"),
        threads=128,
        group=128,
        seed=seed,
    )
    assert torch.equal(out, 2 * x[::32].repeat(32))


def test_a_simd_operation_orders_what_its_lanes_have_read(seed):
    x = torch.randint(0, 100, (32,)).float()
    _, out = run(
        """
kernel void run(device const float* x, device float* out, uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float values[32];
  values[lane] = x[lane];
  simdgroup_barrier(mem_flags::mem_threadgroup);
  float sum = simd_sum(values[31 - lane]);
  if (lane == 0) values[5] = sum;
  simdgroup_barrier(mem_flags::mem_threadgroup);
  out[lane] = values[5];
}""",
        x.to("mps"),
        torch.zeros(32, device="mps"),
        threads=32,
        group=32,
        seed=seed,
    )
    assert torch.equal(out, x.sum().repeat(32))
