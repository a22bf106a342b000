// The steps after svd_jacobi: left singular vectors of singular values that are zero, and products with Q.
#include <metal_stdlib>
using namespace metal;

#include "spectral.h"

constant constexpr uint kThreads = 256;
constant constexpr uint kSimdgroups = kThreads / 32;

inline float sum_of_all(float value, threadgroup float* partial, uint thread_index) {
  value = simd_sum(value);
  if (thread_index % 32 == 0) partial[thread_index / 32] = value;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float total = 0.0f;
  for (uint i = 0; i < kSimdgroups; ++i) total += partial[i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return total;
}

// Makes the left vectors after the first `present` ones. Each one comes from the unit vector that is furthest from the
// space of the vectors before, and is made orthogonal to them twice (Kahan and Parlett's "twice is enough").
[[kernel]] [[max_total_threads_per_threadgroup(256)]] void svd_complete(
    device float* left [[buffer(0)]], device const uint* present [[buffer(1)]], constant SvdParams& p [[buffer(2)]],
    uint matrix [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]]) {
  threadgroup float partial[kSimdgroups];
  threadgroup uint partial_row[kSimdgroups];
  threadgroup float coefficients[kThreads];

  device float* const u = left + matrix * p.left.batch_stride;
  const long down = p.left.row_stride, across = p.left.column_stride;
  for (uint count = present[matrix]; count < p.columns; ++count) {
    float least = INFINITY;
    uint chosen = 0;
    for (uint row = thread_index; row < p.rows; row += kThreads) {
      float square = 0.0f;
      for (uint j = 0; j < count; ++j) square = fma(u[row * down + j * across], u[row * down + j * across], square);
      if (square < least) {
        least = square;
        chosen = row;
      }
    }
    const float least_of_simdgroup = simd_min(least);
    chosen = simd_min(least == least_of_simdgroup ? chosen : UINT_MAX);
    if (thread_index % 32 == 0) {
      partial[thread_index / 32] = least_of_simdgroup;
      partial_row[thread_index / 32] = chosen;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint i = 0; i < kSimdgroups; ++i) {
      const bool better = i == 0 || partial[i] < least;
      least = better ? partial[i] : least;
      chosen = better ? partial_row[i] : chosen;
    }

    device float* const v = u + count * across;
    for (uint row = thread_index; row < p.rows; row += kThreads) v[row * down] = row == chosen ? 1.0f : 0.0f;
    for (uint pass = 0; pass < 2; ++pass) {
      for (uint first = 0; first < count; first += kThreads) {
        threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup);
        const uint column = first + thread_index;
        float dot = 0.0f;
        if (column < count)
          for (uint row = 0; row < p.rows; ++row) dot = fma(u[row * down + column * across], v[row * down], dot);
        coefficients[thread_index] = dot;
        threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup);
        const uint length = min(kThreads, count - first);
        for (uint row = thread_index; row < p.rows; row += kThreads) {
          float sum = 0.0f;
          for (uint j = 0; j < length; ++j) sum = fma(u[row * down + (first + j) * across], coefficients[j], sum);
          v[row * down] -= sum;
        }
      }
      threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup);
      float square = 0.0f;
      for (uint row = thread_index; row < p.rows; row += kThreads) square = fma(v[row * down], v[row * down], square);
      const float factor = 1.0f / precise::sqrt(sum_of_all(square, partial, thread_index));
      for (uint row = thread_index; row < p.rows; row += kThreads) v[row * down] *= factor;
    }
    threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup);
  }
}

// A threadgroup makes a tile of SVD_MULTIPLY_TILE² of the product.
[[kernel]] [[max_total_threads_per_threadgroup(256)]] void svd_multiply(
    device const float* a [[buffer(0)]], device const float* b [[buffer(1)]], device float* out [[buffer(2)]],
    constant SvdMultiplyParams& p [[buffer(3)]], uint group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  constexpr uint kTile = SVD_MULTIPLY_TILE;
  constexpr uint kRowsAtOnce = kThreads / kTile;
  constexpr uint kEach = kTile / kRowsAtOnce;
  threadgroup float a_tile[kTile][kTile + 1];
  threadgroup float b_tile[kTile][kTile + 1];

  const uint tile = group % (p.row_tiles * p.column_tiles);
  const uint matrix = group / (p.row_tiles * p.column_tiles);
  const uint first_row = tile / p.column_tiles * kTile, x = thread_index % kTile, y = thread_index / kTile;
  const uint column = tile % p.column_tiles * kTile + x;
  device const float* const from_a = a + matrix * p.a.batch_stride;
  device const float* const from_b = b + matrix * p.b.batch_stride;

  float sums[kEach];
#pragma unroll
  for (uint i = 0; i < kEach; ++i) sums[i] = 0.0f;
  for (uint first = 0; first < p.inner; first += kTile) {
#pragma unroll
    for (uint i = 0; i < kEach; ++i) {
      const uint at = y + i * kRowsAtOnce, row = first_row + at;
      a_tile[at][x] =
          row < p.rows && first + x < p.inner ? from_a[row * p.a.row_stride + (first + x) * p.a.column_stride] : 0.0f;
      b_tile[at][x] = first + at < p.inner && column < p.inner
                          ? from_b[(first + at) * p.b.row_stride + column * p.b.column_stride]
                          : 0.0f;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint k = 0; k < kTile; ++k)
#pragma unroll
      for (uint i = 0; i < kEach; ++i) sums[i] = fma(a_tile[y + i * kRowsAtOnce][k], b_tile[k][x], sums[i]);
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  if (column >= p.columns) return;
#pragma unroll
  for (uint i = 0; i < kEach; ++i) {
    const uint row = first_row + y + i * kRowsAtOnce;
    if (row >= p.rows) continue;
    out[matrix * p.out.batch_stride + row * p.out.row_stride + column * p.out.column_stride] =
        column < p.inner ? sums[i] : from_a[row * p.a.row_stride + column * p.a.column_stride];
  }
}
