"""Kernels that use barriers or threadgroup memory wrongly, without a race, each with its clean twin."""

import torch
from checked_kernels import Buffer, Case

THREADGROUP_FAULTS = [
    Case(
        "barrier in a divergent branch",
        "divergent barrier",
        """
kernel void run(device const float* x, device float* out, uint t [[thread_position_in_threadgroup]]) {
  threadgroup float values[64];
  values[t] = x[t];
  if (t < 20) {
    values[t] += 1;
    threadgroup_barrier(mem_flags::mem_threadgroup);  // @bad @here
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[t] = values[63 - t];
}""",
        (Buffer(64), Buffer(64)),
        (64,),
        (64,),
        thread=lambda t: t[0] < 20,
    ),
    Case(
        "barrier that some threads never reach",
        "divergent barrier",
        """
kernel void run(device const float* x, device float* out, constant uint& n, uint t [[thread_position_in_threadgroup]]) {
  threadgroup float values[64];
  if (t >= n) return;  // @bad
  values[t] = t < n ? x[t] : 0;
  threadgroup_barrier(mem_flags::mem_threadgroup);  // @here
  if (t < n) out[t] = values[n - 1 - t];
}""",
        (Buffer(40), Buffer(40), 40),
        (64,),
        (64,),
        "24 threads of its threadgroup, (40, 0, 0) for one, will not reach",
    ),
    Case(
        "33 KiB of threadgroup memory",
        "threadgroup memory",
        """
kernel void run(device float* out, uint t [[thread_position_in_threadgroup]]) {
  threadgroup float small[256];
  threadgroup float large[7936];  // @good
  threadgroup float large[8192];  // @bad @here
  small[t] = 1;
  large[t] = 2;
  out[t] = small[t] + large[t];
}""",
        (Buffer(32),),
        (32,),
        (32,),
        "33792 bytes; Metal allows 32768",
    ),
    Case(
        "threadgroup memory read before it is written",
        "uninitialized read",
        """
kernel void run(device float* out, uint t [[thread_position_in_threadgroup]]) {
  threadgroup float sums[32];
  if (t < 32)  // @good
  if (t < 31)  // @bad
    sums[t] = 1;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[t] = sums[t % 32];  // @here
}""",
        (Buffer(64),),
        (64,),
        (64,),
        "byte 124 of 128 of a threadgroup variable",
        lambda t: t[0] % 32 == 31,
    ),
    Case(
        "histogram that is not cleared",
        "uninitialized read",
        """
kernel void run(device const uint* x, device uint* out, uint t [[thread_position_in_threadgroup]]) {
  threadgroup atomic_uint bins[16];
  if (t < 16) atomic_store_explicit(&bins[t], 0, memory_order_relaxed);  // @good
  threadgroup_barrier(mem_flags::mem_threadgroup);
  atomic_fetch_add_explicit(&bins[x[t] % 16], 1, memory_order_relaxed);  // @here
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (t < 16) out[t] = atomic_load_explicit(&bins[t], memory_order_relaxed);
}""",
        (Buffer(64, torch.int32), Buffer(16, torch.int32)),
        (64,),
        (64,),
    ),
    Case(
        "a maximum over slots that nobody wrote",
        "uninitialized read",
        """
kernel void run(device const float* x, device float* out, uint t [[thread_position_in_threadgroup]],
                uint s [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float greatest[32], unused[32];
  if (s == 0) greatest[lane] = 0;  // @good
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const float most = simd_max(x[t]);
  if (lane == 0) greatest[s] = most;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const float any = unused[lane];
  out[t] = simd_max(greatest[lane]);  // @here
  if (t == 9999) out[t] = any;
}""",
        (Buffer(64), Buffer(64)),
        (64,),
        (64,),
        "of a threadgroup variable",
    ),
    Case(
        "a loop as long as a variable that nobody wrote says",
        "uninitialized read",
        """
kernel void run(device atomic_int* out, uint t [[thread_position_in_threadgroup]]) {
  threadgroup int count;
  if (t == 0) count = 3;  // @good
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int i = 0; i < count; ++i)  // @here
    atomic_fetch_add_explicit(out, 1, memory_order_relaxed);
}""",
        (Buffer(1, torch.int32),),
        (32,),
        (32,),
    ),
]
