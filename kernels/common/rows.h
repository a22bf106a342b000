// Rows of numbers, four elements at a time in float32, shared by the threads of a simdgroup or of a threadgroup.
//
// Kernels over rows come in four variants, named for what works on one row:
//
//   thread   one thread, for tiny rows (and for all rows where a simdgroup is expensive, as on the simulator)
//   simd     one simdgroup, the row in registers (N float4 per thread); several rows per threadgroup
//   block    one threadgroup, the row in registers
//   looped   one threadgroup that walks the row twice, for rows of any length
#pragma once

#include <metal_stdlib>

using namespace metal;

// A thread that sums a long row does so block by block: rounding errors grow with the number of blocks, not of elements.
constexpr constant uint kSumBlock = 128;

// Elements i to i + 3 of a row; `otherwise` past its end. `aligned` (the same for a whole dispatch) says that each
// row begins at a multiple of four elements.
template <typename T>
inline float4 load4(device const T* row, uint i, uint length, bool aligned, float otherwise) {
  if (aligned && i + 4 <= length) return static_cast<float4>(*reinterpret_cast<device const vec<T, 4>*>(row + i));
  float4 value = float4(otherwise);
  for (uint k = 0; k < 4; ++k) {
    if (i + k < length) value[k] = static_cast<float>(row[i + k]);
  }
  return value;
}

template <typename T>
inline void store4(device T* row, uint i, uint length, bool aligned, float4 value) {
  if (aligned && i + 4 <= length) {
    *reinterpret_cast<device vec<T, 4>*>(row + i) = static_cast<vec<T, 4>>(value);
    return;
  }
  for (uint k = 0; k < 4; ++k) {
    if (i + k < length) row[i + k] = static_cast<T>(value[k]);
  }
}

inline float sum4(float4 v) { return (v.x + v.y) + (v.z + v.w); }
inline float max4(float4 v) { return max(max(v.x, v.y), max(v.z, v.w)); }

// Reductions over a threadgroup; every thread gets the result. `shared` has one element per simdgroup and is not used
// for anything else.
inline float block_sum(float value, threadgroup float* shared, uint lane, uint simdgroup, uint simdgroups) {
  value = simd_sum(value);
  if (lane == 0) shared[simdgroup] = value;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return simd_sum(lane < simdgroups ? shared[lane] : 0.0f);
}

inline float block_max(float value, threadgroup float* shared, uint lane, uint simdgroup, uint simdgroups) {
  value = simd_max(value);
  if (lane == 0) shared[simdgroup] = value;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return simd_max(lane < simdgroups ? shared[lane] : -INFINITY);
}
