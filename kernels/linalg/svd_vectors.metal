// The steps after svd_jacobi: left singular vectors of singular values that are zero, and products with Q.
#include <metal_stdlib>
using namespace metal;

#include "scalars.h"
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
template <typename T>
[[kernel]] [[max_total_threads_per_threadgroup(256)]] void svd_complete(
    device T* left [[buffer(0)]], device const uint* present [[buffer(1)]], constant SvdParams& p [[buffer(2)]],
    uint matrix [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]]) {
  threadgroup float partial[kSimdgroups];
  threadgroup uint partial_row[kSimdgroups];
  threadgroup T coefficients[kThreads];

  device T* const u = left + matrix * p.left.batch_stride;
  const long down = p.left.row_stride, across = p.left.column_stride;
  for (uint count = present[matrix]; count < p.columns; ++count) {
    float least = INFINITY;
    uint chosen = 0;
    for (uint row = thread_index; row < p.rows; row += kThreads) {
      float square = 0.0f;
      for (uint j = 0; j < count; ++j) square = add_square(square, u[row * down + j * across]);
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

    device T* const v = u + count * across;
    for (uint row = thread_index; row < p.rows; row += kThreads) v[row * down] = number<T>(row == chosen ? 1.0f : 0.0f);
    for (uint pass = 0; pass < 2; ++pass) {
      for (uint first = 0; first < count; first += kThreads) {
        threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup);
        const uint column = first + thread_index;
        T dot = T(0.0f);
        if (column < count)
          for (uint row = 0; row < p.rows; ++row)
            dot = add_product(dot, conjugate(u[row * down + column * across]), v[row * down]);
        coefficients[thread_index] = dot;
        threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup);
        const uint length = min(kThreads, count - first);
        for (uint row = thread_index; row < p.rows; row += kThreads) {
          T sum = T(0.0f);
          for (uint j = 0; j < length; ++j)
            sum = add_product(sum, u[row * down + (first + j) * across], coefficients[j]);
          v[row * down] -= sum;
        }
      }
      threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup);
      float square = 0.0f;
      for (uint row = thread_index; row < p.rows; row += kThreads) square = add_square(square, v[row * down]);
      const float factor = 1.0f / precise::sqrt(sum_of_all(square, partial, thread_index));
      for (uint row = thread_index; row < p.rows; row += kThreads) v[row * down] *= factor;
    }
    threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup);
  }
}

template [[host_name("svd_complete")]] [[kernel]] void svd_complete<float>(device float*, device const uint*,
                                                                           constant SvdParams&, uint, uint);
template [[host_name("svd_complete_complex")]] [[kernel]] void svd_complete<float2>(device float2*, device const uint*,
                                                                                    constant SvdParams&, uint, uint);

// A threadgroup makes a tile of SVD_MULTIPLY_TILE² of the product.
template <typename T>
[[kernel]] [[max_total_threads_per_threadgroup(256)]] void svd_multiply(
    device const T* a [[buffer(0)]], device const T* b [[buffer(1)]], device T* out [[buffer(2)]],
    constant SvdMultiplyParams& p [[buffer(3)]], uint group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  constexpr uint kTile = SVD_MULTIPLY_TILE;
  constexpr uint kRowsAtOnce = kThreads / kTile;
  constexpr uint kEach = kTile / kRowsAtOnce;
  threadgroup T a_tile[kTile][kTile + 1];
  threadgroup T b_tile[kTile][kTile + 1];

  const uint tile = group % (p.row_tiles * p.column_tiles);
  const uint matrix = group / (p.row_tiles * p.column_tiles);
  const uint first_row = tile / p.column_tiles * kTile, x = thread_index % kTile, y = thread_index / kTile;
  const uint column = tile % p.column_tiles * kTile + x;
  device const T* const from_a = a + matrix * p.a.batch_stride;
  device const T* const from_b = b + matrix * p.b.batch_stride;

  T sums[kEach];
#pragma unroll
  for (uint i = 0; i < kEach; ++i) sums[i] = T(0.0f);
  for (uint first = 0; first < p.inner; first += kTile) {
#pragma unroll
    for (uint i = 0; i < kEach; ++i) {
      const uint at = y + i * kRowsAtOnce, row = first_row + at;
      a_tile[at][x] = row < p.rows && first + x < p.inner
                          ? from_a[row * p.a.row_stride + (first + x) * p.a.column_stride]
                          : T(0.0f);
      b_tile[at][x] = first + at < p.inner && column < p.inner
                          ? from_b[(first + at) * p.b.row_stride + column * p.b.column_stride]
                          : T(0.0f);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint k = 0; k < kTile; ++k)
#pragma unroll
      for (uint i = 0; i < kEach; ++i) sums[i] = add_product(sums[i], a_tile[y + i * kRowsAtOnce][k], b_tile[k][x]);
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

template [[host_name("svd_multiply")]] [[kernel]] void svd_multiply<float>(device const float*, device const float*,
                                                                           device float*, constant SvdMultiplyParams&,
                                                                           uint, uint);
template [[host_name("svd_multiply_complex")]] [[kernel]] void svd_multiply<float2>(
    device const float2*, device const float2*, device float2*, constant SvdMultiplyParams&, uint, uint);
