"""Kernels with a race, where a thread's write is not ordered before the accesses of others, or whose outcome depends
on lanes that take no part, each with its clean twin."""

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
        "barrier behind the reads of an object removed",  # the compiler copies it as a whole
        "race",
        """
kernel void run(device const half* x, device half* out, uint t [[thread_position_in_threadgroup]]) {
  threadgroup half values[64];
  for (uint i = 0; i < 2; ++i) {
    values[t] = x[t + i];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    out[t] = values[63 - t];  // @here
    threadgroup_barrier(mem_flags::mem_threadgroup);  // @good
  }
}""",
        (Buffer(65, torch.half), Buffer(64, torch.half)),
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


def _case(name, body, threads, message, thread=None):
    source = f"""
kernel void run(device const float* x, device float* out, uint t [[thread_position_in_threadgroup]],
                uint lane [[thread_index_in_simdgroup]]) {{
  float v = x[t];
{body}
}}"""
    return Case(name, "inactive lane read", source, (Buffer(64), Buffer(64)), (threads,), (threads,), message, thread)


LANE_READS = [
    _case(
        "a sum by shuffles over a short simdgroup",
        """
  v = simd_sum(v);  // @good
  for (ushort n = 16; n; n /= 2) v += simd_shuffle_down(v, n);  // @bad @here
  if (t == 0) out[t] = v;""",
        20,
        "of its simdgroup, which takes no part here",
        lambda t: t[0] >= 4,
    ),
    _case(
        "a maximum over lanes of which some have ended",
        """
  if (t >= 20) v = -1;    // @good
  if (t >= 20) return;  // @bad
  v = -v - 1;
  for (ushort n = 16; n; n /= 2) v = max(v, simd_shuffle_xor(v, n));  // @here
  out[t] = v;""",
        32,
        "and the outcome depends on it: Metal leaves it open, and Apple's GPUs give 0",
    ),
    _case(
        "broadcast from a lane that is not in the branch",
        """
  if (t >= 3) {
    out[t] = simd_broadcast(v, 3);  // @good
    out[t] = simd_broadcast(v, 2);  // @bad @here
  }""",
        64,
        "takes the value of lane 2 of its simdgroup",
        lambda t: t[0] % 32 >= 3,
    ),
    _case(
        "a lane that no simdgroup has",
        """
  const ushort next = (lane + 1) % 32;  // @good
  const ushort next = lane + 1;  // @bad
  out[t] = simd_shuffle(v, next);  // @here""",
        64,
        "a lane that its simdgroup or quad does not have",
        lambda t: t[0] % 32 == 31,
    ),
    _case(
        "a rotation in a short quad, of wide values",
        """
  const long4 all = quad_shuffle_rotate_down(long4(v * 100, 2, 3, 4 + t), 1);  // @here
  if (t < 16)  // @good
  out[t] = float(all.x + all.w);""",
        18,
        "takes the value of lane 18 of its simdgroup",
        lambda t: t[0] == 17,
    ),
    _case(
        "a matrix product by half a simdgroup",
        """
  simdgroup_float8x8 a = make_filled_simdgroup_matrix<float, 8, 8>(2), b = a, c;
  simdgroup_multiply(c, a, b);  // @here
  if (lane > 99)  // @good
  out[t] = c.thread_elements()[0];""",
        16,
        "which takes no part here",
    ),
    _case(
        "a shuffle up whose lowest lanes keep their own",
        """
  v = simd_shuffle_up(v, 3) + simd_shuffle_down(v, 40) + quad_shuffle_up(v, 1);
  v = lane < 30 ? simd_shuffle_down(v, 1) : v;  // @here
  if (lane < 29 || lane > 29)  // @good
  out[t] = v;""",
        64,
        "takes the value of lane 30 of its simdgroup",
        lambda t: t[0] % 32 == 29,
    ),
]
