"""Kernels with a race, each with its clean twin: a thread's write is not ordered before the accesses of others."""

import torch
from checked_kernels import Buffer, Case

RACES = [
    Case(
        "barrier removed in a reduction",
        "race",
        """
kernel void run(device const float* x, device float* out, uint i [[thread_position_in_grid]],
                uint t [[thread_position_in_threadgroup]], uint g [[threadgroup_position_in_grid]]) {
  threadgroup float sums[128];
  sums[t] = x[i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint k = 64; k > 0; k /= 2) {
    if (t < k) {
      float other = sums[t + k];
      sums[t] += other;  // @here
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);  // @good
  }
  if (t == 0) out[g] = sums[0];
}""",
        (Buffer(512), Buffer(4)),
        (512,),
        (128,),
        "no threadgroup_barrier",
        lambda t: t[0] < 64,
    ),
    Case(
        "barrier with the wrong flags",
        "race",
        """
kernel void run(device const float* x, device float* out, uint t [[thread_position_in_threadgroup]]) {
  threadgroup float values[64];
  values[t] = x[t];
  threadgroup_barrier(mem_flags::mem_threadgroup);  // @good
  threadgroup_barrier(mem_flags::mem_device);  // @bad
  out[t] = values[63 - t];  // @here
}""",
        (Buffer(64), Buffer(64)),
        (64,),
        (64,),
        "no threadgroup_barrier",
    ),
    Case(
        "simdgroup barrier removed",
        "race or uninitialized read",  # it depends on whether the reader comes second or first
        """
kernel void run(device const float* x, device float* out, uint t [[thread_position_in_threadgroup]],
                uint s [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float values[4][32];
  values[s][lane] = x[t];
  simdgroup_barrier(mem_flags::mem_threadgroup);  // @good
  out[t] = values[s][31 - lane];  // @here
}""",
        (Buffer(128), Buffer(128)),
        (128,),
        (128,),
    ),
    Case(
        "a SIMD operation is no barrier",
        "race or uninitialized read",
        """
kernel void run(device const float* x, device float* out, uint t [[thread_position_in_threadgroup]]) {
  threadgroup float values[32];
  values[t] = x[t];
  float sum = simd_sum(x[t]);
  simdgroup_barrier(mem_flags::mem_threadgroup);  // @good
  out[t] = sum + values[31 - t];  // @here
}""",
        (Buffer(32), Buffer(32)),
        (32,),
        (32,),
    ),
    Case(
        "a value overwritten that others still read",
        "race",
        """
kernel void run(device const float* x, device float* out, uint t [[thread_position_in_threadgroup]]) {
  threadgroup float shared;
  float sum = 0;
  for (uint i = 0; i < 4; ++i) {
    threadgroup_barrier(mem_flags::mem_threadgroup);  // @good
    if (t == 0) shared = x[i];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    sum += shared;  // @here
  }
  out[t] = sum;
}""",
        (Buffer(4), Buffer(64)),
        (64,),
        (64,),
    ),
    Case(
        "histogram that is cleared without a barrier",
        "race",
        """
kernel void run(device const uint* x, device uint* out, uint t [[thread_position_in_threadgroup]]) {
  threadgroup atomic_uint bins[64];
  atomic_store_explicit(&bins[t], 0, memory_order_relaxed);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  atomic_fetch_add_explicit(&bins[(t + x[t] + 1) % 64], 1, memory_order_relaxed);
  threadgroup_barrier(mem_flags::mem_threadgroup);  // @good
  out[t] = *(threadgroup uint*)&bins[t];  // @here
}""",
        (Buffer(64, torch.int32), Buffer(64, torch.int32)),
        (64,),
        (64,),
    ),
    Case(
        "threadgroups write the same element",
        "race",
        """
kernel void run(device const float* x, device float* out, uint i [[thread_position_in_grid]],
                uint g [[threadgroup_position_in_grid]]) {
  if (i % 32 == 0)
    out[g] = x[i];  // @good
    out[g / 2] = x[i];  // @bad @here
}""",
        (Buffer(128), Buffer(4)),
        (128,),
        (32,),
        "no atomic operation in between",
    ),
    Case(
        "a threadgroup reads what another writes",
        "race",
        """
kernel void run(device float* x, device float* out, uint i [[thread_position_in_grid]], uint n [[threads_per_grid]]) {
  out[i] = x[i] + 1;
  if (i > 0) x[i] = out[i];  // @good
  if (i > 0) x[i] = out[i - 1];  // @bad @here
}""",
        (Buffer(128), Buffer(128)),
        (128,),
        (1,),
    ),
    Case(
        "simdgroups race through device memory",
        "race",
        """
kernel void run(device float* x, uint t [[thread_position_in_threadgroup]]) {
  float mine = x[t];
  threadgroup_barrier(mem_flags::mem_device);
  x[t] = mine * 2;
  threadgroup_barrier(mem_flags::mem_device);  // @good
  simdgroup_barrier(mem_flags::mem_device);  // @bad
  float other = x[(t + 32) % 64];  // @here
  threadgroup_barrier(mem_flags::mem_device);
  x[t] = other;
}""",
        (Buffer(64),),
        (64,),
        (64,),
    ),
    Case(
        "flag set without an atomic",
        "race",
        """
kernel void run(device float* data, device float* out, device atomic_uint* done,
                uint g [[threadgroup_position_in_grid]]) {
  data[g] = g;
  uint seen = atomic_fetch_add_explicit(done, 1, memory_order_relaxed);  // @good
  uint seen = atomic_load_explicit(done, memory_order_relaxed) + g;  // @bad
  if (seen == 3) out[0] = data[0] + data[1] + data[2];  // @here
}""",
        (Buffer(4), Buffer(1), Buffer(1, torch.int32)),
        (4,),
        (1,),
    ),
    Case(
        "device memory read before a barrier of threadgroup memory",
        "race",
        """
kernel void run(device float* x, uint t [[thread_position_in_threadgroup]]) {
  const float right = x[(t + 1) % 64];  // @here
  threadgroup_barrier(mem_flags::mem_threadgroup);  // @bad
  threadgroup_barrier(mem_flags::mem_device);  // @good
  x[t] = right;  // @here
}""",
        (Buffer(64),),
        (64,),
        (64,),
    ),
]
