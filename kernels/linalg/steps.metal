// Steps that several decompositions have in common: matrices are scaled to entries of about one before a QR
// decomposition whose norms might leave float32's range, and a batch is searched for a failed factorization.
#include <metal_stdlib>
using namespace metal;

#include "scalars.h"
#include "steps.h"

constant constexpr uint kSimdgroups = SCALE_THREADS / 32;

// The largest value of the threadgroup.
inline uint largest_of_all(uint value, threadgroup uint* found, uint thread_index) {
  value = simd_max(value);
  if (thread_index % 32 == 0) found[thread_index / 32] = value;
  threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
  for (uint i = 0; i < kSimdgroups; ++i) value = max(value, found[i]);
  return value;
}

// The largest magnitude of each part of a matrix, as bits, which compare as the numbers do, with NaN above all.
template <typename T>
[[kernel]] [[max_total_threads_per_threadgroup(SCALE_THREADS)]] void scale_magnitudes(
    device const T* a [[buffer(0)]], device uint* magnitudes [[buffer(1)]], constant ScaleParams& p [[buffer(2)]],
    uint group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]]) {
  threadgroup uint found[kSimdgroups];
  const uint first = group % p.parts * p.part_rows, end = min(first + p.part_rows, p.rows);
  device const T* const from = a + group / p.parts * p.batch_stride;
  uint most = 0;
  for (uint at = thread_index; at < (end - first) * p.columns; at += SCALE_THREADS) {
    const uint row = first + at / p.columns, column = at % p.columns;
    most = max(most, bits_of(from[row * p.row_stride + column * p.column_stride]));
  }
  most = largest_of_all(most, found, thread_index);
  if (thread_index == 0) magnitudes[group] = most;
}

// Writes the matrices times their scales, row-major, and the scales.
template <typename T>
[[kernel]] [[max_total_threads_per_threadgroup(SCALE_THREADS)]] void scale_matrices(
    device const T* a [[buffer(0)]], device const uint* magnitudes [[buffer(1)]], device T* out [[buffer(2)]],
    device float* scales [[buffer(3)]], constant ScaleParams& p [[buffer(4)]],
    uint group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]]) {
  threadgroup uint found[kSimdgroups];
  const uint matrix = group / p.parts, part = group % p.parts;
  const uint first = part * p.part_rows, end = min(first + p.part_rows, p.rows);
  device const T* const from = a + matrix * p.batch_stride;
  device T* const to = out + (ulong(matrix) * p.rows + first) * p.columns;
  uint most = 0;
  for (uint i = thread_index; i < p.parts; i += SCALE_THREADS) most = max(most, magnitudes[matrix * p.parts + i]);
  most = largest_of_all(most, found, thread_index);
  const float scale = scale_to_one(as_type<float>(most));
  for (uint at = thread_index; at < (end - first) * p.columns; at += SCALE_THREADS) {
    const uint row = first + at / p.columns, column = at % p.columns;
    to[at] = from[row * p.row_stride + column * p.column_stride] * scale;
  }
  if (part == 0 && thread_index == 0) scales[matrix] = scale;
}

#define INSTANTIATE(suffix, type)                                                           \
  template [[host_name("scale_magnitudes" suffix)]] [[kernel]] void scale_magnitudes<type>( \
      device const type*, device uint*, constant ScaleParams&, uint, uint);                 \
  template [[host_name("scale_matrices" suffix)]] [[kernel]] void scale_matrices<type>(     \
      device const type*, device const uint*, device type*, device float*, constant ScaleParams&, uint, uint);

INSTANTIATE("", float)
INSTANTIATE("_complex", float2)

// Whether any of the infos of a batch is not zero. A threadgroup reads INFO_BLOCK of them. A second dispatch reads the
// results of several threadgroups.
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
