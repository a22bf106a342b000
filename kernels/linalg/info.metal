// Whether a factorization of a batch failed: whether any of its infos is not zero. A threadgroup reads INFO_BLOCK of
// them. A second dispatch reads the results of several threadgroups.
#include <metal_stdlib>
using namespace metal;

#include "steps.h"

[[kernel]] [[max_total_threads_per_threadgroup(INFO_THREADS)]] void info_any(
    device const int* info [[buffer(0)]], device int* found [[buffer(1)]], constant uint& count [[buffer(2)]],
    uint block [[threadgroup_position_in_grid]], uint index [[thread_index_in_threadgroup]],
    uint threads [[threads_per_threadgroup]]) {
  threadgroup atomic_int failed;
  if (index == 0) atomic_store_explicit(&failed, 0, memory_order_relaxed);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const uint first = block * INFO_BLOCK, end = min(first + INFO_BLOCK, count);
  int failures = 0;
#pragma unroll 4
  for (uint i = first + index; i < end; i += threads) failures |= info[i];
  if (failures != 0) atomic_store_explicit(&failed, 1, memory_order_relaxed);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (index == 0) found[block] = atomic_load_explicit(&failed, memory_order_relaxed);
}
